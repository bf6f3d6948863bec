"""Megatron-Bridge: provider, strict loading, export, and the stock bridge left alone."""

import json
from functools import partial
from pathlib import Path

import pytest
import torch

pytest.importorskip("megatron.core", reason="megatron-core is not installed")
pytest.importorskip("megatron.bridge", reason="megatron-bridge is not installed")

import transformers
from megatron.bridge import AutoBridge
from megatron.bridge.models.conversion.model_bridge import get_model_bridge
from megatron.core.distributed import DistributedDataParallelConfig
from safetensors.torch import load_file, save_file

from isomodels.errors import CheckpointError, ConfigError, UnsupportedError
from isomodels.megatron import IsoLanguageModel, Trainer
from isomodels.megatron.packing import pack
from isomodels.megatron.process import start_process, stop_process
from isomodels.parity.checkpoints import random_checkpoint, tiny_config
from isomodels.registry import architectures
from tests.checkpoints import make_qwen3, make_qwen3_moe
from tests.megatron.bits import assert_same_bits
from tests.megatron.conftest import DTYPES
from tests.megatron.test_data_parallel import LAUNCH, run

STOCK = get_model_bridge._exact_types[transformers.Qwen3ForCausalLM]

from isomodels.megatron.bridge import IsoBridge, iso_bridge  # noqa: E402 (after the look above)


@pytest.fixture
def megatron():
    start_process()
    yield
    stop_process()


def test_the_stock_bridge_is_left_alone(checkpoint):
    assert get_model_bridge._exact_types[transformers.Qwen3ForCausalLM] is STOCK
    path = checkpoint("qwen3", "fp32")
    assert not isinstance(AutoBridge.from_hf_pretrained(path)._model_bridge, IsoBridge)
    assert isinstance(iso_bridge(path)._model_bridge, IsoBridge)


@pytest.mark.parametrize(
    ("kind", "dtype"),
    [("qwen3", "fp32"), ("qwen3_tied", "bf16"), ("qwen3", "bf16")],
)
def test_model_through_the_bridge(checkpoint, sequences, tmp_path, kind, dtype):
    path = checkpoint(kind, dtype)
    with Trainer(path, dtype=DTYPES[dtype]) as trainer:
        expected = trainer.score(sequences[2:3])[0]
    start_process()
    try:
        bridge = iso_bridge(path)
        provider = bridge.to_megatron_provider()
        provider.finalize()
        (model,) = provider.provide_distributed_model(
            ddp_config=DistributedDataParallelConfig(), bf16=dtype == "bf16"
        )
        inner = model.module.module if dtype == "bf16" else model.module
        assert isinstance(inner, IsoLanguageModel)
        (one,) = pack(sequences[2:3], 100)
        loss = model(one.input_ids, None, None, labels=one.targets, packed_seq_params=one.params)
        assert_same_bits(loss[0, :-1].neg(), expected)

        exported = dict(bridge.export_hf_weights([model], cpu=True, show_progress=False))
        original = load_file(path / "model.safetensors")
        assert exported.keys() == original.keys()
        for name, tensor in original.items():
            assert_same_bits(exported[name], tensor, name)

        bridge.save_hf_pretrained([model], tmp_path / "saved")
        saved = load_file(tmp_path / "saved" / "model.safetensors")
        assert saved.keys() == original.keys()
        for name, tensor in original.items():
            assert_same_bits(saved[name], tensor, name)
        assert (tmp_path / "saved/config.json").read_text() == (path / "config.json").read_text()
        plain = AutoBridge.from_hf_pretrained(path, architectures=["IsoQwen3ForCausalLM"])
        with pytest.raises(NotImplementedError):
            plain.save_hf_pretrained([model], tmp_path / "other")
    finally:
        stop_process()


@pytest.mark.parametrize("architecture", sorted(architectures().keys() - {"MiMoForCausalLM"}))
def test_every_architecture(sequences, tmp_path, architecture):
    path = random_checkpoint(tmp_path / "given", tiny_config(architecture), "bfloat16", seed=0)
    with Trainer(path, dtype=torch.bfloat16) as trainer:
        expected = trainer.score(sequences)
    start_process()
    try:
        bridge = iso_bridge(path)
        provider = bridge.to_megatron_provider()
        provider.finalize()
        ddp = DistributedDataParallelConfig(use_distributed_optimizer=True)
        models = provider.provide_distributed_model(ddp_config=ddp, bf16=True)
        (one,) = pack(sequences, 1000)
        with torch.no_grad():
            loss = models[0](
                one.input_ids, None, None, labels=one.targets, packed_seq_params=one.params
            )
        for (start, _), row in zip(one.bounds, expected, strict=True):
            assert_same_bits(loss[0, start : start + len(row)].neg(), row)
        exported = dict(bridge.export_hf_weights(models, cpu=True, show_progress=False))
        bridge.save_hf_pretrained(models, tmp_path / "saved")
    finally:
        stop_process()
    original = tensors_of(path)
    for found in (exported, tensors_of(tmp_path / "saved")):
        assert found.keys() == original.keys()
        for name, tensor in original.items():
            assert_same_bits(found[name], tensor, name)


