"""Triton backend of `isomodels::moe_combine`, and the ways from tokens to places and back.

A slot is one of the k choices of one token; its place is where `moe_sort` puts it. Launched with
`enable_fp_fusion=False`: products and sums are rounded apart.
"""

# Arguments of kernels have Triton's own types.
# mypy: disable-error-code="no-untyped-def"

import torch
import triton
import triton.language as tl
from torch import Tensor

from isomodels.kernels.common_triton import log2_ceil, rows_of
from isomodels.kernels.tensor_map_triton import cdiv

_BLOCK = 1024


@triton.jit
def _combine(
    y_ptr, weights_ptr, places_ptr, shared_ptr, gate_ptr, out_ptr,
    y_pitch, shared_pitch, width,
    TOP_K: tl.constexpr, WEIGHTED: tl.constexpr, SHARED: tl.constexpr, GATED: tl.constexpr,
    BLOCK: tl.constexpr,
):  # fmt: skip
    """Slots of one token in order, then the shared expert: one row, one block of columns."""
    row = tl.program_id(0).to(tl.int64)
    columns = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    mask = columns < width
    total = tl.zeros((BLOCK,), tl.float32)
    for slot in tl.static_range(TOP_K):
        place = tl.load(places_ptr + row * TOP_K + slot).to(tl.int64)
        part = tl.load(y_ptr + place * y_pitch + columns, mask=mask, other=0.0).to(tl.float32)
        if WEIGHTED:
            part = tl.load(weights_ptr + row * TOP_K + slot) * part
        if slot == 0:
            total = part  # 0 + -0 would be +0
        else:
            total = total + part
    if SHARED:
        added = tl.load(shared_ptr + row * shared_pitch + columns, mask=mask, other=0.0)
        added = added.to(tl.float32)
        if GATED:
            added = tl.div_rn(1.0, 1.0 + tl.exp(-tl.load(gate_ptr + row))) * added
        total = total + added
    tl.store(out_ptr + row * width + columns, total.to(out_ptr.dtype.element_ty), mask=mask)


@triton.jit
def _spread(
    x_ptr, places_ptr, out_ptr, pitch, out_pitch, width, TOP_K: tl.constexpr, BLOCK: tl.constexpr
):
    """A token's row to the places of its slots."""
    row = tl.program_id(0).to(tl.int64)
    columns = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    mask = columns < width
    x = tl.load(x_ptr + row * pitch + columns, mask=mask)
    for slot in tl.static_range(TOP_K):
        place = tl.load(places_ptr + row * TOP_K + slot).to(tl.int64)
        tl.store(out_ptr + place * out_pitch + columns, x, mask=mask)


@triton.jit
def _combine_backward(
    grad_ptr, y_ptr, weights_ptr, places_ptr, shared_ptr, gate_ptr,
    dy_ptr, dweights_ptr, dshared_ptr, dgate_ptr,
    grad_pitch, y_pitch, shared_pitch, width,
    TOP_K: tl.constexpr, SLOTS: tl.constexpr, SHARED: tl.constexpr, GATED: tl.constexpr,
    BLOCK: tl.constexpr,
):  # fmt: skip
    """All gradients of one token: [SLOTS, BLOCK] at a time."""
    row = tl.program_id(0).to(tl.int64)
    slots = tl.arange(0, SLOTS)
    real = slots < TOP_K
    places = tl.load(places_ptr + row * TOP_K + slots, mask=real, other=0).to(tl.int64)
    weights = tl.load(weights_ptr + row * TOP_K + slots, mask=real, other=0.0)
    dweights = tl.zeros((SLOTS, BLOCK), tl.float32)
    if GATED:
        factor = tl.div_rn(1.0, 1.0 + tl.exp(-tl.load(gate_ptr + row)))
        dgate = tl.zeros((BLOCK,), tl.float32)
    for begin in range(0, width, BLOCK):
        columns = begin + tl.arange(0, BLOCK)
        inside = columns < width
        mask = real[:, None] & inside[None, :]
        grad = tl.load(grad_ptr + row * grad_pitch + columns, mask=inside, other=0.0)
        grad = grad.to(tl.float32)
        y = tl.load(y_ptr + places[:, None] * y_pitch + columns[None, :], mask=mask, other=0.0)
        dweights += grad[None, :] * y.to(tl.float32)
        dy = (weights[:, None] * grad[None, :]).to(dy_ptr.dtype.element_ty)
        tl.store(dy_ptr + places[:, None] * width + columns[None, :], dy, mask=mask)
        if SHARED:
            at = dshared_ptr + row * width + columns
            if GATED:
                shared = tl.load(shared_ptr + row * shared_pitch + columns, mask=inside, other=0.0)
                dgate += grad * shared.to(tl.float32)
                grad = factor * grad
            tl.store(at, grad.to(dshared_ptr.dtype.element_ty), mask=inside)
    tl.store(dweights_ptr + row * TOP_K + slots, tl.sum(dweights, axis=1), mask=real)
    if GATED:
        tl.store(dgate_ptr + row, tl.sum(dgate) * factor * (1.0 - factor))


