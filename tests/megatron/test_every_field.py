"""Each field of Megatron's config is of one kind, so that a new version brings none unnoticed.

A field describes the model, or asks for what is refused, or is honoured (proven elsewhere), or
moves no bit: those of the last kind are all changed at once, and the bits compared.
"""

import dataclasses
import re
from typing import Any

import pytest
import torch

pytest.importorskip("megatron.core", reason="megatron-core is not installed")

from megatron.core.transformer.transformer_config import TransformerConfig

from isomodels.config import read_config
from isomodels.errors import ConfigError, UnsupportedError
from isomodels.megatron import Trainer, checks, model_provider
from isomodels.megatron.provider import transformer_config
from tests.megatron.bits import assert_all_same_bits

REFUSED = {**checks._NEUTRAL, **checks._NEUTRAL_DENSE, **checks._NEUTRAL_MOE}
HONOURED = r"""
    (tensor|pipeline|virtual_pipeline|expert)_model_parallel_size|sequence_parallel
    params_dtype|pipeline_dtype|bf16|variable_seq_lengths|overlap_p2p_comm
    recompute_(granularity|method|num_layers)
    calculate_per_token_loss|moe_aux_loss_coeff|moe_router_bias_update_rate
"""
# What Megatron's schedules, wrappers and optimizers read around any model.
OF_THE_HOST = r"""
    timers|barrier_with_L1_time|config_logger_dir|deterministic_mode|test_mode|moe_per_layer_logging
    finalize_model_grads_func|no_sync_func|(grad|param)_sync_func|.*grad_scale_func
    pipeline_model_parallel_comm_backend|batch_p2p_.*|use_ring_exchange_p2p
    overlap_p2p_comm_warmup_flush|deallocate_pipeline_outputs|microbatch_group_size_per_vp_stage
"""
# Read only where a switch is on that is refused: by the name of the switch.
SPEAK_WITH = {
    "context_parallel_size": "cp_comm_type|max_seqlen_per_dp_cp_rank",
    "gtp_weight_remat_size": ".*num_weight_shards",
    "enable_autocast": "autocast_dtype",
    "fp8": "(activation_func_)?fp8_.*|tp_only_amax_red|first_last_layers_bf16|num_layers_at_.*"
    "|disable_parameter_transpose_cache|moe_router_padding_.*",
    "fp4": "fp4_.*",
    "use_kitchen_attention": "kitchen_attention_backend",
    "window_size": "window_attn_skip_freq",
    "qk_clip": "qk_clip_.*",
    "experimental_attention_variant": "dsa_.*|linear_.*|experimental_attention_variant_.*",
    "use_mup": "mup_.*",
    "mtp_num_layers": "mtp_.*",
    "is_hybrid_model": "mamba_.*|use_mamba_mem_eff_path",
    "heterogeneous_block_specs": "hetereogenous_dist_checkpoint",
    "cuda_graph_impl": "cuda_graph_.*",
    "cpu_offloading": "_?cpu_offloading_.*",
    "fine_grained_activation_offloading": "offload_modules|min_offloaded_.*|fine_grained_.*"
    "|activation_offload_.*|del(ay|ta)_offload_.*",
    "defer_embedding_wgrad_compute": "wgrad_deferral_limit",
    "overlap_moe_expert_parallel_comm": "ep_overlap_.*|high_priority_a2a_.*|overlap_dispatch_.*",
    "moe_paged_stash": "moe_paged_stash_.*",
    "moe_expert_capacity_factor": "moe_token_drop_policy",
    "moe_router_load_balancing_type": "moe_router_quantile_.*",
}
# Kernels and fusions of Megatron's own layers, none of which runs; and how weights are drawn that
# are then loaded (what norms a model has is said by its tensors).
OF_ITS_LAYERS = r"""
    transformer_impl|attention_backend|flash_attention_version|.*_fusion|fused_.*|use_fused_.*
    cross_entropy_fusion_impl|tp_comm_.*|async_tensor_model_parallel_allreduce|symmetric_ar_type
    use_te_.*|use_transformer_engine_op_fuser|persist_layer_norm|memory_efficient_layer_norm
    attention_softmax_in_fp32|disable_bf16_reduced_precision_matmul|qk_layernorm
    clone_scatter_output_in_embedding|mlp_chunks_for_.*|recompute_modules
    moe_(use_legacy_)?grouped_gemm|use_grouped_gemm_.*|moe_single_grouped_.*|moe_shared_expert_overlap
    moe_token_dispatcher_type|moe_(enable_)?(deepep|hybridep|ncclep).*|moe_flex_dispatcher_.*
    moe_permute_fusion_.*|moe_pad_experts_for_.*
    inference_.*|use_inference_.*|nccl_all_reduce_for_prefill|flash_decode
    perform_initialization|use_cpu_initialization|.*init_method(_std)?
"""
FREE = re.compile("|".join([*OF_ITS_LAYERS.split(), *SPEAK_WITH.values()]))
OTHERS = re.compile("|".join([*HONOURED.split(), *OF_THE_HOST.split()]))
FIELDS = {field.name for field in dataclasses.fields(TransformerConfig)}