def tensors_of(folder: Path) -> dict[str, torch.Tensor]:
    return {n: t for file in folder.glob("*.safetensors") for n, t in load_file(file).items()}


def test_refusals(checkpoint):
    path = checkpoint("qwen3", "fp32")
    for change, message in (
        ({"tensor_model_parallel_size": 2}, "leaves of a vocabulary of 512"),
        ({"pipeline_model_parallel_size": 2, "variable_seq_lengths": True}, "pipeline stages"),
        ({"pipeline_model_parallel_size": 3}, "variable_seq_lengths"),
        ({"should_pad_vocab": True}, "pad the vocabulary"),
        ({"seq_length": 4096}, "max_position_embeddings"),
        ({"params_dtype": torch.bfloat16}, "set cast to True"),
    ):
        provider = iso_bridge(path).to_megatron_provider()
        with pytest.raises(UnsupportedError, match=message):
            provider.apply_overrides_and_finalize(overrides=change)
    for name, other in (
        ("num_layers", 7),
        ("rotary_base", 10000.0),
        ("share_embeddings_and_output_weights", True),
    ):
        provider = iso_bridge(path).to_megatron_provider()
        with pytest.raises(ConfigError, match=name):
            provider.apply_overrides_and_finalize(overrides={name: other})
    with pytest.raises(UnsupportedError, match="model_provider"):
        iso_bridge(checkpoint("mimo", "fp32"))


def test_cast_is_asked_for(checkpoint, megatron):
    provider = iso_bridge(checkpoint("qwen3", "fp32")).to_megatron_provider()
    provider.apply_overrides_and_finalize(dtype=torch.bfloat16, overrides={"cast": True})
    (model,) = provider.provide_distributed_model(wrap_with_ddp=False, bf16=True)
    original = load_file(checkpoint("qwen3", "fp32") / "model.safetensors")
    weight = model.module.core.model.layers[0].mlp.down_proj.weight
    assert_same_bits(weight, original["model.layers.0.mlp.down_proj.weight"].bfloat16())


def test_a_left_over_tensor_is_an_error(tmp_path, megatron):
    path = make_qwen3(tmp_path / "more")
    tensors = load_file(path / "model.safetensors")
    tensors["model.layers.0.self_attn.q_proj.bias"] = torch.zeros(128)
    save_file(tensors, path / "model.safetensors", metadata={"format": "pt"})
    provider = iso_bridge(path).to_megatron_provider()
    provider.finalize()
    with pytest.raises(CheckpointError, match="left over"):
        provider.provide_distributed_model(wrap_with_ddp=False, bf16=False)


DENSE = partial(make_qwen3, tied=True, num_hidden_layers=4, vocab_size=1024)


@pytest.mark.parametrize(
    ("make", "layout"),
    [
        (DENSE, "tp2"),
        (DENSE, "tp2,sp"),
        (DENSE, "pp2"),
        (DENSE, "pp2,vpp2"),
        (make_qwen3_moe, "ep2,dp2"),
    ],
    ids=["tp2", "tp2-sp", "pp2", "pp2-vpp2", "ep2-dp2"],
)
def test_a_model_of_two_ranks(sequences, tmp_path, make, layout):
    path = make(tmp_path / "checkpoint", torch.bfloat16)
    with Trainer(path, dtype=torch.bfloat16) as trainer:
        expected = [row.view(torch.int32).tolist() for row in trainer.score(sequences)]
    job = {"checkpoint": str(path), "layout": layout, "sequences": sequences, "out": str(tmp_path)}
    run(*LAUNCH, str(Path(__file__).with_name("bridge_rank.py")), json.dumps(job))
    for rank in (0, 1):
        assert json.loads((tmp_path / f"{rank}.json").read_text()) == expected
    original = load_file(path / "model.safetensors")
    saved = load_file(tmp_path / "saved" / "model.safetensors")
    assert saved.keys() == original.keys()
    for name, tensor in original.items():
        assert_same_bits(saved[name], tensor, name)
