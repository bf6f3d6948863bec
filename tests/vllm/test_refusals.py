"""What cannot be had with equal bits is refused at start with one sentence."""

import json
import shutil
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from isomodels.errors import CheckpointError, ConfigError, UnsupportedError
from tests.checkpoints import make_mimo, make_qwen3
from tests.vllm.support import needs_v2_runner


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    return make_qwen3(tmp_path_factory.mktemp("refusals") / "model", num_hidden_layers=1)


def configure(model, **options):
    """vLLM's whole configuration, as the front end makes it, without an engine."""
    from vllm.engine.arg_utils import EngineArgs

    options = {"dtype": "float32", "max_model_len": 256, "model_impl": "isomodels", **options}
    return EngineArgs(model=str(model), **options).create_engine_config()


def test_accepted(checkpoint):
    config = configure(checkpoint)
    assert config.model_config.architecture == "IsoModelsQwen3ForCausalLM"
    assert config.model_config.logprobs_mode == "raw_logits"


NGRAM = {"method": "ngram", "num_speculative_tokens": 2, "prompt_lookup_max": 2}


OPTIONS: list[tuple[dict[str, Any], str]] = [
    ({"enable_lora": True}, "--enable-lora"),
    ({"speculative_config": NGRAM}, "--speculative-config"),  # row 19
    ({"quantization": "fp8"}, "--quantization"),
    ({"kv_cache_dtype": "fp8"}, "--kv-cache-dtype fp8"),
    ({"kv_cache_dtype": "bfloat16"}, "--kv-cache-dtype bfloat16"),
    ({"tensor_parallel_size": 2}, "--tensor-parallel-size 2"),
    ({"pipeline_parallel_size": 2}, "--pipeline-parallel-size 2"),
    ({"data_parallel_size": 2}, "--data-parallel-size 2"),
    ({"prefill_context_parallel_size": 2}, "--prefill-context-parallel-size 2"),
    ({"enable_dbo": True}, "--enable-dbo"),
    ({"ubatch_size": 2}, "--ubatch-size"),
    ({"expert_placement_strategy": "round_robin"}, "--expert-placement-strategy"),
    ({"enable_ep_weight_filter": True}, "--enable-ep-weight-filter"),
    ({"model_weights": "s3://bucket/model"}, "--model-weights"),
    ({"kv_sharing_fast_prefill": True}, "--kv-sharing-fast-prefill"),
    ({"hf_overrides": {"rope_theta": 5.0}}, "--hf-overrides"),
    ({"hf_overrides": lambda config: config}, "--hf-overrides"),
    ({"runner": "pooling"}, "--runner generate"),
    ({"enable_prompt_embeds": True}, "--enable-prompt-embeds"),
    ({"load_format": "dummy"}, "--load-format dummy"),
    ({"load_format": "pt"}, "--load-format pt"),
    ({"logprobs_mode": "raw_logits"}, "--logprobs-mode raw_logits"),
    ({"logprobs_mode": "processed_logits"}, "--logprobs-mode processed_logits"),
    ({"dtype": "float16"}, "--dtype float32"),  # row 31
    ({"dtype": "bfloat16"}, "--dtype float32"),
    ({"dtype": "auto"}, "--dtype float32"),
    ({"kv_offloading_size": 1.0}, "--kv-offloading-size"),
    ({"cpu_offload_gb": 1.0}, "--cpu-offload-gb"),
    ({"weight_transfer_config": {"backend": "ipc"}}, "--weight-transfer-config"),
    # another architecture's name: vLLM keeps the override for the rest of the process
    ({"model_class_overrides": {"NobodyForCausalLM": "a:B"}}, "--model-class-overrides"),
    (
        {"logprobs_mode": "processed_logprobs", "logits_processors": ["a:B"]},
        "logits processors",
    ),
]


@pytest.mark.parametrize(
    ("options", "named"),
    OPTIONS,
    ids=lambda value: "-".join(value) if isinstance(value, dict) else value,
)
def test_option(checkpoint, options, named):
    with pytest.raises(UnsupportedError) as error:
        configure(checkpoint, **options)
    message = str(error.value)
    assert named in message
    assert "\n" not in message
    assert len(message) < 200


