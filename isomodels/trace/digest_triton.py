"""`digest.row_digests` on a GPU: one launch, whose programs add what they find."""

# mypy: disable-error-code="no-untyped-def"

import triton
import triton.language as tl
from torch import Tensor

from isomodels.trace.digest import GOLDEN, MIXER

_ROWS = 4
_COLUMNS = 1024
_GOLDEN = tl.constexpr(GOLDEN)
_MIXER = tl.constexpr(MIXER)


def add_row_digests(words: Tensor, out: Tensor) -> None:
    """Add the digest of each row of `words` [T, N], integers with unit stride, to `out` [T]."""
    count, width = words.shape
    grid = (triton.cdiv(count, _ROWS), triton.cdiv(width, _COLUMNS))
    _add_row_digests[grid](
        words, out, count, width, words.stride(0), ROWS=_ROWS, COLUMNS=_COLUMNS, num_warps=4
    )


@triton.jit(do_not_specialize=["count"])
def _add_row_digests(
    words_ptr,
    out_ptr,
    count,
    width,
    stride,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    column = tl.program_id(1).to(tl.int64) * COLUMNS + tl.arange(0, COLUMNS)
    inside = (row < count)[:, None] & (column < width)[None, :]
    at = words_ptr + row[:, None] * stride + column[None, :]
    words = tl.load(at, mask=inside, other=0).to(tl.int64)
    mixed = (column + 1) * _GOLDEN
    mixed = (mixed ^ (mixed >> 32)) * _MIXER
    factors = (mixed ^ (mixed >> 29)) | 1
    terms = tl.where(inside, (words + 1) * factors[None, :], 0)
    tl.atomic_add(out_ptr + row, tl.sum(terms, 1), mask=row < count)
