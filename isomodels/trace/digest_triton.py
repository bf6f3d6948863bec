"""`digest.add_digests` on a GPU: one launch, whose programs add what they find."""

# mypy: disable-error-code="no-untyped-def"

from collections.abc import Sequence

import triton
import triton.language as tl
from torch import Tensor

from isomodels.trace.digest import GOLDEN, MIXER

_ROWS = 8
_COLUMNS = 512
_STEPS = 4  # a program's blocks of columns: their sums are folded over its lanes once
_GOLDEN = tl.constexpr(GOLDEN)
_MIXER = tl.constexpr(MIXER)


def add_row_digests(pairs: Sequence[tuple[Tensor, Tensor]]) -> None:
    """Add the digest of each row of each tensor to where it belongs.

    Args:
        pairs: words [T, N], integers with unit stride along a row, and [T] int64; T is one for all.
    """
    words, outs = zip(*pairs, strict=True)
    count = len(words[0])
    spans = sum(triton.cdiv(w.shape[1], _COLUMNS * _STEPS) for w in words)
    _add_row_digests[(triton.cdiv(count, _ROWS), spans)](
        words,
        outs,
        count,
        WIDTHS=tuple(w.shape[1] for w in words),
        STRIDES=tuple(w.stride(0) for w in words),
        TENSORS=len(words),
        ROWS=_ROWS,
        COLUMNS=_COLUMNS,
        STEPS=_STEPS,
        num_warps=4,
    )


@triton.jit(do_not_specialize=["count"])
def _add_row_digests(
    words,
    outs,
    count,
    WIDTHS: tl.constexpr,
    STRIDES: tl.constexpr,
    TENSORS: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    STEPS: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    span = tl.program_id(1)  # counted from the first span of tensor i
    for i in tl.static_range(TENSORS):
        spans = tl.cdiv(WIDTHS[i], COLUMNS * STEPS)
        if (span >= 0) & (span < spans):
            sums = tl.zeros([ROWS, COLUMNS], tl.int64)
            for step in range(STEPS):
                column = (span * STEPS + step).to(tl.int64) * COLUMNS + tl.arange(0, COLUMNS)
                inside = (row < count)[:, None] & (column < WIDTHS[i])[None, :]
                at = words[i] + row[:, None] * STRIDES[i] + column[None, :]
                terms = tl.load(at, mask=inside, other=0).to(tl.int64) + 1
                sums += terms * tl.where(column < WIDTHS[i], _factors(column), 0)[None, :]
            tl.atomic_add(outs[i] + row, tl.sum(sums, 1), mask=row < count)
        span -= spans


@triton.jit
def _factors(column):
    """`digest.multipliers`."""
    mixed = (column + 1) * _GOLDEN
    mixed = (mixed ^ (mixed >> 32)) * _MIXER
    return (mixed ^ (mixed >> 29)) | 1
