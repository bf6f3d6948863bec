"""Builds the Megatron model of a checkpoint: the `model_provider` that Megatron's trainers take."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.transformer.transformer_config import TransformerConfig
from torch import nn

from isomodels.checkpoint import load_into, open_checkpoint
from isomodels.config import read_config
from isomodels.contract.operations import operators_of
from isomodels.contract.stored import require_stored
from isomodels.errors import ConfigError, UnsupportedError
from isomodels.layers.parallel import ALONE, Layout, check_layout
from isomodels.megatron.layout import check_degrees, layout_of
from isomodels.megatron.model import IsoLanguageModel
from isomodels.registry import ArchSpec, load_object
from isomodels.validate import require_validated

# What a TransformerConfig must say of everything that this model does not do. Fields that only
# choose an implementation of Megatron's own layers (fusions, attention_backend, transformer_impl,
# cross_entropy_loss_fusion) are free: none of those layers runs.
_NEUTRAL: dict[str, tuple[object, ...]] = {
    "context_parallel_size": (1,),
    "fp16": (False,),
    "fp8": (None,),
    "fp4": (None,),
    "enable_autocast": (False,),
    "quant_recipe": (None,),
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
    "delay_wgrad_compute": (False,),
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
    "moe_pad_expert_input_to_capacity": (False,),
    "moe_apply_probs_on_input": (False,),
    "moe_latent_size": (None,),
    "moe_router_force_load_balancing": (False,),
    "moe_router_topk_limited_devices": (None,),
    # isomodels.layers.routes records and replays
    "moe_enable_routing_replay": (False,),
    "moe_layer_recompute": (False,),
}


def transformer_config(config: Any, **overrides: Any) -> TransformerConfig:
    """Megatron's configuration of a model.

    Args:
        config: the strict HF configuration from `isomodels.config.read_config`.
        overrides: fields of `TransformerConfig` that win over the ones from `config`.

    Raises:
        ConfigError: for a name that `TransformerConfig` does not have.
        UnsupportedError: for a value that the model cannot honour.
    """
    dtype = overrides.get("params_dtype", config.torch_dtype)
    fields = {
        **architecture_fields(config),
        "hidden_dropout": 0.0,
        "attention_dropout": 0.0,
        "params_dtype": dtype,
        "pipeline_dtype": dtype,
        "bf16": dtype == torch.bfloat16,
        # no load balancing unless it is asked for
        **({} if config.routing is None else {"moe_router_load_balancing_type": "none"}),
        "moe_router_bias_update_rate": 0.0,
        **overrides,
    }
    unknown = sorted(fields.keys() - TransformerConfig.__dataclass_fields__.keys())
    if unknown:
        raise ConfigError(f"TransformerConfig has no field {', '.join(unknown)}")
    built = TransformerConfig(**fields)
    check_transformer_config(built, config)
    return built


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


def rank_layout(
    config: Any,
    hf_config: Any,
    pg_collection: Any | None,
    pre_process: bool | None,
    post_process: bool | None,
    vp_stage: int | None,
) -> Layout:
    """Which part of the model this rank holds, as a trainer asks its provider.

    Args:
        config: the `TransformerConfig`.
        hf_config: the strict HF configuration of the checkpoint.
        pg_collection: Megatron's process groups; the global ones by default.
        pre_process, post_process: whether it embeds and has the head; None for what the place says.
        vp_stage: which virtual stage, or None.

    Raises:
        UnsupportedError: for ends that do not fit the rank's place, or groups of other sizes than
            the config's.
    """
    needed = ["tp", "pp", "ep", "cp"]
    groups = pg_collection or ProcessGroupCollection.use_mpu_process_groups(needed)
    layout = layout_of(config, groups, hf_config.num_hidden_layers, vp_stage)
    ends = (layout.stage.embeds, layout.stage.heads)
    for asked, has in zip((pre_process, post_process), ends, strict=True):
        if asked is not None and asked != has:
            raise UnsupportedError(
                f"pre_process={pre_process} and post_process={post_process} do not fit this rank's "
                "place among the pipeline stages: layers are divided evenly, in order"
            )
    return layout


def build_core(
    spec: ArchSpec, config: Any, dtype: torch.dtype, layout: Layout = ALONE
) -> nn.Module:
    """The isomodels module of an architecture, for training, without weights.

    Args:
        spec, config: the architecture and its config.
        dtype: of the parameters.
        layout: which part of the model this rank holds.

    Raises:
        UnsupportedError: the device, kernels that do not pass their checks on it, or a layout that
            does not divide the model.
    """
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    require_validated(
        device,
        dtype=dtype,
        head_dim=config.common_head_dim,
        operators=operators_of(spec, config, dtype, device, "packed"),
    )
    model = load_object(spec.model)
    if layout.whole and not layout.tensor.sequence:
        return model(config, dtype=dtype, device=device, carry_mtp=True)
    check_layout(config, layout)
    return model(config, dtype=dtype, device=device, carry_mtp=True, layout=layout)


def model_provider(
    checkpoint: str | Path, *, load_weights: bool = True, cast: bool = False
) -> Callable[..., IsoLanguageModel]:
    """A provider for Megatron's `get_model` and for trainers that take one by path.

    Args:
        checkpoint: a Hugging Face checkpoint directory.
        load_weights: read its weights; without, they are whatever memory held.
        cast: allow a checkpoint of another dtype than `params_dtype`.

    Returns:
        `provider(pre_process=True, post_process=True, vp_stage=None, config=None,
        pg_collection=None)`; `config` defaults to `transformer_config` of the checkpoint.

        The provider raises ConfigError or UnsupportedError for a `config` that describes another
        model or asks for what is not implemented, UnsupportedError on a device where the kernels
        do not pass their checks, and CheckpointError for a `params_dtype` that the checkpoint does
        not have, without `cast`; ContractError for weights that a training wrote under another
        contract.

    Raises:
        ConfigError: for a config.json that cannot be read, or with a field that is missing,
            unknown or not implemented.
        UnsupportedError: for an architecture that isomodels does not have.
        CheckpointError: with `load_weights`, for damaged files, or tensors that do not fit the
            config.
    """
    if load_weights:
        opened = open_checkpoint(checkpoint)
        spec, hf_config = opened.spec, opened.config
        del opened  # the provider lives long: keep no file open
    else:
        spec, hf_config = read_config(checkpoint)

    def provider(
        pre_process: bool = True,
        post_process: bool = True,
        vp_stage: int | None = None,
        config: Any | None = None,
        pg_collection: Any | None = None,
    ) -> IsoLanguageModel:
        if config is None:
            config = transformer_config(hf_config)
        else:
            check_transformer_config(config, hf_config)
        layout = rank_layout(config, hf_config, pg_collection, pre_process, post_process, vp_stage)
        core = build_core(spec, hf_config, config.params_dtype, layout)
        if load_weights:
            dtype, device = config.params_dtype, next(core.parameters()).device
            require_stored(checkpoint, spec, hf_config, device, dtype=dtype, cast=cast)
            load_into(core, checkpoint, cast=cast)
        return IsoLanguageModel(config, core, pg_collection, vp_stage=vp_stage)

    return provider
