"""The provider, its configuration, and what it refuses at the start."""

import importlib.metadata
import json
import shutil
import subprocess
import sys

import pytest
import torch

pytest.importorskip("megatron.core", reason="megatron-core is not installed")

from megatron.core.transformer.transformer_config import TransformerConfig

import isomodels.megatron
from isomodels.config import read_config
from isomodels.errors import CheckpointError, ConfigError, HostError, UnsupportedError
from isomodels.megatron import Trainer, model_provider
from isomodels.megatron.checks import check_transformer_config
from isomodels.megatron.provider import transformer_config
from tests.megatron.conftest import DTYPES


@pytest.mark.parametrize("dtype", list(DTYPES))
@pytest.mark.parametrize("kind", ["qwen3", "mimo", "qwen3_moe"])
def test_config_of_a_checkpoint(checkpoint, kind, dtype):
    _, hf_config = read_config(checkpoint(kind, dtype))
    config = transformer_config(hf_config, deterministic_mode=False)
    assert isinstance(config, TransformerConfig)
    assert config.num_query_groups == 2
    assert config.kv_channels == 32
    assert config.params_dtype == DTYPES[dtype]
    assert config.bf16 == (dtype == "bf16")
    assert config.add_qkv_bias == (kind == "mimo")


@pytest.mark.parametrize("kind", ["qwen3", "qwen3_tied", "mimo", "qwen3_moe"])
def test_row_76_the_config_that_comes_out_is_the_one_that_went_in(checkpoint, kind, tmp_path):
    """Row 76 of the field reports: a provider's defaults (padded vocabulary, ...) in the export."""
    source = checkpoint(kind, "fp32")
    with Trainer(source, dtype=torch.float32) as trainer:
        assert trainer.model.vocab_size == trainer.core.config.vocab_size
        trainer.save_hf(tmp_path / "out")
    before, after = (
        json.loads((p / "config.json").read_text()) for p in (source, tmp_path / "out")
    )
    assert after == before
    assert read_config(tmp_path / "out") == read_config(source)


ANY_LENGTH = {"variable_seq_lengths": True}


@pytest.mark.parametrize(
    "override",
    [
        {"context_parallel_size": 2},
        {"fp8": "hybrid"},
        {"hidden_dropout": 0.1},
        {"attention_dropout": 0.1},
        {"window_size": (128, 0)},
        {"num_moe_experts": 4},
        {"mtp_num_layers": 1},
        {"softmax_scale": 0.5},
        {"fp32_residual_connection": True},
        {"params_dtype": torch.float16},
    ],
    ids=lambda override: next(iter(override)),
)
def test_unsupported_features_are_named(checkpoint, override):
    _, hf_config = read_config(checkpoint("qwen3", "fp32"))
    name = "float16" if "params_dtype" in override else next(iter(override))
    with pytest.raises(UnsupportedError, match=name):
        transformer_config(hf_config, **override)


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ({"tensor_model_parallel_size": 3}, r"leaves .* summed: use 1$"),
        ({"tensor_model_parallel_size": 8}, r"heads: use 1$"),
        ({"pipeline_model_parallel_size": 2, **ANY_LENGTH}, r"the 3 layers: .* one of 1, 3"),
        ({"pipeline_model_parallel_size": 3}, "variable_seq_lengths to True"),
        (
            {
                "pipeline_model_parallel_size": 1,
                "virtual_pipeline_model_parallel_size": 3,
                **ANY_LENGTH,
            },
            "overlap_p2p_comm",
        ),
        ({"expert_model_parallel_size": 2}, "no experts, use 1"),
    ],
)
def test_degrees_that_do_not_divide(checkpoint, override, message):
    _, hf_config = read_config(checkpoint("qwen3", "fp32"))
    built = transformer_config(hf_config)
    for name, value in override.items():
        setattr(built, name, value)
    with pytest.raises(UnsupportedError, match=message):
        check_transformer_config(built, hf_config)


@pytest.mark.parametrize("name", ["fp16", "batch_invariant_mode", "sequence_parallel"])
def test_unsupported_switches_are_named(checkpoint, name):
    _, hf_config = read_config(checkpoint("qwen3", "fp32"))
    built = transformer_config(hf_config)
    setattr(built, name, True)
    with pytest.raises(UnsupportedError, match=name):
        check_transformer_config(built, hf_config)


@pytest.mark.parametrize(
    ("recompute", "message"),
    [
        ({"recompute_granularity": "selective"}, "recompute_granularity to 'full'"),
        (
            {
                "recompute_granularity": "full",
                "recompute_method": "uniform",
                "recompute_num_layers": 2,
            },
            "recompute_num_layers to 1",
        ),
    ],
)
def test_recompute_that_cannot_be_honoured(checkpoint, recompute, message):
    _, hf_config = read_config(checkpoint("qwen3", "fp32"))
    with pytest.raises(UnsupportedError, match=message):
        transformer_config(hf_config, **recompute)


