"""What the Triton kernels share: sums of a fixed order, and facts about the device.

The order of `tl.sum` follows the thread layout, which follows tile shape, warps and pointer
alignment. The sums here are chains of reductions over an axis of two, and a + b = b + a: so the
order is written in the shapes and no layout can change it. Kernels that use them are launched
with `enable_fp_fusion=False`, or a product and an addition may or may not become one operation.
"""

# Arguments of kernels have Triton's own types.
# mypy: disable-error-code="no-untyped-def"

import functools
from collections.abc import Sequence

import torch
import triton
import triton.language as tl
from torch import Tensor


@triton.jit
def pairwise_sum(x, ROWS: tl.constexpr, LOG2: tl.constexpr):
    """[ROWS, 2**LOG2] -> [ROWS]: add neighbours, until one is left."""
    for i in tl.static_range(LOG2):
        x = tl.sum(tl.reshape(x, (ROWS, 2 ** (LOG2 - 1 - i), 2)), axis=2)
    return tl.reshape(x, (ROWS,))


@triton.jit(do_not_specialize=["rows", "split"])
def _sum_rows(
    x_ptr, first_ptr, second_ptr, rows, split, width, ROWS: tl.constexpr, COLUMNS: tl.constexpr
):
    column = tl.program_id(0) * COLUMNS + tl.arange(0, COLUMNS)
    begin, end = 0, split
    if tl.program_id(1) == 1:
        begin, end = split, rows
    total = tl.zeros((ROWS, COLUMNS), tl.float32)
    for first in range(begin, end, ROWS):
        row = first + tl.arange(0, ROWS)
        mask = (row < end)[:, None] & (column < width)[None, :]
        total += tl.load(x_ptr + row[:, None] * width + column[None, :], mask=mask, other=0.0)
    total = tl.sum(total, axis=0)
    if tl.program_id(1) == 0:
        tl.store(first_ptr + column, total.to(first_ptr.dtype.element_ty), mask=column < width)
    else:
        tl.store(second_ptr + column, total.to(second_ptr.dtype.element_ty), mask=column < width)


def sum_rows(x: Tensor, split: int, dtypes: Sequence[torch.dtype]) -> list[Tensor]:
    """Sums over the first `split` rows and over the others of x [R, N] fp32: one [N] a dtype.

    For the parts of a weight's gradient that programs leave. The same from run to run.
    """
    rows, width = x.shape
    sums = [torch.empty(width, dtype=dtype, device=x.device) for dtype in dtypes]
    if sums:
        columns = 8 if width <= 256 else 32
        _sum_rows[(triton.cdiv(width, columns), len(sums))](
            x, sums[0], sums[-1], rows, split, width, ROWS=4096 // columns, COLUMNS=columns
        )
    return sums


def log2_ceil(n: int) -> int:
    """The least power of two at or above n, as its exponent."""
    return max(n - 1, 0).bit_length()


@functools.cache
def _processors(device: int) -> int:
    return torch.cuda.get_device_properties(device).multi_processor_count


def processors(x: Tensor) -> int:
    """Multiprocessors of the device of `x`; any small number under the interpreter."""
    return _processors(x.device.index or 0) if x.is_cuda else 4


def rows_of(x: Tensor) -> Tensor:
    """`x` itself if its last axis is dense, else a copy."""
    return x if x.stride(-1) == 1 or x.shape[-1] <= 1 else x.contiguous()
