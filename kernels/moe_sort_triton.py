"""Triton backend of `isomodels::moe_sort`: integers throughout, so exact in any order.

Slots in blocks: each block counts its experts, then each finds its slots' places from the counts of
all blocks. No id is looked at on the host: one out of range counts as the nearest expert.
"""

# Arguments of kernels have Triton's own types.
# mypy: disable-error-code="no-untyped-def"

import torch
import triton
import triton.language as tl
from torch import Tensor

from isomodels.kernels.common_triton import log2_ceil
from isomodels.kernels.tensor_map_triton import cdiv

_BLOCK = 256  # slots
_CHUNK = 32  # slots or blocks looked at together


@triton.jit
def _load_ids(ids_ptr, slots, count, EXPERTS: tl.constexpr):
    """Ids in range; EXPERTS for a slot that does not exist."""
    ids = tl.load(ids_ptr + slots, mask=slots < count, other=0)
    ids = tl.minimum(tl.maximum(ids, 0), EXPERTS - 1)
    return tl.where(slots < count, ids, EXPERTS)


@triton.jit(do_not_specialize=["count"])
def _count(
    ids_ptr, counts_ptr, count,
    EXPERTS: tl.constexpr, WIDTH: tl.constexpr, BLOCK: tl.constexpr, CHUNK: tl.constexpr,
):  # fmt: skip
    """counts [blocks, EXPERTS]: slots of each expert in this block."""
    block = tl.program_id(0)
    experts = tl.arange(0, WIDTH)
    found = tl.zeros((WIDTH,), tl.int32)
    for begin in range(0, BLOCK, CHUNK):
        ids = _load_ids(ids_ptr, block * BLOCK + begin + tl.arange(0, CHUNK), count, EXPERTS)
        found += tl.sum((ids[:, None] == experts[None, :]).to(tl.int32), axis=0)
    tl.store(counts_ptr + block * EXPERTS + experts, found, mask=experts < EXPERTS)


@triton.jit(do_not_specialize=["count", "blocks"])
def _place(
    ids_ptr, counts_ptr, offsets_ptr, order_ptr, places_ptr, count, blocks,
    EXPERTS: tl.constexpr, WIDTH: tl.constexpr, BLOCK: tl.constexpr, CHUNK: tl.constexpr,
):  # fmt: skip
    """Where an expert's slots begin, those of earlier blocks, those before it in this one."""
    block = tl.program_id(0)
    experts = tl.arange(0, WIDTH)
    real = experts < EXPERTS
    total = tl.zeros((WIDTH,), tl.int32)
    earlier = total
    for begin in range(0, blocks, CHUNK):
        at = begin + tl.arange(0, CHUNK)
        mask = (at < blocks)[:, None] & real[None, :]
        counts = tl.load(counts_ptr + at[:, None] * EXPERTS + experts[None, :], mask=mask, other=0)
        total += tl.sum(counts, axis=0)
        earlier += tl.sum(tl.where((at < block)[:, None], counts, 0), axis=0)
    ends = tl.cumsum(total, axis=0)
    if block == 0:
        tl.store(offsets_ptr + 1 + experts, ends, mask=real)
        tl.store(offsets_ptr + experts, 0, mask=experts == 0)
    first = ends - total + earlier
    for begin in range(0, BLOCK, CHUNK):
        slots = block * BLOCK + begin + tl.arange(0, CHUNK)
        ids = _load_ids(ids_ptr, slots, count, EXPERTS)
        match = ids[:, None] == experts[None, :]
        # Of the slots of this chunk, those of the same expert that come before
        same = (ids[:, None] == ids[None, :]) & (slots[None, :] < slots[:, None])
        place = tl.sum(tl.where(match, first[None, :], 0), axis=1) + tl.sum(same.to(tl.int32), 1)
        tl.store(places_ptr + slots, place, mask=slots < count)
        tl.store(order_ptr + place, slots, mask=slots < count)
        first += tl.sum(match.to(tl.int32), axis=0)


def moe_sort(ids: Tensor, num_experts: int) -> tuple[Tensor, Tensor, Tensor]:
    """(offsets [E + 1], order [T * k], places [T, k]) of ids [T, k], all int32."""
    ids = ids.contiguous()
    slots = ids.numel()
    if slots == 0:
        return ids.new_zeros(num_experts + 1), ids.new_empty(0), torch.empty_like(ids)
    offsets, order = ids.new_empty(num_experts + 1), ids.new_empty(slots)
    places = torch.empty_like(ids)
    blocks = cdiv(slots, _BLOCK)
    counts = ids.new_empty(blocks, num_experts)
    constants = {
        "EXPERTS": num_experts, "WIDTH": 1 << log2_ceil(num_experts),
        "BLOCK": _BLOCK, "CHUNK": _CHUNK, "num_warps": 4,
    }  # fmt: skip
    _count[(blocks,)](ids, counts, slots, **constants)
    _place[(blocks,)](ids, counts, offsets, order, places, slots, blocks, **constants)
    return offsets, order, places
