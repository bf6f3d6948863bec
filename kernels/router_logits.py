"""Logits of a router or of a shared expert's gate: `isomodels::router_logits`.

The product is fp32 and is never rounded.
"""

from typing import Any

import torch
from torch import Tensor

from isomodels.kernels.fixed_order import TILE_COLUMNS, TILE_ROWS, matmul_nt, one_thread
from isomodels.kernels.linear import check_operands, product_gradients
from isomodels.kernels.schedule import Schedule, declare

SCHEDULE = declare(
    Schedule(
        operation="router_logits",
        backend="torch",
        version=1,
        constants={
            "logits": "float32, not rounded",
            "k_partition": 1,
            "tile_rows": TILE_ROWS,
            "tile_columns": TILE_COLUMNS,
        },
    )
)
TRITON_SCHEDULE = declare(
    Schedule(
        operation="router_logits",
        backend="triton",
        version=1,
        constants={
            "logits": "float32, not rounded",
            "accumulate": "float32 on the matrix units, K in order",
            "k_partition": 1,
            "float32_operands": "ieee",
        },
    )
)


@torch.library.custom_op("isomodels::router_logits", mutates_args=(), device_types="cpu")
def router_logits(x: Tensor, weight: Tensor) -> Tensor:
    """Logits of a router, or of a shared expert's gate.

    Args:
        x: [T, H], float32 or bfloat16.
        weight: [E, H], dtype of `x`.

    Returns:
        [T, E] fp32.

    Raises:
        ValueError: naming shapes that do not fit.
        TypeError: for another dtype, or dtypes that differ.
    """
    check_operands("router_logits", x, weight)
    with one_thread():
        return matmul_nt(x, weight).contiguous()


@router_logits.register_kernel("cuda")
def _(x: Tensor, weight: Tensor) -> Tensor:
    from isomodels.kernels import router_triton

    check_operands("router_logits", x, weight)
    return router_triton.router_logits(x, weight)


@router_logits.register_fake
def _(x: Tensor, weight: Tensor) -> Tensor:
    return x.new_empty(x.shape[0], weight.shape[0], dtype=torch.float32)


# An operator of its own, so that torch.compile need not look into Triton launches.
@torch.library.custom_op("isomodels::router_logits_backward", mutates_args=(), device_types="cuda")
def router_logits_backward(
    grad: Tensor, x: Tensor, weight: Tensor, needs_x: bool, needs_weight: bool
) -> tuple[Tensor, Tensor]:
    """Gradients of `router_logits` on the GPU, summed in fp32: grad [T, E] fp32.

    Returns:
        (dx [T, H], dweight [E, H]); of no elements where it is not asked for.
    """
    from isomodels.kernels import router_triton

    return router_triton.logits_backward(grad, x, weight, needs_x, needs_weight)


@router_logits_backward.register_fake
def _(
    grad: Tensor, x: Tensor, weight: Tensor, needs_x: bool, needs_weight: bool
) -> tuple[Tensor, Tensor]:
    dx = x.new_empty(x.shape if needs_x else (0,))
    return dx, weight.new_empty(weight.shape if needs_weight else (0,))


def _logits_setup(ctx: Any, inputs: tuple, output: Any) -> None:
    ctx.save_for_backward(*inputs)


def _logits_backward(ctx: Any, grad: Tensor) -> tuple:
    needed = ctx.needs_input_grad
    if not grad.is_cuda:
        return product_gradients(grad, *ctx.saved_tensors, *needed)
    gradients = router_logits_backward(grad, *ctx.saved_tensors, *needed)
    return tuple(g if wanted else None for g, wanted in zip(gradients, needed, strict=True))


router_logits.register_autograd(_logits_backward, setup_context=_logits_setup)
