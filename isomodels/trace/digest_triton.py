"""`digest.add_digests` on a GPU: one launch, whose programs add what they find.

A decode step has some ten small tensors a layer and evicts what it ran from every cache: the time
of such a launch is that of fetching its instructions. So the tensors are numbers to the kernel and
share one small body, whatever their dtypes and widths.
"""

# mypy: disable-error-code="no-untyped-def"

from collections.abc import Sequence

import triton
import triton.language as tl
from torch import Tensor

from isomodels.trace.digest import GOLDEN, MIXER, TOGETHER

_ROWS = 8
_COLUMNS = 256
_STEPS = 8  # a program's blocks of columns
_GOLDEN = tl.constexpr(GOLDEN)
_MIXER = tl.constexpr(MIXER)
_SHIFT = tl.constexpr(5)
_WIDE = tl.constexpr(16)  # added to the bytes of a word where 16 bytes are loaded at once


def add_row_digests(pairs: Sequence[tuple[Tensor, Tensor]]) -> None:
    """Add the digest of each row of each tensor to where it belongs.

    Args:
        pairs: at most `TOGETHER`, of words [T, N], integers with unit stride along a row, and
            [T] int64; T is one for all.
    """
    count = len(pairs[0][0])
    spans = sum(triton.cdiv(words.shape[1], _COLUMNS * _STEPS) for words, _ in pairs)
    tensors = [
        (words.data_ptr(), out.data_ptr(), words.shape[1], words.stride(0), _kind(words))
        for words, out in pairs
    ]
    tensors += [(*tensors[0][:2], 0, 0, 0)] * (TOGETHER - len(pairs))  # without a column
    # Triton compiles anew for every pattern of ones and multiples of 16: there are none
    tensors = [tuple(number << _SHIFT.value | 2 for number in tensor) for tensor in tensors]
    _add_row_digests[(triton.cdiv(count, _ROWS), spans)](
        *zip(*tensors, strict=True),
        count,
        TENSORS=TOGETHER,
        ROWS=_ROWS,
        COLUMNS=_COLUMNS,
        STEPS=_STEPS,
        num_warps=4,
    )


def _kind(words: Tensor) -> int:
    """How the kernel loads: bytes of a word, and whether several words at once."""
    size = words.element_size()
    whole = words.shape[1] % 8 == words.stride(0) % 8 == words.data_ptr() % 16 == 0
    return size + _WIDE.value if size in (2, 4) and whole else size


@triton.jit(do_not_specialize=["count"])
def _add_row_digests(
    words,
    outs,
    widths,
    strides,
    kinds,
    count,
    TENSORS: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    STEPS: tl.constexpr,
):
    span = tl.program_id(1)
    word, out, width, stride, kind = words[0], outs[0], widths[0], strides[0], kinds[0]
    begin = 0
    first = 0  # span of the tensor at hand
    for i in tl.static_range(1, TENSORS):
        begin += tl.cdiv(widths[i - 1] >> _SHIFT, COLUMNS * STEPS)
        if span >= begin:
            word, out, width, stride, kind = words[i], outs[i], widths[i], strides[i], kinds[i]
            first = begin
    width, stride, kind = width >> _SHIFT, stride >> _SHIFT, kind >> _SHIFT
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    sums = tl.zeros([ROWS, COLUMNS], tl.int64)
    for step in range(STEPS):
        column = ((span - first) * STEPS + step) * COLUMNS + tl.arange(0, COLUMNS)
        terms = _load(word >> _SHIFT, kind, row, column, count, width, stride) + 1
        factors = tl.where(column < width, _factors(column.to(tl.int64)), 0)
        sums += terms * factors[None, :]
    at = (out >> _SHIFT).to(tl.pointer_type(tl.int64)) + row
    tl.atomic_add(at, tl.sum(sums, 1), mask=row < count)


@triton.jit
def _load(word, kind, row, column, count, width, stride):
    """Words of whatever size: [ROWS, COLUMNS] int64."""
    rows = (row < count)[:, None]
    place = row[:, None] * stride + column[None, :]
    inside = rows & (column < width)[None, :]
    # the same, with multiples for the compiler to see
    whole = row[:, None] * (stride // 8 * 8) + column[None, :]
    in_whole = rows & (column < width // 8 * 8)[None, :]
    if kind == _WIDE + 2:
        at = tl.multiple_of(word.to(tl.pointer_type(tl.int16)), 16)
        found = tl.load(at + whole, in_whole, 0).to(tl.int64)
    elif kind == _WIDE + 4:
        at = tl.multiple_of(word.to(tl.pointer_type(tl.int32)), 16)
        found = tl.load(at + whole, in_whole, 0).to(tl.int64)
    elif kind == 1:
        found = tl.load(word.to(tl.pointer_type(tl.uint8)) + place, inside, 0).to(tl.int64)
    elif kind == 2:
        found = tl.load(word.to(tl.pointer_type(tl.int16)) + place, inside, 0).to(tl.int64)
    elif kind == 4:
        found = tl.load(word.to(tl.pointer_type(tl.int32)) + place, inside, 0).to(tl.int64)
    else:
        found = tl.load(word.to(tl.pointer_type(tl.int64)) + place, inside, 0)
    return found


@triton.jit
def _factors(column):
    """`digest.multipliers`."""
    mixed = (column + 1) * _GOLDEN
    mixed = (mixed ^ (mixed >> 32)) * _MIXER
    return (mixed ^ (mixed >> 29)) | 1
