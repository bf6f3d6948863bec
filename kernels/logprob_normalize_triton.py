"""Triton backend of `isomodels::log_normalize` and `isomodels::logprobs`: a row in one launch.

A row is cut into parts. Each program takes the sums of one part, and then normalises a part whose
row was summed some places earlier, which the L2 still holds: so device memory is read once, and
hardly anybody waits.
"""

# Arguments of kernels have Triton's own types.
# mypy: disable-error-code="no-untyped-def"

import torch
import triton
import triton.language as tl
from torch import Tensor

from isomodels.kernels.common_triton import rows_of
from isomodels.kernels.linear_triton import linear
from isomodels.kernels.logprob_fold_triton import LOG2_BLOCK, block_sums, cuts, fold_blocks, scaled

# Tuning: blocks of a part, warps and registers of its program, and by how many places the
# normalising lags behind the sums. All parts of that many places fit in half of an L2.
_PART_BLOCKS, _PART_WARPS, _PART_REGISTERS, _LAG = 64, 4, 96, 300
_EACH = tl.constexpr(16)  # neighbours that a few lanes hold, so that most of a sum stays inside


@triton.jit
def _packed(row_top, log_sum):
    """Both in one word, which a single access reads, and which is never 0: a sum of exponentials
    above the maximum is at least 1, so the sign of its logarithm is free."""
    high = row_top.to(tl.int32, bitcast=True).to(tl.int64) << 32
    return high | (log_sum.to(tl.uint32, bitcast=True) | 0x80000000).to(tl.int64)


@triton.jit
def _unpacked(word):
    row_top = (word >> 32).to(tl.int32).to(tl.float32, bitcast=True)
    return row_top, (word & 0x7FFFFFFF).to(tl.int32).to(tl.float32, bitcast=True)


@triton.jit
def _take(counter_ptr):
    return tl.atomic_add(counter_ptr, 1, sem="relaxed").to(tl.int32)


@triton.jit
def _sum_part(
    x_ptr, top_ptr, sum_ptr, counter_ptr, row, first, vocab_size, blocks, leaf_blocks, parts,
    temperature, SCALE: tl.constexpr, LOG2: tl.constexpr, BLOCKS: tl.constexpr,
):  # fmt: skip
    """Sums of `BLOCKS` blocks of a row; whoever comes last folds the blocks of the row."""
    BLOCK: tl.constexpr = 2**LOG2_BLOCK
    block = first + tl.arange(0, BLOCKS)
    # [parts of 4, blocks, groups, 4]: of such a shape few lanes hold _EACH neighbours, and so most
    # of a block's sum needs no other lane.
    inner = tl.arange(0, _EACH // 4)[:, None, None, None] * 4 + tl.arange(0, 4)
    inner += tl.arange(0, BLOCK // _EACH)[None, None, :, None] * _EACH
    column = block[None, :, None, None] * BLOCK + inner
    # The part is read again soon.
    x = tl.load(
        x_ptr + column, mask=column < vocab_size, other=-float("inf"), eviction_policy="evict_last"
    )
    x = scaled(tl.reshape(tl.permute(x, (1, 2, 0, 3)), (BLOCKS, BLOCK)), temperature, SCALE)
    top, total = block_sums(x, BLOCKS)
    tl.store(top_ptr + row * blocks + block, top, mask=block < blocks)
    tl.store(sum_ptr + row * blocks + block, total, mask=block < blocks)
    tl.debug_barrier()  # all threads have stored before one of them says so
    if tl.atomic_add(counter_ptr + 1 + 2 * row, 1, sem="acq_rel") == parts - 1:
        row_top, log_sum = fold_blocks(top_ptr, sum_ptr, row, blocks, leaf_blocks, LOG2)
        word = _packed(row_top, tl.max(log_sum, axis=0))
        tl.atomic_xchg(counter_ptr + 2 + 2 * row, word, sem="relaxed")


@triton.jit(do_not_specialize=["blocks", "leaf_blocks", "parts", "places", "lag"])
def _normalize_kernel(
    x_ptr, top_ptr, sum_ptr, out_ptr, counter_ptr, vocab_size, blocks, leaf_blocks, parts, places,
    lag, stride, temperature,
    SCALE: tl.constexpr, LOG2: tl.constexpr, BLOCKS: tl.constexpr,
):  # fmt: skip
    """The sums of a place, then the result of the place `lag` before it.

    A place is a part of a row, taken from a counter, not from the program's number. `lag` is
    `parts` at least: all parts of the older row belong to places taken before, by programs that
    wait for nothing before they have given their sums. So nobody waits for good, however few
    programs the device runs at a time and whatever else runs there.
    """
    place = _take(counter_ptr)
    if place < places:
        row = (place // parts).to(tl.int64)
        _sum_part(
            x_ptr + row * stride, top_ptr, sum_ptr, counter_ptr, row, (place % parts) * BLOCKS,
            vocab_size, blocks, leaf_blocks, parts, temperature, SCALE, LOG2, BLOCKS,
        )  # fmt: skip
    if place >= lag:
        WIDTH: tl.constexpr = BLOCKS * 2**LOG2_BLOCK
        row = ((place - lag) // parts).to(tl.int64)
        column = ((place - lag) % parts) * WIDTH + tl.arange(0, WIDTH)
        inside = column < vocab_size
        x = tl.load(
            x_ptr + row * stride + column, mask=inside, other=0.0, eviction_policy="evict_first"
        )
        word = tl.atomic_add(counter_ptr + 2 + 2 * row, 0, sem="relaxed")
        while word == 0:
            word = tl.atomic_add(counter_ptr + 2 + 2 * row, 0, sem="relaxed")
        row_top, log_sum = _unpacked(word)
        x = (scaled(x, temperature, SCALE) - row_top) - log_sum
        at = out_ptr + row * vocab_size + column
        tl.store(at, x, mask=inside, eviction_policy="evict_first")


def log_normalize(logits: Tensor, temperature: float, out: Tensor | None = None) -> Tensor:
    """Log-softmax of logits [T, V] fp32 over the temperature -> [T, V] fp32.

    `out` may be the logits themselves, if they are contiguous.
    """
    logits = rows_of(logits)
    rows, vocab_size = logits.shape
    if out is None:
        out = torch.empty(rows, vocab_size, dtype=torch.float32, device=logits.device)
    if not rows:
        return out
    blocks, leaf_blocks, log2 = cuts(vocab_size)
    part = min(triton.next_power_of_2(blocks), _PART_BLOCKS)
    parts = triton.cdiv(blocks, part)
    places, lag = rows * parts, max(parts, _LAG)
    top, total = torch.empty(2, rows, blocks, dtype=torch.float32, device=logits.device)
    # The next place to take; then of each row, the parts that have their sums, and the normaliser.
    counters = torch.zeros(1 + 2 * rows, dtype=torch.int64, device=logits.device)
    _normalize_kernel[(places + lag,)](
        logits, top, total, out, counters, vocab_size, blocks, leaf_blocks, parts, places, lag,
        logits.stride(0), temperature, SCALE=temperature != 1.0, LOG2=log2, BLOCKS=part,
        num_warps=max(1, min(_PART_WARPS, part // 4)), maxnreg=_PART_REGISTERS,
        enable_fp_fusion=False,
    )  # fmt: skip
    return out


def logprobs(hidden: Tensor, weight: Tensor, temperature: float) -> Tensor:
    """Normalised logits of hidden [T, H] over the temperature -> [T, V] fp32, made in place."""
    logits = linear(hidden, weight, out_dtype=torch.float32)
    return log_normalize(logits, temperature, out=logits)