def test_another_model_than_the_checkpoint(checkpoint):
    _, hf_config = read_config(checkpoint("qwen3", "fp32"))
    with pytest.raises(ConfigError, match="num_layers is 4, the checkpoint has 3"):
        transformer_config(hf_config, num_layers=4)
    with pytest.raises(ConfigError, match="no field tensor_parallel"):
        transformer_config(hf_config, tensor_parallel=1)


def test_the_whole_folder_is_checked_at_once(checkpoint, tmp_path):
    path = tmp_path / "copy"
    shutil.copytree(checkpoint("qwen3", "fp32"), path)
    weights = path / "model.safetensors"
    whole = weights.read_bytes()
    weights.write_bytes(whole[: len(whole) // 2])
    with pytest.raises(CheckpointError, match="truncated or damaged"):
        model_provider(path)
    weights.unlink()
    with pytest.raises(CheckpointError, match="has no weights"):
        model_provider(path)
    model_provider(path, load_weights=False)  # needs the config alone
    with pytest.raises(CheckpointError, match="there is no folder"):
        model_provider(tmp_path / "nothing")
    with pytest.raises(ConfigError, match=r"has no config\.json"):
        model_provider(tmp_path, load_weights=False)


def test_a_trainer_that_cannot_start_closes_itself(checkpoint, tmp_path):
    with pytest.raises(ConfigError, match=r"has no config\.json"):
        Trainer(tmp_path, dtype=torch.float32)
    with pytest.raises(CheckpointError, match="bfloat16 was asked for"):
        Trainer(checkpoint("qwen3", "fp32"), dtype=torch.bfloat16)
    with pytest.raises(UnsupportedError, match="float16"):
        Trainer(checkpoint("qwen3", "fp32"), dtype=torch.float16)
    with (
        Trainer(checkpoint("qwen3", "fp32"), dtype=torch.float32),
        pytest.raises(HostError, match="close the other Trainer first"),
    ):
        Trainer(checkpoint("qwen3", "fp32"), dtype=torch.float32)


def test_provider_refuses_pipeline_stages(checkpoint):
    provider = model_provider(checkpoint("qwen3", "fp32"))
    for arguments in ({"pre_process": False}, {"post_process": False}, {"vp_stage": 0}):
        with pytest.raises(UnsupportedError, match="pipeline"):
            provider(**arguments)


def test_the_model_shows_what_trainers_look_up(checkpoint):
    for kind in ("qwen3", "qwen3_tied"):
        with Trainer(checkpoint(kind, "bf16"), dtype=torch.bfloat16) as trainer:
            model = trainer.model
            tied = kind == "qwen3_tied"
            embedding = trainer.core.model.embed_tokens.weight
            head = embedding if tied else trainer.core.lm_head.weight
            assert model.pre_process
            assert model.post_process
            assert model.vp_stage is None
            assert model.share_embeddings_and_output_weights == tied
            assert model.embedding.word_embeddings.weight is embedding
            assert model.shared_embedding_or_output_weight() is embedding
            assert model.output_layer.weight is (None if tied else head)
            assert model.decoder.layers[2].mlp is trainer.core.model.layers[2].mlp
            assert "output_layer" in dict(model.named_children())
            assert "module" not in dict(model.named_children())
            assert model.pg_collection.tp.size() == 1
            names = set(model.state_dict_for_save_checkpoint())
            assert names == {f"core.{name}" for name in trainer.core.state_dict()}
            assert set(model.sharded_state_dict()) == names
            assert embedding.is_embedding_or_output_parameter
            assert getattr(embedding, "zero_out_wgrad", False) == tied


def test_no_cast_can_move_a_tensor(checkpoint):
    cast = pytest.raises(ValueError, match="casting it would change the result")
    with Trainer(checkpoint("qwen3", "fp32"), dtype=torch.float32) as trainer, cast:
        trainer.model.bfloat16()


def run(code: str) -> str:
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=120, check=True
    )
    return done.stdout.strip()


def test_import_isomodels_loads_no_megatron():
    code = "import sys, isomodels; print(any(m.startswith('megatron') for m in sys.modules))"
    assert run(code) == "False"


def test_providers_never_load_the_cpu_redirect():
    code = (
        "import sys, torch\nbefore = torch.cuda.current_device\n"
        "from isomodels.megatron import IsoLanguageModel, model_provider, transformer_config\n"
        "import isomodels.megatron.trainer\n"
        "print('isomodels.megatron.cpu_redirect' in sys.modules,"
        " torch.cuda.current_device is before)"
    )
    assert run(code) == "False True"


def test_missing_and_unchecked_versions(monkeypatch):
    def missing(name: str) -> str:
        raise importlib.metadata.PackageNotFoundError(name)

    monkeypatch.setattr(importlib.metadata, "version", missing)
    with pytest.raises(HostError, match=r"pip install 'isomodels\[megatron\]'"):
        isomodels.megatron.check_megatron()
    monkeypatch.setattr(importlib.metadata, "version", lambda name: "0.15.0")
    with pytest.raises(HostError, match=r"0\.15\.0 was not checked"):
        isomodels.megatron.check_megatron()
