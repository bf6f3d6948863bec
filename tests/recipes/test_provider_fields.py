"""The fields that SkyRL and verl set on a provider of Megatron-Bridge before they build."""

import pytest
import torch

pytest.importorskip("megatron.core", reason="megatron-core is not installed")

from megatron.core.transformer.enums import AttnBackend

from isomodels.config import read_config
from isomodels.megatron import transformer_config
from isomodels.megatron.process import start_process, stop_process

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


@pytest.mark.parametrize("fields", BRIDGE_FIELDS)
def test_provider_and_distributed_model(checkpoint, fields):
    """As SkyRL and verl set their provider's fields; needs Megatron-Bridge."""
    pytest.importorskip("megatron.bridge", reason="megatron-bridge is not installed")
    from megatron.core.distributed import DistributedDataParallelConfig

    from isomodels.megatron.bridge import iso_bridge

    start_process()
    try:
        provider = iso_bridge(checkpoint, trust_remote_code=True).to_megatron_provider()
        for name, value in fields.items():
            setattr(provider, name, value)
        provider.finalize()
        ddp = DistributedDataParallelConfig(use_distributed_optimizer=True)
        (model,) = provider.provide_distributed_model(ddp_config=ddp, wrap_with_ddp=True, bf16=True)
        ids = torch.tensor([[1, 2, 3]])
        assert model(ids, None, None).shape == (1, 3, provider.vocab_size)
    finally:
        stop_process()


@pytest.mark.parametrize("fields", BRIDGE_FIELDS)
def test_their_fields_are_accepted(checkpoint, fields):
    """The same fields where Megatron-Bridge is missing: on Megatron's own configuration."""
    _, config = read_config(checkpoint)
    assert transformer_config(config, **fields).variable_seq_lengths