def moe_combine(
    y: Tensor, weights: Tensor, places: Tensor, shared: Tensor | None, gate: Tensor | None
) -> Tensor:
    """The weighted sum of each token's slots; arguments as in `moe_combine.py` -> [T, H]."""
    return _sum(y, weights.contiguous(), places, shared, gate)


def sum_slots(y: Tensor, places: Tensor) -> Tensor:
    """y [R, H] by place -> [T, H]: a token's slots added in fp32 from the first to the last."""
    return _sum(y, None, places, None, None)


def _sum(
    y: Tensor, weights: Tensor | None, places: Tensor, shared: Tensor | None, gate: Tensor | None
) -> Tensor:
    y, places = rows_of(y), places.contiguous()
    (rows, top_k), width = places.shape, y.shape[1]
    out = torch.empty(rows, width, dtype=y.dtype, device=y.device)
    if out.numel() == 0:
        return out
    shared = None if shared is None else rows_of(shared)
    block = min(_BLOCK, 1 << log2_ceil(width))
    # What is not there is never read; the output stands for it.
    _combine[(rows, cdiv(width, block))](
        y, out if weights is None else weights, places, out if shared is None else shared,
        out if gate is None else gate.contiguous(), out,
        y.stride(0), 0 if shared is None else shared.stride(0), width,
        TOP_K=top_k, WEIGHTED=weights is not None, SHARED=shared is not None,
        GATED=gate is not None, BLOCK=block, num_warps=4, enable_fp_fusion=False,
    )  # fmt: skip
    return out


def spread(x: Tensor, places: Tensor) -> Tensor:
    """x [T, K] -> [T * k, K]: the token's row at each place; rows that bulk copies can read."""
    x, places = rows_of(x), places.contiguous()
    (rows, top_k), width = places.shape, x.shape[1]
    unit = 16 // x.element_size()
    out = x.new_empty(rows * top_k, cdiv(width, unit) * unit)[:, :width]
    if out.numel():
        block = min(2 * _BLOCK, 1 << log2_ceil(width))
        _spread[(rows, cdiv(width, block))](
            x, places, out, x.stride(0), out.stride(0), width,
            TOP_K=top_k, BLOCK=block, num_warps=4,
        )  # fmt: skip
    return out


def combine_backward(
    grad: Tensor,
    y: Tensor,
    weights: Tensor,
    places: Tensor,
    shared: Tensor | None,
    gate: Tensor | None,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """(dy [R, H], dweights [T, k], dshared [T, H], dgate [T, 1]); no elements where not given."""
    grad, y, places, weights = rows_of(grad), rows_of(y), places.contiguous(), weights.contiguous()
    (rows, top_k), width = places.shape, y.shape[1]
    dy = torch.empty(y.shape, dtype=y.dtype, device=y.device)
    dweights = torch.empty_like(weights)
    shared = None if shared is None else rows_of(shared)
    dshared = y.new_empty(0 if shared is None else rows, width)
    dgate = weights.new_empty(0 if gate is None else rows, 1)
    if width == 0:
        return dy, dweights.zero_(), dshared, dgate.zero_()
    slots = 1 << log2_ceil(top_k)
    block = max(16, min(2 * _BLOCK // slots, 1 << log2_ceil(width)))
    if rows:
        _combine_backward[(rows,)](
            grad, y, weights, places, grad if shared is None else shared,
            weights if gate is None else gate.contiguous(), dy, dweights, dshared, dgate,
            grad.stride(0), y.stride(0), 0 if shared is None else shared.stride(0), width,
            TOP_K=top_k, SLOTS=slots, SHARED=shared is not None, GATED=gate is not None,
            BLOCK=block, num_warps=4,
        )  # fmt: skip
    return dy, dweights, dshared, dgate
