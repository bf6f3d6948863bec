"""Groups of neighbouring rows of one matrix, each with a bound that the bulk copy engine keeps.

Which rows belong to a group is known only on the device, and a descriptor is made on the host. So
one serves all groups: its axis of rows is 2**30 long, and a group of S rows is the last S of them.
A coordinate of 2**30 moves that end to the end of the group in memory, since addresses are modulo
2**64. It is the arithmetic of `triton.tools.ragged_tma`, whose functions the interpreter of
Triton cannot run.
"""

# Arguments of kernels have Triton's own types.
# mypy: disable-error-code="no-untyped-def"

import triton
import triton.language as tl
from torch import Tensor
from triton.tools.ragged_tma import to_ragged_indices
from triton.tools.tensor_descriptor import TensorDescriptor

_LARGEST, _ROWS, _WRAP = 0x7FFF0000, 2**30, 2**34  # _ROWS * _WRAP = 2**64


def ragged_descriptor(x: Tensor, block: list[int]) -> TensorDescriptor:
    """How the engine sees x [R, C] in groups of rows; base and strides fit it (see `bulk`)."""
    pitch = x.stride(0)
    made = TensorDescriptor.__new__(TensorDescriptor)
    made.base, made.shape = x, [_LARGEST, _LARGEST, _ROWS, x.shape[1]]
    made.strides, made.block_shape = [_WRAP - pitch, pitch, pitch, 1], [1, 1, *block]
    made.padding = "zero"
    return made


@triton.jit
def load_rows(desc, start, size, row, column, ROWS: tl.constexpr, COLUMNS: tl.constexpr):
    """A block [ROWS, COLUMNS] from `row` of the group [start, start + size), zero past its end."""
    wrap, end, at = to_ragged_indices(start, size, row)
    return tl.reshape(desc.load([wrap, end, at, column]), (ROWS, COLUMNS))


@triton.jit
def store_rows(desc, start, size, column, x, ROWS: tl.constexpr, COLUMNS: tl.constexpr):
    """Write the first `size` rows of x [ROWS, COLUMNS] to those from `start` on."""
    wrap, end, at = to_ragged_indices(start, size, 0)
    desc.store([wrap, end, at, column], tl.reshape(x, (1, 1, ROWS, COLUMNS)))