@pytest.mark.parametrize(
    "options",
    [
        {"enable_sleep_mode": True},
        {"max_model_len": 4096},
    ],
    ids=str,
)
def test_refused_by_vllm_itself(checkpoint, options):
    with pytest.raises(ValueError, match=r"[Ss]leep mode|max_model_len"):
        configure(checkpoint, **options)


def test_row_4_sequence_parallel(checkpoint):
    """vLLM 0.32 does not know the option any more, and refuses it itself."""
    options = {"compilation_config": {"pass_config": {"enable_sp": True}}}
    with pytest.raises((UnsupportedError, ValueError), match="enable_sp"):
        configure(checkpoint, **options)


def test_row_1_batch_invariant_mode(checkpoint, monkeypatch):
    """It would put other operators under ours; on the CPU it cannot even run."""
    monkeypatch.setenv("VLLM_BATCH_INVARIANT", "1")
    with pytest.raises(UnsupportedError, match="VLLM_BATCH_INVARIANT"):
        configure(checkpoint)


def test_products_of_lower_precision(checkpoint, monkeypatch):
    monkeypatch.setenv("VLLM_FLOAT32_MATMUL_PRECISION", "high")
    with pytest.raises(UnsupportedError, match="VLLM_FLOAT32_MATMUL_PRECISION=high"):
        configure(checkpoint)


@pytest.mark.parametrize(
    ("option", "named"),
    [
        ({"enable_eplb": True}, "--enable-eplb"),
        ({"nnodes": 2}, "--nnodes"),
        ({"enable_batch_sharded_sampling": True}, "--enable-batch-sharded-sampling"),
        ({"distributed_executor_backend": "ray"}, "--distributed-executor-backend ray"),
        ({"distributed_executor_backend": "external_launcher"}, "external_launcher"),
    ],
    ids=lambda value: next(iter(value)) if isinstance(value, dict) else "",
)
def test_options_that_need_several_gpus(checkpoint, option, named):
    """vLLM refuses these itself on a CPU, where our hook would not see them."""
    from isomodels.vllm.checks import _parallel_refusals

    parallel = configure(checkpoint).parallel_config
    fields = {**vars(parallel), "tensor_parallel_size": 2}
    sentences = [
        sentence
        for refused, sentence in _parallel_refusals(SimpleNamespace(**{**fields, **option}))
        if refused
    ]
    assert len(sentences) == 1
    assert named in sentences[0]


def test_v2_runner_of_a_version_without_a_check(checkpoint, monkeypatch):
    from isomodels.vllm import checks

    monkeypatch.setenv("VLLM_USE_V2_MODEL_RUNNER", "1")
    monkeypatch.setattr(checks, "vllm_version", lambda: "0.31.0")
    with pytest.raises(UnsupportedError, match=r"0\.31\.0 .* VLLM_USE_V2_MODEL_RUNNER=0"):
        configure(checkpoint)


@needs_v2_runner
@pytest.mark.parametrize("mode", ["raw_logprobs", "processed_logprobs"])
def test_each_runner_gets_processors_of_its_own_kind(checkpoint, monkeypatch, mode):
    """vLLM refuses those of the other runner at start."""
    from vllm.v1.sample.logits_processor import LogitsProcessor
    from vllm.v1.worker.gpu.sample.logits_processor import LogitsProcessor as LogitsProcessorV2

    from isomodels.registry import load_object

    monkeypatch.setattr("vllm.config.vllm.HAS_TRITON", True)
    for v2, kind in ((0, LogitsProcessor), (1, LogitsProcessorV2)):
        monkeypatch.setenv("VLLM_USE_V2_MODEL_RUNNER", str(v2))
        names = configure(checkpoint, logprobs_mode=mode).model_config.logits_processors or ()
        assert bool(names) or (v2 and mode == "raw_logprobs")
        assert all(issubclass(load_object(name), kind) for name in names)


