"""`isomodels::moe_combine`: what a token gets from its experts and from the shared ones.

((w_0 y_0 + w_1 y_1) + ...) in slot order, then + shared or + sigmoid(gate) * shared, all in fp32
with one rounding.
"""

from typing import Any

import torch
from torch import Tensor

from isomodels.kernels.fixed_order import one_thread
from isomodels.kernels.router import sigmoid
from isomodels.kernels.schedule import Schedule, declare

SCHEDULE = declare(
    Schedule(
        operation="moe_combine",
        backend="torch",
        version=1,
        constants={
            "accumulate": "float32, products and sums rounded apart",
            "order": "slots from the first to the last, then the shared expert",
            "gate": "1 / (1 + exp(-logit)), times the shared output",
            "roundings": 1,
        },
    )
)

TRITON_SCHEDULE = declare(
    Schedule(
        operation="moe_combine",
        backend="triton",
        version=1,
        constants={
            "accumulate": "float32, products and sums rounded apart",
            "order": "slots from the first to the last, then the shared expert",
            "gate": "1 / (1 + exp(-logit)), the quotient to nearest, times the shared output",
            "exp": "the GPU's own power of two of x times log2(e)",
            "roundings": 1,
        },
    )
)


@torch.library.custom_op("isomodels::moe_combine", mutates_args=(), device_types="cpu")
def moe_combine(
    y: Tensor,
    weights: Tensor,
    places: Tensor,
    shared: Tensor | None = None,
    gate: Tensor | None = None,
) -> Tensor:
    """Weighted sum of a token's experts, plus the shared expert.

    Args:
        y: [R, H], outputs by place (see `moe_sort`), float32 or bfloat16; R = T * k.
        weights: [T, k] fp32.
        places: [T, k] int32, where each slot's output lies in `y`.
        shared: [T, H], dtype of `y`.
        gate: [T, 1] fp32, logit of the shared expert's factor; without it the factor is 1.

    Returns:
        [T, H] in the dtype of `y`.

    Raises:
        ValueError: naming shapes that do not fit.
        TypeError: for another dtype, or dtypes that differ.
    """
    check_combine(y, weights, places, shared, gate)
    with one_thread():
        total = y.new_zeros(len(places), y.shape[1], dtype=torch.float32)
        for slot, place in enumerate(places.long().unbind(1)):
            part = weights[:, slot : slot + 1] * y[place].float()
            total = part if slot == 0 else total + part  # 0 + -0 would be +0
        if shared is not None:
            added = shared.float()
            total = total + (added if gate is None else sigmoid(gate) * added)
        return total.to(y.dtype, copy=True)


def check_combine(
    y: Tensor, weights: Tensor, places: Tensor, shared: Tensor | None, gate: Tensor | None
) -> None:
    """Refuse what `moe_combine` cannot take.

    Raises:
        ValueError, TypeError: naming it.
    """
    if y.dim() != 2 or y.dtype not in (torch.float32, torch.bfloat16):
        raise TypeError(
            f"moe_combine needs outputs [T * k, H] in float32 or bfloat16, got {list(y.shape)} "
            f"in {y.dtype}"
        )
    if weights.dim() != 2 or weights.shape != places.shape or weights.numel() != len(y):
        raise ValueError(
            "moe_combine needs weights [T, k] and places [T, k] for outputs [T * k, H], got "
            f"{list(weights.shape)}, {list(places.shape)} and {list(y.shape)}"
        )
    if weights.dtype != torch.float32:
        raise TypeError(f"moe_combine needs weights in float32, got {weights.dtype}")
    rows, hidden = len(weights), y.shape[1]
    if shared is None:
        if gate is not None:
            raise ValueError("moe_combine needs a shared output for its gate")
        return
    if shared.shape != (rows, hidden) or shared.dtype != y.dtype:
        raise ValueError(
            f"moe_combine needs a shared output [{rows}, {hidden}] in {y.dtype}, got "
            f"{list(shared.shape)} in {shared.dtype}"
        )
    if gate is not None and (gate.shape != (rows, 1) or gate.dtype != torch.float32):
        raise ValueError(
            f"moe_combine needs a gate [{rows}, 1] in float32, got {list(gate.shape)} "
            f"in {gate.dtype}"
        )


