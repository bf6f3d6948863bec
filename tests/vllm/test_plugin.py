"""The plug-in: our class with the option, vLLM's own without it, a refusal elsewhere."""

import pickle
import subprocess
import sys
from dataclasses import replace

import pytest
import torch

from isomodels.errors import HostError
from isomodels.registry import get_spec
from isomodels.vllm import Engine, Request, patches, plugin, versions
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


@pytest.mark.parametrize("misspelt", ["isomodel", "IsoModels", "iso-models", "isomdels"])
def test_a_misspelt_option_does_not_serve_vllms_own_class(misspelt, checkpoint):
    from vllm.config import ModelConfig

    with pytest.raises(Exception, match=f"{misspelt}' is unknown: say 'isomodels'"):
        ModelConfig(str(checkpoint), model_impl=misspelt, skip_tokenizer_init=True)


@pytest.mark.parametrize("other", ["auto", "vllm", "transformers", "terratorch", "isoexec"])
def test_options_of_others_are_left_to_them(other):
    patches._refuse_misspelt(other)  # raises nothing


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


def test_register_twice(checkpoint):
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING
    from vllm.engine.arg_utils import EngineArgs
    from vllm.model_executor.models.registry import ModelRegistry, _ModelRegistry

    plugin.register()
    once = _ModelRegistry.resolve_model_cls
    mimo = CONFIG_MAPPING["mimo"]
    plugin.register()
    assert _ModelRegistry.resolve_model_cls is once
    assert not hasattr(once.__wrapped__, "__wrapped__")
    assert CONFIG_MAPPING["mimo"] is mimo
    for model_impl, prefix in (("auto", ""), ("isomodels", "IsoModels")):
        config = EngineArgs(
            model=str(checkpoint), dtype="float32", max_model_len=64, model_impl=model_impl
        ).create_model_config()
        info, name = ModelRegistry.inspect_model_cls(["Qwen3ForCausalLM"], config)
        assert name == prefix + "Qwen3ForCausalLM"
        assert info.is_text_generation_model


@pytest.fixture
def new_architecture(monkeypatch):
    """A spec of a `model_type` that transformers does not know."""
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING

    spec = replace(
        get_spec("MiMoForCausalLM"),
        architecture="BrandNewForCausalLM",
        model_type="brand_new",
        transformers="Qwen3ForCausalLM",
    )
    monkeypatch.setattr(plugin, "architectures", lambda: {spec.architecture: spec})
    yield spec
    CONFIG_MAPPING._extra_content.pop(spec.model_type, None)


def test_a_new_architecture_needs_its_spec_alone(new_architecture):
    from transformers import AutoConfig, Qwen3Config

    with pytest.raises(ValueError, match="brand_new"):
        AutoConfig.for_model("brand_new")
    plugin.register()
    plugin.register()
    config = AutoConfig.for_model("brand_new", hidden_size=48)
    assert isinstance(config, Qwen3Config)
    assert (type(config).__name__, config.model_type) == ("BrandNewConfig", "brand_new")
    assert config.hidden_size == 48
    assert type(pickle.loads(pickle.dumps(config))) is type(config)


def test_transformers_keeps_the_types_it_knows():
    from transformers import AutoConfig, Qwen3Config

    plugin.register()
    assert type(AutoConfig.for_model("qwen3")) is Qwen3Config


def test_config_reaches_a_process_before_the_plugin():
    """vLLM starts its engine with a pickled config where it does not fork."""
    from transformers import AutoConfig

    plugin.register()
    pickled = pickle.dumps(AutoConfig.for_model("mimo", hidden_size=48))
    code = (
        "import pickle, sys; config = pickle.load(sys.stdin.buffer);"
        "from isomodels.vllm import plugin; plugin.register();"
        "from transformers import AutoConfig;"
        "assert type(AutoConfig.for_model('mimo')) is type(config);"
        "sys.exit((config.model_type, config.hidden_size) != ('mimo', 48))"
    )
    assert subprocess.run([sys.executable, "-c", code], input=pickled, check=False).returncode == 0


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
    """The package, its plug-in and its version check import neither vLLM nor what it builds on."""
    code = (
        "import sys, isomodels, isomodels.vllm, isomodels.vllm.plugin, isomodels.vllm.versions;"
        "print(*{'vllm', 'torch', 'transformers'} & set(sys.modules))"
    )
    loaded = subprocess.run([sys.executable, "-c", code], check=True, capture_output=True)
    assert loaded.stdout.split() == []
