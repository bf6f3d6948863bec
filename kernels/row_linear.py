"""`isomodels::row_linear`: a linear whose K is cut into leaves that are folded by a fixed tree.

Tensor parallelism gives each rank a part of K, so the order in which K is summed must not depend
on the number of ranks. K is cut into `LEAVES` equal contiguous leaves, each summed in fp32; the
leaves are folded by a balanced binary tree in fp32 and rounded once. A rank of 2 or 4 owns whole
subtrees.
"""

from typing import Any

import torch
from torch import Tensor

from isomodels.kernels.fixed_order import TILE_COLUMNS, TILE_ROWS, matmul_nt, one_thread
from isomodels.kernels.linear import check_operands, product_gradients
from isomodels.kernels.schedule import Schedule, declare

LEAVES = 4

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

TRITON_SCHEDULE = declare(
    Schedule(
        operation="row_linear",
        backend="triton",
        version=1,
        constants={
            "accumulate": "float32 on the matrix units, K of a leaf in order",
            "k_partition": LEAVES,
            "tree": "balanced binary, neighbours first, float32",
            "float32_operands": "ieee",
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
    _check_leaves(x, weight, LEAVES)
    return _subtree(x, weight, LEAVES).to(x.dtype, copy=True)


def row_linear_partial(x: Tensor, weight: Tensor, leaves: int) -> Tensor:
    """The sum of one subtree, before the rounding: what a rank of tensor parallelism sends.

    `tree_sum` of the partials of all ranks, in rank order, rounded once, has the bits of
    `row_linear` on the whole K.

    Args:
        x: [T, K of the subtree], float32 or bfloat16.
        weight: [N, K of the subtree], dtype of `x`.
        leaves: how many of the `LEAVES` leaves the subtree has: a power of two.

    Returns:
        [T, N] fp32.
    """
    _check_leaves(x, weight, leaves)
    if x.is_cuda:
        from isomodels.kernels import row_linear_triton

        return row_linear_triton.row_linear(x, weight, leaves, torch.float32)
    return _subtree(x, weight, leaves)


def _check_leaves(x: Tensor, weight: Tensor, leaves: int) -> None:
    check_operands("row_linear", x, weight)
    if not 1 <= leaves <= LEAVES or leaves & (leaves - 1):
        raise ValueError(f"a subtree has 1, 2, 4, ... up to {LEAVES} leaves, got {leaves}")
    if x.shape[1] % leaves:
        raise ValueError(f"row_linear needs K divisible by {leaves}, got K = {x.shape[1]}")


def _subtree(x: Tensor, weight: Tensor, leaves: int) -> Tensor:
    with one_thread():
        parts = zip(x.chunk(leaves, 1), weight.chunk(leaves, 1), strict=True)
        return tree_sum([matmul_nt(x_leaf, w_leaf) for x_leaf, w_leaf in parts])


def tree_sum(partials: list[Tensor]) -> Tensor:
    """Fold neighbours pairwise until one is left; the count must be a power of two."""
    while len(partials) > 1:
        partials = [a + b for a, b in zip(partials[::2], partials[1::2], strict=True)]
    return partials[0]


@row_linear.register_kernel("cuda")
def _(x: Tensor, weight: Tensor) -> Tensor:
    from isomodels.kernels import row_linear_triton

    _check_leaves(x, weight, LEAVES)
    return row_linear_triton.row_linear(x, weight, LEAVES, x.dtype)


@row_linear.register_fake
def _(x: Tensor, weight: Tensor) -> Tensor:
    return x.new_empty(x.shape[0], weight.shape[0])


def _setup_context(ctx: Any, inputs: tuple, output: Any) -> None:
    ctx.save_for_backward(*inputs)


def _backward(ctx: Any, grad: Tensor) -> tuple:
    return product_gradients(grad, *ctx.saved_tensors, *ctx.needs_input_grad)


row_linear.register_autograd(_backward, setup_context=_setup_context)
