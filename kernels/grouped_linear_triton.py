"""Triton backend of `isomodels::grouped_linear` and of its backward."""

import torch
from torch import Tensor

from isomodels.kernels.grouped_gemm_triton import (
    FP32,
    GroupedConfig,
    can_gather,
    grouped_gemm,
    grouped_weight_gradient,
)
from isomodels.kernels.moe_combine_triton import spread, sum_slots

# Tiles by the mean number of rows an expert, up to and including the key.
_FORWARD = {
    12: GroupedConfig(16, 64, 256, 5, 4, 1, gather=1),
    40: GroupedConfig(32, 64, 256, 4, 4, 1, gather=1),
    96: GroupedConfig(64, 128, 128, 4, 4),
    1 << 30: GroupedConfig(128, 256, 64, 3, 8),
}
_INPUT_GRADIENT = {64: GroupedConfig(64, 128, 64, 4, 4), 1 << 30: GroupedConfig(128, 256, 64, 3, 8)}
_WEIGHT_GRADIENT = {1 << 30: GroupedConfig(128, 256, 64, 3, 8)}


def tuning(
    table: dict[int, GroupedConfig], dtype: torch.dtype, rows: int, experts: int
) -> GroupedConfig:
    """The tiles for so many rows of so many experts; full fp32 has a single choice."""
    if dtype == torch.float32:
        return FP32
    mean = rows // max(experts, 1)
    return next(table[limit] for limit in sorted(table) if mean <= limit)


def grouped_linear(
    x: Tensor, weight: Tensor, offsets: Tensor, order: Tensor | None, places: Tensor | None
) -> Tensor:
    """y[r] = weight[e] x[r]; arguments and result as in `grouped_linear.py`."""
    if order is None or places is None:
        config = tuning(_FORWARD, x.dtype, len(x), len(weight))
        return grouped_gemm(x, weight, offsets, config)
    config = tuning(_FORWARD, x.dtype, len(order), len(weight))
    if config.gather and can_gather(x, config):
        top_k = max(places.shape[1], 1)
        return grouped_gemm(x, weight, offsets, config, order=order, top_k=top_k)
    return grouped_gemm(spread(x, places), weight, offsets, config)


def grouped_linear_backward(
    grad: Tensor,
    x: Tensor,
    weight: Tensor,
    offsets: Tensor,
    places: Tensor | None,
    needs_x: bool,
    needs_weight: bool,
) -> tuple[Tensor, Tensor]:
    """(dx, dweight); arguments and results as in `grouped_linear.py`."""
    dx, dweight = x.new_empty(0), weight.new_empty(0)
    if needs_x:
        config = tuning(_INPUT_GRADIENT, x.dtype, len(grad), len(weight))
        dx = grouped_gemm(grad, weight, offsets, config, b_t=True)  # [R, K]
        if places is not None:
            dx = sum_slots(dx, places)  # [T, K]
    if needs_weight:
        config = tuning(_WEIGHT_GRADIENT, x.dtype, len(grad), len(weight))
        rows = x if places is None else spread(x, places)
        dweight = grouped_weight_gradient(grad, rows, offsets, len(weight), config)
    return dx, dweight
