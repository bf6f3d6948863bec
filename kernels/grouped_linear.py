"""`isomodels::grouped_linear`: one linear an expert, each on its own rows.

A row's bits are those of `isomodels::linear` with the weight of its expert, whoever shares it.
"""

from itertools import pairwise
from typing import Any

import torch
from torch import Tensor

from isomodels.kernels.fixed_order import TILE_COLUMNS, TILE_ROWS, matmul_nt, one_thread
from isomodels.kernels.schedule import Schedule, declare

SCHEDULE = declare(
    Schedule(
        operation="grouped_linear",
        backend="torch",
        version=1,
        constants={
            "accumulate": "float32",
            "k_partition": 1,
            "tile_rows": TILE_ROWS,
            "tile_columns": TILE_COLUMNS,
        },
    )
)

TRITON_SCHEDULE = declare(
    Schedule(
        operation="grouped_linear",
        backend="triton",
        version=1,
        constants={
            "accumulate": "float32 on the matrix units, K in order",
            "k_partition": 1,
            "float32_operands": "ieee",
        },
    )
)


@torch.library.custom_op("isomodels::grouped_linear", mutates_args=(), device_types="cpu")
def grouped_linear(
    x: Tensor,
    weight: Tensor,
    offsets: Tensor,
    order: Tensor | None = None,
    places: Tensor | None = None,
) -> Tensor:
    """y[r] = weight[e] x[r], for the expert e that place r belongs to; nothing is padded.

    Args:
        x: with `order` [T, K], a row a token, read where its slots lie; else [R, K], a row a place.
            float32 or bfloat16.
        weight: [E, N, K], dtype of `x`.
        offsets: [E + 1] int32 from `moe_sort`, from 0 to R; or those of some neighbouring experts,
            whose weights `weight` then has. On a GPU no offset is looked at, since that would wait
            for the device.
        order: [R] int32 from `moe_sort`, R = T * k: place r reads row order[r] // k.
        places: [T, k] int32 from `moe_sort`, for the gradient; goes with `order`.

    Returns:
        [R, N] in the dtype of `x`; places of no expert here hold anything.

    Raises:
        ValueError: naming shapes that do not fit.
        TypeError: for another dtype, or dtypes that differ.
    """
    check_grouped(x, weight, offsets, order, places)
    rows = x if order is None or places is None else _gather(x, order, places)
    bounds = offsets.tolist()
    if bounds[-1] > len(rows):
        raise ValueError(
            f"grouped_linear: the offsets end at {bounds[-1]}, there are {len(rows)} rows"
        )
    y = torch.empty(len(rows), weight.shape[1], dtype=x.dtype, device=x.device)
    with one_thread():
        for expert, (start, end) in enumerate(pairwise(bounds)):
            if end > start:
                y[start:end] = matmul_nt(rows[start:end], weight[expert])
    return y


def check_grouped(
    x: Tensor, weight: Tensor, offsets: Tensor, order: Tensor | None, places: Tensor | None
) -> None:
    """Refuse what `grouped_linear` cannot take.

    Raises:
        ValueError, TypeError: naming it.
    """
    if x.dim() != 2 or weight.dim() != 3 or x.shape[1] != weight.shape[2]:
        raise ValueError(
            "grouped_linear needs an input [T, K] and a weight [E, N, K], "
            f"got {list(x.shape)} and {list(weight.shape)}"
        )
    if x.dtype != weight.dtype or x.dtype not in (torch.float32, torch.bfloat16):
        raise TypeError(
            "grouped_linear needs input and weight both float32 or both bfloat16, "
            f"got {x.dtype} and {weight.dtype}"
        )
    if offsets.shape != (len(weight) + 1,):
        raise ValueError(
            f"grouped_linear needs offsets [{len(weight) + 1}] for {len(weight)} experts, "
            f"got {list(offsets.shape)}"
        )
    if (order is None) != (places is None):
        raise ValueError("grouped_linear needs order and places together, or neither")
    if order is not None and places is not None:
        fits = places.dim() == 2 and len(places) == len(x) and order.shape == (places.numel(),)
        if not fits:
            raise ValueError(
                f"grouped_linear needs order [T * k] and places [T, k] for an input [T, K], got "
                f"{list(order.shape)}, {list(places.shape)} and {list(x.shape)}"
            )


