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

_TRITON: dict[str, int | str] = {
    "accumulate": "float32, products and sums rounded apart",
    "sum": "neighbours first, zero-padded to a power of two",
    "inverse": "1 / sqrt, each rounded to nearest",
    "roundings": 1,
}
TRITON_SCHEDULE = declare(Schedule("rms_norm", "triton", 1, _TRITON))
TRITON_ADD_SCHEDULE = declare(
    Schedule(
        "add_rms_norm",
        "triton",
        1,
        {**_TRITON, "residual": "rounded to the model dtype before the norm"},
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


def _check(operation: str, x: Tensor, weight: Tensor, residual: Tensor | None = None) -> None:
    if weight.shape != x.shape[-1:]:
        raise ValueError(
            f"{operation} needs x [T, N] and a weight [N], "
            f"got {list(x.shape)} and {list(weight.shape)}"
        )
    if residual is not None and residual.shape != x.shape:
        raise ValueError(
            f"{operation} needs x and residual of one shape, "
            f"got {list(x.shape)} and {list(residual.shape)}"
        )


@torch.library.custom_op("isomodels::rms_norm", mutates_args=(), device_types="cpu")
def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """RMSNorm over the last axis.

    Args:
        x: [T, N], float32 or bfloat16.
        weight: [N].
        eps: added to the mean of squares.

    Returns:
        [T, N] in the dtype of `x`.

    Raises:
        ValueError: naming shapes that do not fit.
    """
    _check("rms_norm", x, weight)
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

    Raises:
        ValueError: naming shapes that do not fit.
    """
    _check("add_rms_norm", x, weight, residual)
    with one_thread():
        total = (x.float() + residual.float()).to(x.dtype)
        unit, _ = normalize(total.float(), eps)
        return (unit * weight.float()).to(x.dtype), total


@rms_norm.register_kernel("cuda")
def _(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    from isomodels.kernels import rms_norm_triton

    _check("rms_norm", x, weight)
    return rms_norm_triton.rms_norm(x, None, weight, eps)[0]


@add_rms_norm.register_kernel("cuda")
def _(x: Tensor, residual: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    from isomodels.kernels import rms_norm_triton

    _check("add_rms_norm", x, weight, residual)
    return rms_norm_triton.rms_norm(x, residual, weight, eps)


@rms_norm.register_fake
def _(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    return torch.empty_like(x)


@add_rms_norm.register_fake
def _(x: Tensor, residual: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    return torch.empty_like(x), torch.empty_like(x)


# An operator of its own, so that torch.compile need not look into Triton launches.
@torch.library.custom_op("isomodels::rms_norm_backward", mutates_args=(), device_types="cuda")
def rms_norm_backward(
    grad: Tensor, grad_total: Tensor | None, x: Tensor, weight: Tensor, eps: float
) -> tuple[Tensor, Tensor]:
    """`_norm_backward` on the GPU."""
    from isomodels.kernels import rms_norm_triton

    return rms_norm_triton.rms_norm_backward(grad, grad_total, x, weight, eps)


@rms_norm_backward.register_fake
def _(
    grad: Tensor, grad_total: Tensor | None, x: Tensor, weight: Tensor, eps: float
) -> tuple[Tensor, Tensor]:
    return x.new_empty(x.shape), weight.new_empty(weight.shape)


def _norm_backward(
    grad: Tensor, grad_total: Tensor | None, x: Tensor, weight: Tensor, eps: float
) -> tuple[Tensor, Tensor]:
    """(dx [T, N], with the residual stream's gradient added if there is one; dweight [N])."""
    if grad.is_cuda:
        return rms_norm_backward(grad, grad_total, x, weight, eps)
    unit, inverse_rms = normalize(x.float(), eps)
    grad = grad.float()
    dweight = (grad * unit).sum(0).to(weight.dtype)
    dx = normalize_backward(grad * weight.float(), unit, inverse_rms)
    if grad_total is not None:
        dx = dx + grad_total.float()
    return dx.to(x.dtype), dweight


def _setup_context(ctx: Any, inputs: tuple, output: Any) -> None:
    x, weight, ctx.eps = inputs
    ctx.save_for_backward(x, weight)


def _backward(ctx: Any, grad: Tensor) -> tuple:
    x, weight = ctx.saved_tensors
    dx, dweight = _norm_backward(grad, None, x, weight, ctx.eps)
    return dx, dweight, None


def _add_setup_context(ctx: Any, inputs: tuple, output: Any) -> None:
    _, _, weight, ctx.eps = inputs
    ctx.save_for_backward(output[1], weight)


def _add_backward(ctx: Any, grad: Tensor, grad_total: Tensor) -> tuple:
    total, weight = ctx.saved_tensors
    dx, dweight = _norm_backward(grad, grad_total, total, weight, ctx.eps)
    return dx, dx, dweight, None


rms_norm.register_autograd(_backward, setup_context=_setup_context)
add_rms_norm.register_autograd(_add_backward, setup_context=_add_setup_context)
