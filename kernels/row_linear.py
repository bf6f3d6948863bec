"""`isomodels::row_linear`: a linear whose K is cut into leaves that are folded by a fixed tree.

Tensor parallelism gives each rank a part of K, so the order in which K is summed must not depend
on the number of ranks. K is cut into `LEAVES` equal contiguous leaves, each summed in fp32; the
leaves are folded by a balanced binary tree in fp32 and rounded once. A rank of 2, 4 or 8 owns
whole subtrees.
"""

from typing import Any

import torch
from torch import Tensor

from isomodels.kernels.fixed_order import TILE_COLUMNS, TILE_ROWS, matmul_nt, one_thread
from isomodels.kernels.linear import check_operands
from isomodels.kernels.schedule import Schedule, declare

LEAVES = 8

SCHEDULE = declare(
    Schedule(
        operation="row_linear",
        backend="torch",
        version=1,
        constants={
            "accumulate": "float32",
            "k_partition": LEAVES,
            "tree": "balanced binary, neighbours first",
            "tile_rows": TILE_ROWS,
            "tile_columns": TILE_COLUMNS,
        },
    )
)


@torch.library.custom_op("isomodels::row_linear", mutates_args=(), device_types="cpu")
def row_linear(x: Tensor, weight: Tensor) -> Tensor:
    """y = x W^T as a tree over `LEAVES` leaves of K.

    Args:
        x: [T, K], float32 or bfloat16; K divisible by `LEAVES`.
        weight: [N, K], dtype of `x`.

    Returns:
        [T, N] in the dtype of `x`.
    """
    check_operands(x, weight)
    if x.shape[1] % LEAVES:
        raise ValueError(f"row_linear needs K divisible by {LEAVES}, got K = {x.shape[1]}")
    with one_thread():
        leaves = zip(x.chunk(LEAVES, 1), weight.chunk(LEAVES, 1), strict=True)
        partials = [matmul_nt(x_leaf, w_leaf) for x_leaf, w_leaf in leaves]
        return tree_sum(partials).to(x.dtype, copy=True)


def tree_sum(partials: list[Tensor]) -> Tensor:
    """Fold neighbours pairwise until one is left; the count must be a power of two."""
    while len(partials) > 1:
        partials = [a + b for a, b in zip(partials[::2], partials[1::2], strict=True)]
    return partials[0]


@row_linear.register_fake
def _(x: Tensor, weight: Tensor) -> Tensor:
    return x.new_empty(x.shape[0], weight.shape[0])


def _setup_context(ctx: Any, inputs: tuple, output: Any) -> None:
    ctx.save_for_backward(*inputs)


def _backward(ctx: Any, grad: Tensor) -> tuple:
    x, weight = ctx.saved_tensors
    grad = grad.float()  # [T, N]
    dx = (grad @ weight.float()).to(x.dtype) if ctx.needs_input_grad[0] else None  # [T, K]
    dweight = (grad.t() @ x.float()).to(weight.dtype) if ctx.needs_input_grad[1] else None
    return dx, dweight


row_linear.register_autograd(_backward, setup_context=_setup_context)