def _gather(x: Tensor, order: Tensor, places: Tensor) -> Tensor:
    """[T, K] -> [R, K]: the token's row at each place."""
    return x[order.long() // max(places.shape[1], 1)]


@grouped_linear.register_kernel("cuda")
def _(
    x: Tensor,
    weight: Tensor,
    offsets: Tensor,
    order: Tensor | None = None,
    places: Tensor | None = None,
) -> Tensor:
    from isomodels.kernels import grouped_linear_triton

    check_grouped(x, weight, offsets, order, places)
    return grouped_linear_triton.grouped_linear(x, weight, offsets, places)


@grouped_linear.register_fake
def _(
    x: Tensor,
    weight: Tensor,
    offsets: Tensor,
    order: Tensor | None = None,
    places: Tensor | None = None,
) -> Tensor:
    rows = x.shape[0] if order is None else order.shape[0]
    return x.new_empty(rows, weight.shape[1])


def _setup_context(ctx: Any, inputs: tuple, output: Any) -> None:
    x, weight, offsets, *sorting = inputs
    ctx.inputs = len(inputs)
    order, places = sorting if len(sorting) == 2 else (None, None)
    ctx.save_for_backward(x, weight, offsets, order, places)


def _backward(ctx: Any, grad: Tensor) -> tuple:
    needs_x, needs_weight = ctx.needs_input_grad[:2]
    dx, dweight = grouped_linear_backward(grad, *ctx.saved_tensors, needs_x, needs_weight)
    rest = [None] * (ctx.inputs - 2)
    return dx if needs_x else None, dweight if needs_weight else None, *rest


# An operator of its own, since its loop over experts reads the offsets.
@torch.library.custom_op("isomodels::grouped_linear_backward", mutates_args=(), device_types="cpu")
def grouped_linear_backward(
    grad: Tensor,
    x: Tensor,
    weight: Tensor,
    offsets: Tensor,
    order: Tensor | None,
    places: Tensor | None,
    needs_x: bool,
    needs_weight: bool,
) -> tuple[Tensor, Tensor]:
    """Gradients of `grouped_linear`, from run to run the same.

    Args:
        grad: [R, N], of y.
        x, weight, offsets, order, places: as in the forward.
        needs_x: whether dx is asked for.
        needs_weight: whether dweight is asked for.

    Returns:
        (dx of the shape of x, its slots summed in fp32; dweight [E, N, K], zero for an expert
        without rows); of no elements where it is not asked for.
    """
    grad = grad.float()
    rows = (x if order is None or places is None else _gather(x, order, places)).float()
    drows = torch.empty_like(rows) if needs_x else None
    dweight = torch.zeros_like(weight) if needs_weight else weight.new_empty(0)
    for expert, (start, end) in enumerate(pairwise(offsets.tolist())):
        if end == start:
            continue
        if drows is not None:
            drows[start:end] = grad[start:end] @ weight[expert].float()
        if needs_weight:
            dweight[expert] = grad[start:end].t() @ rows[start:end]
    if drows is None:
        return x.new_empty(0), dweight
    dx = drows if places is None else sum_slots(drows, places)  # [R, K] -> [T, K]
    return dx.to(x.dtype), dweight


@grouped_linear_backward.register_kernel("cuda")
def _(
    grad: Tensor,
    x: Tensor,
    weight: Tensor,
    offsets: Tensor,
    order: Tensor | None,
    places: Tensor | None,
    needs_x: bool,
    needs_weight: bool,
) -> tuple[Tensor, Tensor]:
    from isomodels.kernels import grouped_linear_triton

    return grouped_linear_triton.grouped_linear_backward(
        grad, x, weight, offsets, places, needs_x, needs_weight
    )


@grouped_linear_backward.register_fake
def _(
    grad: Tensor,
    x: Tensor,
    weight: Tensor,
    offsets: Tensor,
    order: Tensor | None,
    places: Tensor | None,
    needs_x: bool,
    needs_weight: bool,
) -> tuple[Tensor, Tensor]:
    dx = x.new_empty(x.shape if needs_x else (0,))
    return dx, weight.new_empty(weight.shape if needs_weight else (0,))


def sum_slots(y: Tensor, places: Tensor) -> Tensor:
    """[R, K] fp32 by place -> [T, K] fp32, a token's slots added from the first to the last."""
    total = torch.zeros(len(places), y.shape[1], dtype=torch.float32, device=y.device)
    for slot in places.long().unbind(1):
        total = total + y[slot]
    return total


grouped_linear.register_autograd(_backward, setup_context=_setup_context)
