"""Models and optimizer of a trainer, built and wrapped as Megatron's own set-up does."""

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from isomodels.config import read_config
from isomodels.megatron import resume
from isomodels.megatron.degrees import Degrees
from isomodels.megatron.grad_norm import count_rows_once
from isomodels.megatron.stages import unwrap

if TYPE_CHECKING:
    from isomodels.megatron.model import IsoLanguageModel


def build_models(
    checkpoint: Path,
    layout: Degrees,
    *,
    dtype: torch.dtype,
    recompute: bool,
    cast: bool,
    load_balancing: float,
    bias_update_rate: float,
) -> "list[IsoLanguageModel]":
    """The virtual stages of this rank, with their weights; arguments as of `Trainer`."""
    from isomodels.megatron.provider import model_provider, transformer_config

    overrides: dict[str, Any] = {
        "params_dtype": dtype,
        "calculate_per_token_loss": True,
        "moe_router_bias_update_rate": bias_update_rate,
        **layout.overrides(),
    }
    if recompute:
        overrides |= {
            "recompute_granularity": "full",
            "recompute_method": "uniform",
            "recompute_num_layers": 1,
        }
    if load_balancing:
        overrides |= {
            "moe_router_load_balancing_type": "aux_loss",
            "moe_aux_loss_coeff": load_balancing,
        }
    _, hf_config = read_config(checkpoint)
    config = transformer_config(hf_config, **overrides)
    provider = model_provider(checkpoint, cast=cast)
    return [provider(*ends, vp_stage=vp_stage, config=config) for *ends, vp_stage in _stages()]


def _stages() -> Iterator[tuple[bool, bool, int | None]]:
    """For each virtual stage of this rank: whether it is the first and the last of all, and its
    number (None without virtual ones)."""
    from megatron.core import parallel_state

    virtual = parallel_state.get_virtual_pipeline_model_parallel_world_size()
    first = parallel_state.is_pipeline_first_stage(ignore_virtual=True)
    last = parallel_state.is_pipeline_last_stage(ignore_virtual=True)
    if virtual is None:
        yield first, last, None
        return
    for number in range(virtual):
        yield first and number == 0, last and number == virtual - 1, number


def in_dtype(config: Any, model: "IsoLanguageModel") -> Any:
    """A model of bf16 in Megatron's wrapper for such; one of fp32 as it is."""
    from megatron.core.transformer.module import Float16Module

    return Float16Module(config, model) if config.bf16 else model


def wrap_models(
    models: "Sequence[IsoLanguageModel]", *, distributed_optimizer: bool, overlap: bool
) -> list[Any]:
    """Each model in Megatron's wrappers, whose functions their common config then names."""
    from megatron.core.distributed import (
        DistributedDataParallel,
        DistributedDataParallelConfig,
        finalize_model_grads,
    )

    config = models[0].config
    wrapped = [
        DistributedDataParallel(
            config=config,
            ddp_config=DistributedDataParallelConfig(
                grad_reduce_in_fp32=True,
                use_distributed_optimizer=distributed_optimizer,
                overlap_grad_reduce=overlap,
                overlap_param_gather=overlap and distributed_optimizer,
            ),
            module=in_dtype(config, model),
            disable_bucketing=number > 0,  # as in Megatron's own set-up of virtual stages
        )
        for number, model in enumerate(models)
    ]
    config.finalize_model_grads_func = finalize_model_grads
    if overlap:
        no_sync = [one.no_sync for one in wrapped]
        sync = [one.start_param_sync for one in wrapped] if distributed_optimizer else None
        single = len(wrapped) == 1
        config.no_sync_func = no_sync[0] if single else no_sync
        config.param_sync_func = sync[0] if sync and single else sync
    return wrapped


def build_optimizer(
    config: Any, wrapped: Sequence[Any], *, lr: float, weight_decay: float, clip_grad: float
) -> Any:
    """Megatron's Adam over the wrapped models of one config, repaired so that it can resume."""
    from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer

    data_parallel = wrapped[0].ddp_config
    optimizer = get_megatron_optimizer(
        OptimizerConfig(
            optimizer="adam",
            lr=lr,
            weight_decay=weight_decay,
            clip_grad=clip_grad,
            bf16=config.params_dtype == torch.bfloat16,
            params_dtype=config.params_dtype,
            use_distributed_optimizer=data_parallel.use_distributed_optimizer,
            overlap_param_gather=data_parallel.overlap_param_gather,
        ),
        wrapped,
    )
    resume.repair_torch_adam_resume(optimizer)
    count_rows_once(optimizer, [unwrap(one) for one in wrapped])
    config.grad_scale_func = optimizer.scale_loss
    return optimizer
