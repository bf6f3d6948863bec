"""Triton backend of `isomodels::moe_sort`: integers throughout, so exact in any order.

Slots in blocks: each block counts its experts, the counts are summed over the blocks before, then
each block finds its slots' places. No id is looked at on the host: one out of range counts as the
nearest expert.
"""

# Arguments of kernels have Triton's own types.
# mypy: disable-error-code="no-untyped-def"

import torch
import triton
import triton.language as tl
from torch import Tensor

from isomodels.kernels.common_triton import log2_ceil
from isomodels.kernels.tensor_map_triton import cdiv

_BLOCK = 128  # slots
_EXPERTS, _BLOCKS = 8, 64  # summed at once


@triton.jit
def _load_ids(ids_ptr, slots, count, EXPERTS: tl.constexpr):
    """Ids in range, also of slots that do not exist."""
    ids = tl.load(ids_ptr + slots, mask=slots < count, other=0)
    return tl.minimum(tl.maximum(ids, 0), EXPERTS - 1)


@triton.jit(do_not_specialize=["count"])
def _count(
    ids_ptr, counts_ptr, count, EXPERTS: tl.constexpr, WIDTH: tl.constexpr, BLOCK: tl.constexpr
):
    """counts [blocks, EXPERTS]: slots of each expert in this block."""
    slots = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    found = tl.histogram(_load_ids(ids_ptr, slots, count, EXPERTS), WIDTH, mask=slots < count)
    experts = tl.arange(0, WIDTH)
    to = counts_ptr + tl.program_id(0) * EXPERTS + experts
    tl.store(to, found, mask=experts < EXPERTS)


@triton.jit(do_not_specialize=["blocks"])
def _sum_blocks(
    counts_ptr, totals_ptr, blocks,
    EXPERTS: tl.constexpr, WIDTH: tl.constexpr, BLOCKS: tl.constexpr,
):  # fmt: skip
    """Some experts: counts [blocks, EXPERTS] become those of the blocks before; their totals."""
    experts = tl.program_id(0) * WIDTH + tl.arange(0, WIDTH)
    real = experts < EXPERTS
    total = tl.zeros((WIDTH,), tl.int32)
    for begin in range(0, blocks, BLOCKS):
        at = begin + tl.arange(0, BLOCKS)
        mask = (at < blocks)[:, None] & real[None, :]
        to = counts_ptr + at[:, None] * EXPERTS + experts[None, :]
        counts = tl.load(to, mask=mask, other=0)
        before = tl.cumsum(counts, axis=0) - counts + total[None, :]
        tl.store(to, before, mask=mask)
        total += tl.sum(counts, axis=0)
    tl.store(totals_ptr + experts, total, mask=real)


@triton.jit(do_not_specialize=["count"])
def _place(
    ids_ptr, before_ptr, totals_ptr, offsets_ptr, order_ptr, places_ptr, count,
    EXPERTS: tl.constexpr, WIDTH: tl.constexpr, BLOCK: tl.constexpr, ALONE: tl.constexpr,
):  # fmt: skip
    """Where an expert's slots begin, those of earlier blocks, those before it in this one.

    ALONE: this block has all slots.
    """
    slots = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    exists = slots < count
    ids = _load_ids(ids_ptr, slots, count, EXPERTS)
    experts = tl.arange(0, WIDTH)
    real = experts < EXPERTS
    if ALONE:
        totals = tl.histogram(ids, WIDTH, mask=exists)
    else:
        totals = tl.load(totals_ptr + experts, mask=real, other=0)
    ends = tl.cumsum(totals, axis=0)
    if tl.program_id(0) == 0:
        tl.store(offsets_ptr + 1 + experts, ends, mask=real)
        tl.store(offsets_ptr + experts, 0, mask=experts == 0)
    first = ends - totals
    if not ALONE:
        first += tl.load(before_ptr + tl.program_id(0) * EXPERTS + experts, mask=real, other=0)
    same = (ids[:, None] == ids[None, :]) & (slots[None, :] < slots[:, None])
    place = tl.gather(first, ids, axis=0) + tl.sum(same.to(tl.int32), axis=1)
    tl.store(places_ptr + slots, place, mask=exists)
    tl.store(order_ptr + place, slots, mask=exists)


def moe_sort(ids: Tensor, num_experts: int) -> tuple[Tensor, Tensor, Tensor]:
    """(offsets [E + 1], order [T * k], places [T, k]) of ids [T, k], all int32."""
    ids = ids.contiguous()
    slots = ids.numel()
    if slots == 0:
        return ids.new_zeros(num_experts + 1), ids.new_empty(0), torch.empty_like(ids)
    offsets, order = ids.new_empty(num_experts + 1), ids.new_empty(slots)
    places = torch.empty_like(ids)
    blocks = cdiv(slots, _BLOCK)
    # At least two bins, since a histogram of one is none
    width = max(2, 1 << log2_ceil(num_experts))
    constants = {"EXPERTS": num_experts, "WIDTH": width, "BLOCK": _BLOCK, "num_warps": 4}
    counts = totals = ids  # not read where one block has all slots
    if blocks > 1:
        counts, totals = ids.new_empty(blocks, num_experts), ids.new_empty(num_experts)
        _count[(blocks,)](ids, counts, slots, **constants)
        _sum_blocks[(cdiv(num_experts, _EXPERTS),)](
            counts, totals, blocks,
            EXPERTS=num_experts, WIDTH=_EXPERTS, BLOCKS=_BLOCKS, num_warps=4,
        )  # fmt: skip
    _place[(blocks,)](
        ids, counts, totals, offsets, order, places, slots, ALONE=blocks == 1, **constants
    )
    return offsets, order, places
