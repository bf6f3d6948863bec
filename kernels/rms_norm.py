"""`isomodels::rms_norm` and `isomodels::add_rms_norm`: RMSNorm, alone or after a residual add.

Mathematics: Zhang and Sennrich, "Root Mean Square Layer Normalization" (2019). All in fp32 with
one rounding at the end (transformers rounds once more, before the product with the weight).
"""

from typing import Any

import torch
from torch import Tensor

from isomodels.kernels.fixed_order import fold_sum, one_thread
from isomodels.kernels.schedule import Schedule, declare

SCHEDULE = declare(
    Schedule(
        operation="rms_norm",
        backend="torch",
        version=1,
        constants={"accumulate": "float32", "sum": "halving", "roundings": 1},
    )
)
ADD_SCHEDULE = declare(
    Schedule(
        operation="add_rms_norm",
        backend="torch",
        version=1,
        constants={
            "accumulate": "float32",
            "sum": "halving",
            "residual": "rounded to the model dtype before the norm",
            "roundings": 1,
        },
    )
)


def normalize(x: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """[..., N] fp32 -> (x / rms [..., N], 1 / rms [..., 1]); row by row, fixed order."""
    mean_square = fold_sum(x * x) / x.shape[-1]
    inverse_rms = (1.0 / torch.sqrt(mean_square + eps)).unsqueeze(-1)
    return x * inverse_rms, inverse_rms


def normalize_backward(grad: Tensor, unit: Tensor, inverse_rms: Tensor) -> Tensor:
    """Gradient of `normalize` in x, from its outputs; all [..., N] fp32."""
    projection = (grad * unit).mean(-1, keepdim=True)
    return (grad - unit * projection) * inverse_rms


@torch.library.custom_op("isomodels::rms_norm", mutates_args=(), device_types="cpu")
def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """RMSNorm over the last axis.

    Args:
        x: [T, N], float32 or bfloat16.
        weight: [N].
        eps: added to the mean of squares.

    Returns:
        [T, N] in the dtype of `x`.
    """
    with one_thread():
        unit, _ = normalize(x.float(), eps)
        return (unit * weight.float()).to(x.dtype)


@torch.library.custom_op("isomodels::add_rms_norm", mutates_args=(), device_types="cpu")
def add_rms_norm(x: Tensor, residual: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """Residual add, then RMSNorm of the rounded sum.

    Args:
        x: [T, N], float32 or bfloat16.
        residual: [T, N], dtype of `x`.
        weight: [N].
        eps: added to the mean of squares.

    Returns:
        (normed [T, N], residual + x [T, N]), both in the dtype of `x`.
    """
    with one_thread():
        total = (x.float() + residual.float()).to(x.dtype)
        unit, _ = normalize(total.float(), eps)
        return (unit * weight.float()).to(x.dtype), total


@rms_norm.register_fake
def _(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    return torch.empty_like(x)


@add_rms_norm.register_fake
def _(x: Tensor, residual: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    return torch.empty_like(x), torch.empty_like(x)


def _norm_backward(grad: Tensor, x: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """(dx [T, N] fp32, dweight [N])."""
    unit, inverse_rms = normalize(x.float(), eps)
    grad = grad.float()
    dweight = (grad * unit).sum(0).to(weight.dtype)
    return normalize_backward(grad * weight.float(), unit, inverse_rms), dweight


def _setup_context(ctx: Any, inputs: tuple, output: Any) -> None:
    x, weight, ctx.eps = inputs
    ctx.save_for_backward(x, weight)


def _backward(ctx: Any, grad: Tensor) -> tuple:
    x, weight = ctx.saved_tensors
    dx, dweight = _norm_backward(grad, x, weight, ctx.eps)
    return dx.to(x.dtype), dweight, None


def _add_setup_context(ctx: Any, inputs: tuple, output: Any) -> None:
    _, _, weight, ctx.eps = inputs
    ctx.save_for_backward(output[1], weight)


def _add_backward(ctx: Any, grad: Tensor, grad_total: Tensor) -> tuple:
    total, weight = ctx.saved_tensors
    dx, dweight = _norm_backward(grad, total, weight, ctx.eps)
    dx = (dx + grad_total.float()).to(total.dtype)
    return dx, dx, dweight, None


rms_norm.register_autograd(_backward, setup_context=_setup_context)
add_rms_norm.register_autograd(_add_backward, setup_context=_add_setup_context)