@moe_combine.register_kernel("cuda")
def _(
    y: Tensor,
    weights: Tensor,
    places: Tensor,
    shared: Tensor | None = None,
    gate: Tensor | None = None,
) -> Tensor:
    from isomodels.kernels import moe_combine_triton

    check_combine(y, weights, places, shared, gate)
    return moe_combine_triton.moe_combine(y, weights, places, shared, gate)


@moe_combine.register_fake
def _(
    y: Tensor,
    weights: Tensor,
    places: Tensor,
    shared: Tensor | None = None,
    gate: Tensor | None = None,
) -> Tensor:
    return y.new_empty(places.shape[0], y.shape[1])


# An operator of its own, so that torch.compile need not look into Triton launches.
@torch.library.custom_op("isomodels::moe_combine_backward", mutates_args=(), device_types="cuda")
def moe_combine_backward(
    grad: Tensor,
    y: Tensor,
    weights: Tensor,
    places: Tensor,
    shared: Tensor | None,
    gate: Tensor | None,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Gradients of `moe_combine` on the GPU, from run to run the same.

    Args:
        grad: [T, H], of the sum.
        y, weights, places, shared, gate: as in the forward.

    Returns:
        (dy [R, H], dweights [T, k], dshared [T, H], dgate [T, 1]); the last two have no rows where
        there is no shared expert or no gate.
    """
    from isomodels.kernels import moe_combine_triton

    return moe_combine_triton.combine_backward(grad, y, weights, places, shared, gate)


@moe_combine_backward.register_fake
def _(
    grad: Tensor,
    y: Tensor,
    weights: Tensor,
    places: Tensor,
    shared: Tensor | None,
    gate: Tensor | None,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    dshared = y.new_empty(0 if shared is None else len(weights), y.shape[1])
    dgate = weights.new_empty(0 if gate is None else len(weights), 1)
    return y.new_empty(y.shape), weights.new_empty(weights.shape), dshared, dgate


def _setup_context(ctx: Any, inputs: tuple, output: Any) -> None:
    y, weights, places, *rest = inputs
    ctx.inputs = len(inputs)
    shared, gate = [*rest, None, None][:2]
    ctx.save_for_backward(y, weights, places, shared, gate)


def _backward(ctx: Any, grad: Tensor) -> tuple:
    dy, dweights, dshared, dgate = combine_gradients(grad, *ctx.saved_tensors)
    return (dy, dweights, None, dshared, dgate)[: ctx.inputs]


def combine_gradients(
    grad: Tensor,
    y: Tensor,
    weights: Tensor,
    places: Tensor,
    shared: Tensor | None,
    gate: Tensor | None,
) -> tuple[Tensor, Tensor, Tensor | None, Tensor | None]:
    """Gradients of `moe_combine`: (dy [R, H], dweights [T, k], dshared [T, H], dgate [T, 1])."""
    if grad.is_cuda:
        dy, dweights, dshared, dgate = moe_combine_backward(grad, y, weights, places, shared, gate)
        return dy, dweights, None if shared is None else dshared, None if gate is None else dgate
    grad = grad.float()
    dy, dweights = torch.empty_like(y), torch.empty_like(weights)
    for slot, place in enumerate(places.long().unbind(1)):
        dy[place] = (weights[:, slot : slot + 1] * grad).to(y.dtype)  # a place has one slot
        dweights[:, slot] = (grad * y[place].float()).sum(1)
    if shared is None:
        return dy, dweights, None, None
    if gate is None:
        return dy, dweights, grad.to(shared.dtype), None
    factor = sigmoid(gate)
    dgate = (grad * shared.float()).sum(1, keepdim=True) * factor * (1.0 - factor)
    return dy, dweights, (factor * grad).to(shared.dtype), dgate


moe_combine.register_autograd(_backward, setup_context=_setup_context)
