"""What a `TransformerConfig` must not ask for: refused with one sentence, never ignored.

Megatron's layers do not run here, so three kinds of its fields remain: those that describe the
model, which must agree with the checkpoint; those of what the model does not do, which must be
off; and those that choose among implementations of Megatron's own layers (fusions, kernels,
dispatchers, overlap of communication inside a layer), which are free, as no bit depends on them.
`tests/megatron/test_every_field.py` fails for a field of a new version that is of no kind yet.
"""

from typing import Any

import torch
import torch.nn.functional as F

from isomodels.errors import ConfigError, UnsupportedError
from isomodels.megatron.layout import check_degrees

# What the model does not do, and the values that say so, the first of which a message names.
_NEUTRAL: dict[str, tuple[object, ...]] = {
    "context_parallel_size": (1,),
    "hierarchical_context_parallel_sizes": (None,),
    "hybrid_context_parallel": (False,),
    "gtp_weight_remat_size": (1,),
    "expert_gtp_weight_remat_size": (1,),
    # layers are divided evenly among the stages
    "num_layers_in_first_pipeline_stage": (None,),
    "num_layers_in_last_pipeline_stage": (None,),
    "pipeline_model_parallel_layout": (None,),
    "account_for_embedding_in_pipeline_split": (False,),
    "account_for_loss_in_pipeline_split": (False,),
    "mtp_standalone": (False,),
    "fp16": (False,),
    "fp8": (None,),
    "fp4": (None,),
    "enable_autocast": (False,),
    "quant_recipe": (None,),
    "use_kitchen": (False,),
    "use_kitchen_attention": (False,),
    "hidden_dropout": (0.0,),
    "attention_dropout": (0.0,),
    "batch_invariant_mode": (False,),
    "window_size": (None,),
    "mtp_num_layers": (None, 0),
    "multi_latent_attention": (False,),
    "experimental_attention_variant": (None,),
    "softmax_scale": (None,),
    "softmax_type": ("vanilla",),
    "rotary_interleaved": (False,),
    "no_rope_freq": (None,),
    "mrope_section": (None,),
    "attention_output_gate": (False,),
    "qk_l2_norm": (False,),
    "qk_clip": (False,),
    "log_max_attention_logit": (False,),
    "apply_query_key_layer_scaling": (False,),
    "apply_residual_connection_post_layernorm": (False,),
    "fp32_residual_connection": (False,),
    "layernorm_zero_centered_gamma": (False,),
    "activation_func_clamp_value": (None,),
    "glu_linear_offset": (0.0,),
    "use_mup": (False,),
    "is_hybrid_model": (False,),
    "heterogeneous_block_specs": (False,),
    "enable_cuda_graph": (False,),
    "external_cuda_graph": (False,),
    "cuda_graph_impl": ("none",),
    "cpu_offloading": (False,),
    "fine_grained_activation_offloading": (False,),
    "distribute_saved_activations": (False, None),
    "num_microbatches_with_partial_activation_checkpoints": (None,),
    "delay_wgrad_compute": (False,),
    "defer_embedding_wgrad_compute": (False,),
    "overlap_moe_expert_parallel_comm": (False,),
    "init_model_with_meta_device": (False,),
}
# The same of a model without experts, and of one with them.
_NEUTRAL_DENSE: dict[str, tuple[object, ...]] = {"num_moe_experts": (None,)}
_NEUTRAL_MOE: dict[str, tuple[object, ...]] = {
    # None becomes tensor_model_parallel_size, without experts too
    "expert_tensor_parallel_size": (1, None),
    "moe_router_load_balancing_type": ("none", "aux_loss"),
    "moe_router_dtype": (None, "fp32"),
    "moe_z_loss_coeff": (None, 0.0),
    "moe_input_jitter_eps": (None,),
    "moe_token_dropping": (False,),
    "moe_expert_capacity_factor": (None,),
    "moe_expert_rank_capacity_factor": (None,),
    "moe_pad_expert_input_to_capacity": (False,),
    "moe_apply_probs_on_input": (False,),
    "moe_latent_size": (None,),
    "moe_extended_tp": (False,),
    "moe_mlp_glu_interleave_size": (None,),
    "moe_shared_expert_glu_interleave_size": (None,),
    "moe_paged_stash": (False,),
    "moe_router_force_load_balancing": (False,),
    "moe_router_force_biased": (None,),
    "moe_router_topk_limited_devices": (None,),
    # isomodels.layers.routes records and replays
    "moe_enable_routing_replay": (False,),
    "moe_layer_recompute": (False,),
}


def architecture_fields(config: Any) -> dict[str, Any]:
    """The fields of `TransformerConfig` that the checkpoint decides."""
    fields = {} if config.routing is None else _moe_fields(config)
    return fields | {
        "num_layers": config.num_hidden_layers,
        "hidden_size": config.hidden_size,
        "ffn_hidden_size": config.intermediate_size,
        "num_attention_heads": config.num_attention_heads,
        "num_query_groups": config.num_key_value_heads,
        "kv_channels": config.head_dim,
        "normalization": "RMSNorm",
        "layernorm_epsilon": config.rms_norm_eps,
        "gated_linear_unit": True,
        "activation_func": F.silu,
        "add_bias_linear": False,
        "add_qkv_bias": config.attention_bias,
    }


