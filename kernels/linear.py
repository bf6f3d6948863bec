"""`isomodels::linear`: y = x W^T + b, sequential over K in fp32, one rounding at the end."""

from typing import Any

import torch
from torch import Tensor

from isomodels.kernels.fixed_order import TILE_COLUMNS, TILE_ROWS, matmul_nt, one_thread
from isomodels.kernels.schedule import Schedule, declare

SCHEDULE = declare(
    Schedule(
        operation="linear",
        backend="torch",
        version=1,
        constants={
            "accumulate": "float32",
            "k_partition": 1,
            "tile_rows": TILE_ROWS,
            "tile_columns": TILE_COLUMNS,
            "bias": "float32 before the rounding",
        },
    )
)

TRITON_SCHEDULE = declare(
    Schedule(
        operation="linear",
        backend="triton",
        version=1,
        constants={
            "accumulate": "float32 on the matrix units, K in order",
            "k_partition": 1,
            "float32_operands": "ieee",
            "bias": "float32 before the rounding",
        },
    )
)


@torch.library.custom_op("isomodels::linear", mutates_args=(), device_types="cpu")
def linear(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """Linear layer whose every element depends on one row of `x` and one row of `weight`.

    Args:
        x: [T, K], float32 or bfloat16.
        weight: [N, K], dtype of `x`.
        bias: [N], dtype of `x`, added in fp32 before the rounding.

    Returns:
        [T, N] in the dtype of `x`.

    Raises:
        ValueError: naming shapes that do not fit.
        TypeError: for another dtype, or dtypes that differ.
    """
    check_operands("linear", x, weight, bias)
    with one_thread():
        y = matmul_nt(x, weight)
        if bias is not None:
            y = y + bias.float()
        return y.to(x.dtype, copy=True)


def check_operands(operation: str, x: Tensor, weight: Tensor, bias: Tensor | None = None) -> None:
    """Refuse what a product x W^T (+ b) cannot take; `operation` is named in the message."""
    if x.dim() != 2 or weight.dim() != 2 or x.shape[1] != weight.shape[1]:
        raise ValueError(
            f"{operation} needs an input [T, K] and a weight [N, K], "
            f"got {list(x.shape)} and {list(weight.shape)}"
        )
    if x.dtype != weight.dtype or x.dtype not in (torch.float32, torch.bfloat16):
        raise TypeError(
            f"{operation} needs input and weight both float32 or both bfloat16, "
            f"got {x.dtype} and {weight.dtype}"
        )
    if bias is None:
        return
    if bias.shape != weight.shape[:1]:
        raise ValueError(
            f"{operation} needs a bias [N] for a weight [N, K], "
            f"got {list(bias.shape)} and {list(weight.shape)}"
        )
    if bias.dtype != x.dtype:
        raise TypeError(f"{operation} needs a bias of the input's {x.dtype}, got {bias.dtype}")


@linear.register_kernel("cuda")
def _(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    from isomodels.kernels import linear_triton

    check_operands("linear", x, weight, bias)
    return linear_triton.linear(x, weight, None if bias is None else bias.contiguous())


@linear.register_fake
def _(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    return x.new_empty(x.shape[0], weight.shape[0])


def _setup_context(ctx: Any, inputs: tuple, output: Any) -> None:
    x, weight, bias = inputs
    ctx.save_for_backward(x, weight)
    ctx.has_bias = bias is not None


def _backward(ctx: Any, grad: Tensor) -> tuple:
    x, weight = ctx.saved_tensors
    dx, dweight = product_gradients(grad, x, weight, *ctx.needs_input_grad[:2])
    dbias = grad.sum(0, dtype=torch.float32).to(weight.dtype) if ctx.has_bias else None  # [N]
    return dx, dweight, dbias


# Operators of their own, so that torch.compile need not look into Triton launches.
@torch.library.custom_op("isomodels::linear_input_gradient", mutates_args=(), device_types="cuda")
def linear_input_gradient(grad: Tensor, weight: Tensor) -> Tensor:
    """dX = dY W on the GPU: grad [T, N], weight [N, K] -> [T, K]."""
    from isomodels.kernels import linear_triton

    return linear_triton.input_gradient(grad, weight)


@torch.library.custom_op("isomodels::linear_weight_gradient", mutates_args=(), device_types="cuda")
def linear_weight_gradient(grad: Tensor, x: Tensor) -> Tensor:
    """dW = dY^T X on the GPU: grad [T, N], x [T, K] -> [N, K]."""
    from isomodels.kernels import linear_triton

    return linear_triton.weight_gradient(grad, x)


@linear_input_gradient.register_fake
def _(grad: Tensor, weight: Tensor) -> Tensor:
    return grad.new_empty(grad.shape[0], weight.shape[1])


@linear_weight_gradient.register_fake
def _(grad: Tensor, x: Tensor) -> Tensor:
    return grad.new_empty(grad.shape[1], x.shape[1])


def product_gradients(
    grad: Tensor, x: Tensor, weight: Tensor, needs_x: bool, needs_weight: bool
) -> tuple[Tensor | None, Tensor | None]:
    """Gradients of y = x W^T, from run to run the same.

    Args:
        grad: [T, N], of y.
        x: [T, K].
        weight: [N, K].
        needs_x: whether dx is asked for.
        needs_weight: whether dweight is asked for.

    Returns:
        (dx [T, K], dweight [N, K]); None for what is not asked for.
    """
    if grad.is_cuda:
        dx = linear_input_gradient(grad, weight) if needs_x else None
        return dx, linear_weight_gradient(grad, x) if needs_weight else None
    grad = grad.float()
    dx = (grad @ weight.float()).to(x.dtype) if needs_x else None
    dweight = (grad.t() @ x.float()).to(weight.dtype) if needs_weight else None
    return dx, dweight


linear.register_autograd(_backward, setup_context=_setup_context)