def test_each_field_is_of_one_kind(checkpoint):
    configs = [read_config(checkpoint(kind, "fp32"))[1] for kind in ("qwen3", "qwen3_moe")]
    decided = {name for config in configs for name in checks.architecture_fields(config)}
    rest = FIELDS - decided - REFUSED.keys()
    unknown = sorted(n for n in rest if not (FREE.fullmatch(n) or OTHERS.fullmatch(n)))
    assert not unknown, "say in isomodels/megatron/checks.py or here what these fields mean"
    assert SPEAK_WITH.keys() <= REFUSED.keys()


def another(value: Any) -> Any:
    """A value of the same type, or a word where none says the type."""
    if isinstance(value, bool):
        return not value
    if isinstance(value, int | float):
        return value + 1
    return torch.float64 if isinstance(value, torch.dtype) else "another"


@pytest.mark.parametrize("kind", ["qwen3", "qwen3_moe"])
def test_each_refusal_names_its_field(checkpoint, kind):
    _, hf_config = read_config(checkpoint(kind, "fp32"))
    family = checks._NEUTRAL_DENSE if kind == "qwen3" else checks._NEUTRAL_MOE
    for name in sorted({*checks._NEUTRAL, *family} & FIELDS):
        built = transformer_config(hf_config)
        setattr(built, name, another(getattr(built, name)))
        with pytest.raises((UnsupportedError, ConfigError), match=name) as error:
            checks.check_transformer_config(built, hf_config)
        assert "\n" not in str(error.value)


@pytest.mark.parametrize(
    ("name", "value", "more"),
    [
        ("pipeline_dtype", torch.bfloat16, {"pipeline_model_parallel_size": 3}),
        ("moe_aux_loss_coeff", [0.1], {"moe_router_load_balancing_type": "aux_loss"}),
    ],
)
def test_values_of_honoured_fields_that_do_not_fit(checkpoint, name, value, more):
    _, hf_config = read_config(checkpoint("qwen3_moe", "fp32"))
    built = transformer_config(hf_config)
    for field, other in {"variable_seq_lengths": True, **more}.items():
        setattr(built, field, other)
    checks.check_transformer_config(built, hf_config)
    setattr(built, name, value)
    with pytest.raises(UnsupportedError, match=name):
        checks.check_transformer_config(built, hf_config)


@pytest.mark.parametrize("kind", ["qwen3", "qwen3_moe"])
def test_free_fields_move_no_bit(checkpoint, kind):
    """All of them at once, with values that nothing could read; gradients keep theirs, too."""
    path = checkpoint(kind, "bf16")
    ids = torch.randint(512, (2, 33), generator=torch.Generator().manual_seed(3))
    made = []
    with Trainer(path, dtype=torch.bfloat16) as trainer:
        for names in ((), sorted(filter(FREE.fullmatch, FIELDS - REFUSED.keys()))):
            config = transformer_config(trainer.core.config)
            for name in names:
                setattr(config, name, another(getattr(config, name)))
            model = model_provider(path)(config=config)
            logprobs = model.logprobs(ids, ids.roll(-1, 1))
            logprobs.sum().backward()
            made.append([logprobs, *(p.grad for p in model.parameters() if p.grad is not None)])
    assert config.transformer_impl == "another"
    assert len(made[0]) > 20
    assert_all_same_bits(*made)
