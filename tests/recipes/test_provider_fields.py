"""From a checkpoint to a wrapped model through Megatron-Bridge, as SkyRL and verl call it."""

import importlib
import json
from dataclasses import replace

import pytest
import torch

pytest.importorskip("megatron.core", reason="megatron-core is not installed")

from megatron.core.distributed import DistributedDataParallelConfig
from megatron.core.transformer.enums import AttnBackend
from safetensors.torch import load_file
from torch import Tensor

from isomodels.config import read_config
from isomodels.contract import contract_of
from isomodels.contract.stored import read_stored
from isomodels.errors import ContractError, IsoError, UnsupportedError
from isomodels.megatron import Trainer, transformer_config
from isomodels.megatron.process import start_process, stop_process
from isomodels.weights_conv.files import CONTRACT
from tests.checkpoints import make_qwen3, make_qwen3_moe
from tests.recipes import bridge_stand_in
from tests.recipes.packed import assert_same, packed, rows_of

BRIDGE_FIELDS = [
    pytest.param(  # SkyRL
        {
            "tensor_model_parallel_size": 1,
            "pipeline_model_parallel_size": 1,
            "pipeline_dtype": torch.bfloat16,
            "context_parallel_size": 1,
            "expert_model_parallel_size": 1,
            "expert_tensor_parallel_size": 1,
            "sequence_parallel": False,
            "attention_backend": "flash",
            "variable_seq_lengths": True,
            "masked_softmax_fusion": True,
            "moe_token_dispatcher_type": "alltoall",
            "moe_router_load_balancing_type": "none",
            "moe_aux_loss_coeff": 0.0,
            "moe_router_dtype": "fp32",
            "moe_grouped_gemm": True,
            "moe_enable_routing_replay": False,
            "mtp_num_layers": None,
        },
        id="skyrl",
    ),
    pytest.param(  # verl
        {
            "params_dtype": torch.bfloat16,
            "fp16": False,
            "bf16": True,
            "sequence_parallel": False,
            "tensor_model_parallel_size": 1,
            "pipeline_model_parallel_size": 1,
            "expert_model_parallel_size": 1,
            "expert_tensor_parallel_size": None,
            "virtual_pipeline_model_parallel_size": None,
            "context_parallel_size": 1,
            "overlap_p2p_comm": False,
            "batch_p2p_comm": False,
            "attention_backend": AttnBackend.flash,
            "variable_seq_lengths": True,
            "moe_token_dispatcher_type": "alltoall",
            "moe_router_load_balancing_type": "none",
        },
        id="verl",
    ),
]


@pytest.fixture(params=["stand-in", "Megatron-Bridge"])
def iso_bridge(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch):
    if request.param == "stand-in":
        return bridge_stand_in.install(monkeypatch).iso_bridge
    pytest.importorskip("megatron.bridge", reason="megatron-bridge is not installed")
    return importlib.import_module("isomodels.megatron.bridge").iso_bridge


@pytest.fixture(scope="module")
def expected(checkpoint, sequences) -> list[Tensor]:
    """[len - 1] fp32 of each sequence, by a trainer of our own."""
    with Trainer(checkpoint, dtype=torch.bfloat16) as trainer:
        return trainer.score(sequences)


@pytest.mark.parametrize("load_weights", [True, False], ids=["by hook", "after the build"])
@pytest.mark.parametrize("fields", BRIDGE_FIELDS)
def test_provider_and_distributed_model(
    checkpoint, sequences, expected, iso_bridge, fields, load_weights
):
    """The provider's fields, `finalize`, `provide_distributed_model`, verl's `load_hf_weights`."""
    start_process()
    try:
        bridge = iso_bridge(checkpoint, trust_remote_code=True)
        provider = bridge.to_megatron_provider(load_weights=load_weights)
        for name, value in fields.items():
            setattr(provider, name, value)
        provider.finalize()
        ddp = DistributedDataParallelConfig(use_distributed_optimizer=True)
        models = provider.provide_distributed_model(ddp_config=ddp, wrap_with_ddp=True, bf16=True)
        if not load_weights:  # as verl loads
            bridge.load_hf_weights(models)
        ids, params = packed(sequences)
        with torch.no_grad():
            loss = models[0](ids, None, None, labels=ids.roll(-1, 1), packed_seq_params=params)
        for row, wanted in zip(rows_of(params, -loss[0], sequences), expected, strict=True):
            assert_same(row, wanted)
    finally:
        stop_process()


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("context_parallel_size", 2),
        ("num_layers", 7),
        ("should_pad_vocab", True),
        ("params_dtype", torch.float32),
    ],
)
def test_a_field_that_cannot_be_honoured_is_refused(checkpoint, iso_bridge, name, value):
    provider = iso_bridge(checkpoint).to_megatron_provider()
    setattr(provider, name, value)
    with pytest.raises(IsoError, match=name):
        provider.finalize()


def test_a_save_states_its_contract_and_another_is_refused(checkpoint, iso_bridge, tmp_path):
    start_process()
    try:
        bridge = iso_bridge(checkpoint)
        provider = bridge.to_megatron_provider()
        provider.finalize()
        models = provider.provide_distributed_model(wrap_with_ddp=False, bf16=True)
        bridge.save_hf_pretrained(models, tmp_path / "saved")
        for name, tensor in load_file(checkpoint / "model.safetensors").items():
            assert_same(load_file(tmp_path / "saved" / "model.safetensors")[name], tensor)
        stored = read_stored(tmp_path / "saved")
        digests = contract_of(checkpoint).digests
        assert stored.digests["numerical_policy"] == digests["numerical_policy"]
        assert stored.digests["semantic"] == digests["semantic"]
        policy = json.loads(stored.to_json())["numerical_policy"]
        policy["schedules"]["linear"]["version"] += 1
        text = replace(stored, numerical_policy=policy).to_json()
        (tmp_path / "saved" / CONTRACT).write_text(text)
        provider = iso_bridge(tmp_path / "saved").to_megatron_provider()
        provider.finalize()
        with pytest.raises(ContractError, match=r"schedules\.linear\.version"):
            provider.provide_distributed_model(wrap_with_ddp=False, bf16=True)
    finally:
        stop_process()


def test_experts_are_never_cut_and_a_dense_model_has_none(tmp_path):
    """What the frameworks leave open, Megatron sets to the degree of tensor parallelism."""
    given = {"tensor_model_parallel_size": 2, "expert_tensor_parallel_size": None}
    _, dense = read_config(make_qwen3(tmp_path / "dense", vocab_size=1024))
    _, experts = read_config(make_qwen3_moe(tmp_path / "experts", vocab_size=1024))
    assert transformer_config(dense, **given).expert_tensor_parallel_size == 2
    with pytest.raises(UnsupportedError, match="expert_tensor_parallel_size = 2; set it to 1"):
        transformer_config(experts, **given)
    given["expert_tensor_parallel_size"] = 1
    assert transformer_config(experts, **given).expert_tensor_parallel_size == 1
