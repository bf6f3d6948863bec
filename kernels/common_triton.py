"""What the Triton kernels share: sums of a fixed order, and facts about the device.

The order of `tl.sum` follows the thread layout, which follows tile shape, warps and pointer
alignment. The sums here are chains of reductions over an axis of two, and a + b = b + a: so the
order is written in the shapes and no layout can change it. Kernels that use them are launched
with `enable_fp_fusion=False`, or a product and an addition may or may not become one operation.
"""

# Arguments of kernels have Triton's own types.
# mypy: disable-error-code="no-untyped-def"

import functools

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
