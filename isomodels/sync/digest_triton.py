"""Many tensors of a GPU digested, or copied and digested, in one launch (see `digest`)."""

# Arguments of kernels have Triton's own types.
# mypy: disable-error-code="no-untyped-def"

import numpy as np
import torch
import triton
import triton.language as tl
from torch import Tensor

from isomodels.sync.digest import Array

# All tuning. A program takes passes * BLOCK words: few where it copies, so that what the running
# programs have written still lies in the L2 when they read it.
TENSORS = 1024  # of one launch
DIGEST_PASSES, COPY_PASSES, BLOCK, WARPS = 4, 1, 2048, 4


def launch(
    device: torch.device, sources: Array, targets: Array, words: Array, copy: bool
) -> Tensor:
    """Begin the sums of w_i (2 i + 1) over the words at each target, or copy to it first.

    Args:
        device: a GPU.
        sources, targets: addresses, multiples of 16; no two targets overlap.
        words: lengths in words of 4 bytes, multiples of 4.
        copy: else the sources are not used.

    Returns:
        [len(targets)] int64, modulo 2^64.
    """
    passes = COPY_PASSES if copy else DIGEST_PASSES
    held = torch.empty(4, TENSORS, dtype=torch.int64, device=device)
    sums = torch.zeros(len(targets), dtype=torch.int64, device=device)
    with torch.cuda.device_of(held):
        for start in range(0, len(targets), TENSORS):
            some = slice(start, start + TENSORS)
            count = len(words[some])
            table = np.zeros((4, TENSORS), dtype=np.int64)
            # Addresses as words from one aligned pointer: Triton knows no alignment of an address.
            table[0, :count] = (sources[some] - held.data_ptr()) // 4
            table[1, :count] = (targets[some] - held.data_ptr()) // 4
            table[2, :count] = words[some]
            # The programs up to and with a tensor's last: a program finds its tensor by it.
            table[3] = np.cumsum(-(-table[2] // (passes * BLOCK)))
            held.copy_(torch.from_numpy(table))
            _digest[(int(table[3, -1]),)](
                held,
                held.view(torch.int32),
                sums[some],
                COPY=copy,
                TENSORS=TENSORS,
                PASSES=passes,
                BLOCK=BLOCK,
                num_warps=WARPS,
            )
    return sums


@triton.jit(do_not_specialize=["sums_ptr"])
def _digest(
    table_ptr,
    base_ptr,
    sums_ptr,
    COPY: tl.constexpr,
    TENSORS: tl.constexpr,
    PASSES: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Adds the sum of w_i (2 i + 1) over one program's words to its tensor's sum."""
    program = tl.program_id(0)
    at = tl.arange(0, TENSORS)
    ends = tl.load(table_ptr + 3 * TENSORS + at)
    index = tl.sum((ends <= program).to(tl.int32), 0)
    before = tl.max(tl.where(at < index, ends, 0), 0)
    first = (program - before) * (PASSES * BLOCK)
    source = base_ptr + tl.multiple_of(tl.load(table_ptr + index) + first, 4)
    target = base_ptr + tl.multiple_of(tl.load(table_ptr + TENSORS + index) + first, 4)
    left = tl.load(table_ptr + 2 * TENSORS + index) - first
    left = tl.multiple_of(tl.minimum(left, PASSES * BLOCK).to(tl.int32), 4)

    offsets = tl.arange(0, BLOCK)
    if COPY:
        for i in tl.static_range(PASSES):
            mine = offsets + i * BLOCK < left
            words = tl.load(
                source + (offsets + i * BLOCK), mask=mine, eviction_policy="evict_first"
            )
            tl.store(target + (offsets + i * BLOCK), words, mask=mine)
    weighted = tl.zeros([BLOCK], tl.int64)
    plain = tl.zeros([BLOCK], tl.int64)
    for i in tl.static_range(PASSES):
        mine = offsets + i * BLOCK < left
        # volatile: what lies there, not what was stored
        words = tl.load(target + (offsets + i * BLOCK), mask=mine, other=0, volatile=COPY)
        wide = words.to(tl.int64)
        weighted += wide * (2 * (offsets + i * BLOCK) + 1).to(tl.int64)
        plain += wide
    total = tl.sum(weighted, 0) + 2 * first * tl.sum(plain, 0)
    tl.atomic_add(sums_ptr + index, total, sem="relaxed")