def test_longer_than_the_rope_table(checkpoint, monkeypatch):
    monkeypatch.setenv("VLLM_ALLOW_LONG_MAX_MODEL_LEN", "1")
    with pytest.raises(UnsupportedError, match="--max-model-len 4096"):
        configure(checkpoint, max_model_len=4096)


@pytest.mark.parametrize(
    ("fields", "error", "named"),
    [
        ({"rope_theta": None}, ConfigError, "rope_theta"),
        ({"rope_scaling": {"rope_type": "yarn", "factor": 4.0}}, ConfigError, "yarn"),
        ({"sliding_window": 64, "use_sliding_window": True}, ConfigError, "sliding_window"),
        ({"attention_bias": True}, ConfigError, "attention_bias"),
        ({"torch_dtype": "float16"}, ConfigError, "float16"),
        (
            {"architectures": ["LlamaForCausalLM"], "model_type": "llama"},
            UnsupportedError,
            "LlamaForCausalLM",
        ),
        (
            {"quantization_config": {"quant_method": "fp8", "activation_scheme": "dynamic"}},
            UnsupportedError,
            "quantised",
        ),
    ],
    ids=lambda value: next(iter(value)) if isinstance(value, dict) else "",
)
def test_config(tmp_path, fields, error, named):
    make_qwen3(tmp_path, num_hidden_layers=1, **fields)
    with pytest.raises(error, match=named):
        configure(tmp_path)


@pytest.mark.parametrize("damage", ["bin", "truncated", "missing", "left over", "shape", "dtype"])
def test_weights(checkpoint, tmp_path, damage):
    path = shutil.copytree(checkpoint, tmp_path / "model")
    file = path / "model.safetensors"
    tensors = load_file(file)
    if damage == "bin":
        file.rename(path / "pytorch_model.bin")
    elif damage == "truncated":
        file.write_bytes(file.read_bytes()[:-100])
    else:
        name = "model.layers.0.self_attn.k_proj.weight"
        if damage == "missing":
            del tensors[name]
        elif damage == "left over":
            tensors["model.layers.9.self_attn.k_proj.weight"] = tensors[name].clone()
        elif damage == "shape":
            tensors[name] = tensors[name][1:].clone()
        else:
            tensors[name] = tensors[name].to(torch.bfloat16)
        save_file(tensors, file, metadata={"format": "pt"})
    with pytest.raises(CheckpointError) as error:
        configure(path)
    expected = {"bin": "pytorch_model.bin", "truncated": "model.safetensors"}
    message = str(error.value)
    assert expected.get(damage, "k_proj") in message
    assert str(path) in message
    assert "\n" not in message


def test_tied_weights_that_differ(tmp_path):
    path = make_qwen3(tmp_path, tied=True, num_hidden_layers=1)
    tensors = load_file(path / "model.safetensors")
    tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"] + 1
    save_file(tensors, path / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(CheckpointError, match=rf"^{path}: the config ties lm_head\.weight"):
        configure(path)


def test_row_70_theta_of_both_config_forms(checkpoint, tmp_path):
    """transformers moved rope_theta; vLLM then ran with 10000. Ours is read from the file."""
    from isomodels.vllm.checks import read_checkpoint_config

    path = shutil.copytree(checkpoint, tmp_path / "model")
    fields = json.loads((path / "config.json").read_text())
    theta = fields.pop("rope_theta")
    del fields["rope_scaling"]
    fields["rope_parameters"] = {"rope_type": "default", "rope_theta": theta}
    (path / "config.json").write_text(json.dumps(fields))
    for folder in (checkpoint, path):
        _, config = read_checkpoint_config(configure(folder).model_config)
        assert config.rope_theta == theta == 1000000


def test_mimo_is_known_to_transformers_inside_vllm(tmp_path):
    make_mimo(tmp_path, torch.bfloat16, num_hidden_layers=1)
    config = configure(tmp_path, dtype="bfloat16").model_config
    assert config.architecture == "IsoModelsMiMoForCausalLM"
    assert config.hf_config.model_type == "mimo"
