"""The plug-in: our class with the option, vLLM's own without it, a refusal elsewhere."""

import subprocess
import sys

import pytest
import torch

from isomodels.errors import HostError
from isomodels.vllm import Engine, Request, versions
from tests.checkpoints import make_qwen3
from tests.vllm.support import assert_equal_bits, draw, load_core

LIMITS = {"max_model_len": 256, "max_num_batched_tokens": 64}


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    return make_qwen3(tmp_path_factory.mktemp("plugin"), num_hidden_layers=2)


def test_without_the_option_vllm_is_as_it_was(checkpoint):
    with Engine(checkpoint, dtype="float32", model_impl="auto", **LIMITS) as engine:
        assert engine.model_class.endswith("vllm.model_executor.models.qwen3.Qwen3ForCausalLM")
        config = engine.llm.llm_engine.vllm_config
        assert config.model_config.architecture == "Qwen3ForCausalLM"
        assert config.model_config.logprobs_mode == "raw_logprobs"
        assert config.load_config.load_format == "auto"
        results = engine.run([Request(draw(60, 1), max_tokens=20, prompt_logprobs=True)])
        with pytest.raises(AssertionError, match="differ"):  # else these tests would show nothing
            assert_equal_bits(load_core(checkpoint), results)


def test_vllms_own_class_is_noticed(checkpoint, monkeypatch):
    """vLLM runs its own class for any option it does not know: so it would without the plug-in."""
    from vllm.model_executor.model_loader import utils
    from vllm.model_executor.models.registry import _ModelRegistry

    monkeypatch.setattr(utils, "_MODEL_ARCH_BY_HASH", {})
    for name in ("inspect_model_cls", "resolve_model_cls"):
        monkeypatch.setattr(_ModelRegistry, name, getattr(_ModelRegistry, name).__wrapped__)
    with pytest.raises(HostError, match=r"Qwen3ForCausalLM for model_impl='isomodels'"):
        Engine(checkpoint, dtype="float32", **LIMITS)


def test_row_14_defaults_of_a_server(checkpoint):
    """Compilation, custom operators and asynchronous scheduling change no bit."""
    options = {
        "enforce_eager": False,
        "async_scheduling": True,
        "compilation_config": {"custom_ops": ["all"]},
    }
    with Engine(checkpoint, dtype="float32", **LIMITS, **options) as engine:
        requests = [Request(draw(20 * i + 1, i), max_tokens=9, arrival=i) for i in range(6)]
        outputs = _generate(engine, requests)
    core = load_core(checkpoint)
    assert assert_equal_bits(core, outputs) == 54


def _generate(engine, requests):
    """Through `LLM.generate`: the account of `Engine` needs synchronous scheduling."""
    from vllm import SamplingParams

    from isomodels.vllm import Result, Token

    params = SamplingParams(max_tokens=9, logprobs=0, ignore_eos=True, detokenize=False)
    prompts = [{"prompt_token_ids": list(r.prompt)} for r in requests]
    results = []
    for i, output in enumerate(engine.llm.generate(prompts, params, use_tqdm=False)):
        (sample,) = output.outputs
        pairs = zip(sample.token_ids, sample.logprobs, strict=True)
        tokens = [Token(t, entry[t].logprob, 0, 0, 0, 0) for t, entry in pairs]
        results.append(Result(i, 0, tuple(output.prompt_token_ids), tokens))
    return results


def test_row_77_multimodal_input_is_refused(checkpoint):
    with Engine(checkpoint, dtype="float32", **LIMITS) as engine:
        prompt = {"prompt": "t1 t2", "multi_modal_data": {"image": torch.zeros(3, 8, 8)}}
        with pytest.raises(ValueError, match=r"(?i)multi-?modal"):
            engine.llm.generate(prompt, use_tqdm=False)
        (result,) = engine.run([Request(draw(5, 5), max_tokens=1)])
        assert_equal_bits(load_core(checkpoint), [result])


def test_register_twice():
    from vllm.model_executor.models.registry import ModelRegistry, _ModelRegistry

    from isomodels.vllm.plugin import register

    register()
    once = _ModelRegistry.resolve_model_cls
    register()
    assert _ModelRegistry.resolve_model_cls is once
    assert not hasattr(once.__wrapped__, "__wrapped__")
    assert ModelRegistry.is_text_generation_model


@pytest.fixture
def other_version(monkeypatch):
    monkeypatch.setattr(versions, "CHECKED_VERSIONS", ("0.31.9",))


def test_unchecked_version(checkpoint, other_version):
    from vllm.engine.arg_utils import EngineArgs

    with pytest.raises(HostError, match=r"checked on vLLM 0\.31\.9, not on 0\.3"):
        Engine(checkpoint, dtype="float32")
    options = {"model": str(checkpoint), "dtype": "float32", "max_model_len": 64}
    with pytest.raises(HostError, match="pip install"):
        EngineArgs(model_impl="isomodels", **options).create_engine_config()
    stock = EngineArgs(**options).create_engine_config()
    assert stock.model_config.architecture == "Qwen3ForCausalLM"


def test_no_vllm(monkeypatch):
    monkeypatch.setattr(versions, "vllm_version", lambda: None)
    with pytest.raises(HostError, match=r"pip install 'isomodels\[vllm\]'"):
        versions.check_vllm()


def test_import_is_cheap():
    """The package, its plug-in and its version check import neither vLLM nor torch's compiler."""
    code = (
        "import sys, isomodels, isomodels.vllm, isomodels.vllm.plugin, isomodels.vllm.versions;"
        "sys.exit('vllm' in sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
