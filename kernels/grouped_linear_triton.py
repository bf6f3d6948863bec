"""Triton backend of `isomodels::grouped_linear` and of its backward."""

import torch
from torch import Tensor

from isomodels.kernels.grouped_gemm_triton import (
    FP32,
    GroupedConfig,
    grouped_gemm,
    grouped_weight_gradient,
)
from isomodels.kernels.moe_combine_triton import spread, sum_slots

# Tiles by the mean number of rows an expert, up to and including the key.
_FORWARD = {
    4: GroupedConfig(16, 64, 128, 5, 4, 1, occupancy=2),
    10: GroupedConfig(32, 128, 128, 4, 4, 1),
    96: GroupedConfig(64, 128, 128, 4, 4),
    160: GroupedConfig(64, 256, 64, 4, 4),
    1 << 30: GroupedConfig(128, 256, 64, 4, 8, subtiles=2),
}
_INPUT_GRADIENT = {64: GroupedConfig(64, 128, 64, 4, 4), 1 << 30: GroupedConfig(128, 256, 64, 3, 8)}
_WEIGHT_GRADIENT = {
    300: GroupedConfig(64, 256, 64, 4, 4),
    1 << 30: GroupedConfig(128, 256, 64, 4, 8, subtiles=2),
}


def tuning(
    table: dict[int, GroupedConfig], dtype: torch.dtype, rows: int, experts: int
) -> GroupedConfig:
    """The tiles for so many rows of so many experts; full fp32 has a single choice."""
    if dtype == torch.float32:
        return FP32
    mean = rows // max(experts, 1)
    return next(table[limit] for limit in sorted(table) if mean <= limit)


def grouped_linear(x: Tensor, weight: Tensor, offsets: Tensor, places: Tensor | None) -> Tensor:
    """y[r] = weight[e] x[r]; arguments and result as in `grouped_linear.py`."""
    # Rows of tokens are copied to their places: a product that reads them where they lie has the
    # slower loads of the two, by more than the copy costs.
    rows = x if places is None else spread(x, places)
    config = tuning(_FORWARD, x.dtype, len(rows), len(weight))
    return grouped_gemm(rows, weight, offsets, config)


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
