"""What the bulk copy engine reads and writes: matrices and their descriptors."""

from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor

_ALIGNMENT = 16  # bytes, of base and strides, that the engine asks for


def cdiv(a: int, b: int) -> int:
    """a / b rounded up; Triton's own takes microseconds."""
    return -(-a // b)


def bulk(x: Tensor) -> Tensor:
    """`x` [R, C] itself if the bulk copy engine can read it, else a padded copy's view."""
    unit = _ALIGNMENT // x.element_size()
    (rows, columns), (pitch, step) = x.shape, x.stride()
    if step == 1 and pitch >= columns and pitch % unit == 0 and x.data_ptr() % _ALIGNMENT == 0:
        return x
    padded = x.new_empty(max(rows, 1), cdiv(columns, unit) * unit)
    padded[:rows, :columns] = x
    return padded[:rows, :columns]


def descriptor(x: Tensor, block: list[int]) -> TensorDescriptor:
    """How the engine sees a tensor whose base and strides fit it, as those that `bulk` returns do.

    Made without the constructor's checks of just that, which cost microseconds at every launch.
    """
    made = TensorDescriptor.__new__(TensorDescriptor)
    made.base, made.shape, made.strides = x, list(x.shape), list(x.stride())
    made.block_shape, made.padding = block, "zero"
    return made


def leaf_descriptor(x: Tensor, leaves: int, block: list[int]) -> TensorDescriptor:
    """[R, G * L] -> descriptor of [G, R, L], a leaf at a time: block [1, rows, k]."""
    length = x.shape[1] // leaves
    if length % (_ALIGNMENT // x.element_size()):
        cut = x.reshape(len(x) * leaves, length)
        x_grl = bulk(cut).unflatten(0, (len(x), leaves)).transpose(0, 1)
    else:
        x_grl = bulk(x).unflatten(1, (leaves, length)).transpose(0, 1)
    return descriptor(x_grl, [1, *block])