def _moe_fields(config: Any) -> dict[str, Any]:
    routing, groups = config.routing, config.routing.n_group > 1
    return {
        "num_moe_experts": routing.num_experts,
        "moe_ffn_hidden_size": config.moe_intermediate_size,
        "moe_shared_expert_intermediate_size": config.shared_experts_size,
        "moe_shared_expert_gate": config.shared_experts_gated,
        "moe_layer_freq": [int(config.is_sparse(i)) for i in range(config.num_hidden_layers)],
        "moe_router_topk": routing.top_k,
        "moe_router_score_function": routing.scoring,
        # The softmax of the chosen logits is that of all, divided by its sum over the chosen.
        # (Megatron refuses the former for one expert.)
        "moe_router_pre_softmax": not routing.normalize or routing.top_k == 1,
        "moe_router_topk_scaling_factor": None if routing.scale == 1.0 else routing.scale,
        "moe_router_enable_expert_bias": routing.correction_bias,
        "moe_router_num_groups": routing.n_group if groups else None,
        "moe_router_group_topk": routing.topk_group if groups else None,
    }


def _layer_pattern(value: Any, num_layers: int) -> Any:
    """`moe_layer_freq` as a list: Megatron takes n for "every n-th layer, from the first"."""
    if not isinstance(value, int) or value < 1:
        return value
    return [int(i % value == 0) for i in range(num_layers)]


def check_transformer_config(built: Any, config: Any) -> None:
    """Refuses a `TransformerConfig` that asks for what the model does not do.

    Args:
        built: the `TransformerConfig`.
        config: the strict HF configuration of the checkpoint.

    Raises:
        ConfigError: where the two describe different models.
        UnsupportedError: for a feature without equal bits, or not implemented.
    """
    for name, expected in architecture_fields(config).items():
        value = getattr(built, name)
        if name == "moe_layer_freq":
            value = _layer_pattern(value, config.num_hidden_layers)
        if value != expected:
            raise ConfigError(f"TransformerConfig.{name} is {value}, the checkpoint has {expected}")
    family = _NEUTRAL_DENSE if config.routing is None else _NEUTRAL_MOE
    for name, allowed in (_NEUTRAL | family).items():
        value = getattr(built, name, allowed[0])
        if value not in allowed:
            raise UnsupportedError(
                f"isomodels does not support TransformerConfig.{name} = {value!r}; "
                f"set it to {allowed[0]!r}"
            )
    if built.params_dtype not in (torch.float32, torch.bfloat16):
        raise UnsupportedError(
            f"isomodels computes in float32 or bfloat16, not {built.params_dtype}"
        )
    if built.bf16 and built.params_dtype != torch.bfloat16:
        raise UnsupportedError("TransformerConfig.bf16 needs params_dtype = torch.bfloat16")
    if not isinstance(built.moe_aux_loss_coeff, int | float):
        raise UnsupportedError(
            f"TransformerConfig.moe_aux_loss_coeff = {built.moe_aux_loss_coeff} is no number, and "
            "isomodels has one load-balancing loss: give one coefficient"
        )
    _check_recompute(built)
    _check_parallel(built, config)


def _check_parallel(built: Any, config: Any) -> None:
    check_degrees(built, config)
    if built.sequence_parallel and built.tensor_model_parallel_size == 1:
        raise UnsupportedError(
            "sequence_parallel cuts among tensor parallel ranks: set tensor_model_parallel_size"
        )
    if built.pipeline_model_parallel_size > 1 and not built.variable_seq_lengths:
        raise UnsupportedError(
            "isomodels sends the residual stream beside the hidden states from stage to stage: "
            "set variable_seq_lengths to True"
        )
    if built.pipeline_model_parallel_size > 1 and built.pipeline_dtype != built.params_dtype:
        raise UnsupportedError(
            f"stages receive into pipeline_dtype {built.pipeline_dtype} what is sent in "
            f"params_dtype {built.params_dtype}: set both to the same"
        )
    if built.virtual_pipeline_model_parallel_size and not built.overlap_p2p_comm:
        raise UnsupportedError(
            "virtual pipeline stages exchange wrong tensors without overlap_p2p_comm: set it to "
            "True, and batch_p2p_comm to False"
        )


def _check_recompute(built: Any) -> None:
    if built.recompute_granularity is None:
        return
    if built.recompute_granularity != "full":
        raise UnsupportedError(
            "isomodels recomputes whole layers: set recompute_granularity to 'full'"
        )
    if built.recompute_method == "uniform" and built.recompute_num_layers != 1:
        raise UnsupportedError(
            "isomodels recomputes layer by layer: set recompute_num_layers to 1, "
            "or recompute_method to 'block'"
        )
