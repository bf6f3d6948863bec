"""What a sync tells of the weights: blocks of whole tensors, and where the bytes of each lie."""

import json
from collections.abc import Iterable, Mapping
from math import prod
from typing import NamedTuple, Protocol

import numpy as np
import torch
from torch import Tensor

from isomodels.errors import CheckpointError

Box = tuple[str, tuple[int, ...], tuple[int, ...]]  # name, offset, shape


class Held(Protocol):
    """A block of a whole tensor that a trainer's rank holds (`isomodels.layers.pieces.Piece`)."""

    @property
    def name(self) -> str:
        """Of the tensor in the module of the whole model."""

    @property
    def offset(self) -> tuple[int, ...]:
        """Where the block begins, one index an axis."""

    @property
    def whole(self) -> tuple[int, ...]:
        """Shape of the whole tensor."""

    @property
    def tensor(self) -> Tensor:
        """The block."""


class Whole(NamedTuple):
    """A whole tensor as a block of itself."""

    name: str
    tensor: Tensor

    @property
    def offset(self) -> tuple[int, ...]:
        """Zeros."""
        return (0,) * self.tensor.dim()

    @property
    def whole(self) -> tuple[int, ...]:
        """The tensor's shape."""
        return tuple(self.tensor.shape)


class Block(NamedTuple):
    """A block as the message of a sync names it.

    Attributes:
        name, offset, whole: as in `Held`.
        shape, dtype: of the block; torch's name of the dtype, as "bfloat16".
        source, place: which of the message's sources holds it, contiguous, from which byte on.
    """

    name: str
    offset: tuple[int, ...]
    whole: tuple[int, ...]
    shape: tuple[int, ...]
    dtype: str
    source: int
    place: int

    @classmethod
    def of(cls, held: Held, source: int, place: int) -> "Block":
        """The description of a block that lies there."""
        tensor = held.tensor
        shape, dtype = tuple(tensor.shape), str(tensor.dtype).removeprefix("torch.")
        return cls(held.name, tuple(held.offset), tuple(held.whole), shape, dtype, source, place)

    @property
    def torch_dtype(self) -> torch.dtype:
        """The dtype.

        Raises:
            CheckpointError: torch has none of this name.
        """
        dtype = getattr(torch, self.dtype, None)
        if not isinstance(dtype, torch.dtype):
            raise CheckpointError(f"{self.name} is of {self.dtype}, which is no dtype of torch")
        return dtype

    @property
    def box(self) -> Box:
        """Which part of which tensor it is."""
        return self.name, self.offset, self.shape

    @property
    def nbytes(self) -> int:
        """Its size."""
        return prod(self.shape) * self.torch_dtype.itemsize

    def within(self, source: Tensor) -> Tensor:
        """The block's tensor as a view of its source, a flat tensor of bytes that holds it."""
        size, dtype = self.nbytes, self.torch_dtype
        if size == 0:
            return source.new_empty(self.shape, dtype=dtype)
        return source[self.place : self.place + size].view(dtype).view(self.shape)


def to_text(blocks: Iterable[Block]) -> str:
    """Blocks as a message has them: JSON, one array a block."""
    return json.dumps(list(blocks))


class Blocks(list[Block]):
    """Blocks, and where they lie once more as arrays of int64.

    Attributes:
        source, place, nbytes: of each.

    Raises:
        CheckpointError: a block of no dtype of torch.
        TypeError: places that are no integers.
    """

    def __init__(self, blocks: Iterable[Block]):
        super().__init__(blocks)
        rows = np.array([(b.source, b.place, b.nbytes) for b in self] or np.zeros((0, 3), int))
        if rows.dtype != np.int64:
            raise TypeError("places must be integers of 64 bits")
        self.source, self.place, self.nbytes = rows.T

    @classmethod
    def from_text(cls, text: str) -> "Blocks":
        """From `to_text`.

        Raises:
            CheckpointError: the text is no such description.
        """
        try:
            rows = [Block(*row) for row in json.loads(text)]
            return cls(
                b._replace(offset=tuple(b.offset), whole=tuple(b.whole), shape=tuple(b.shape))
                for b in rows
            )
        except (TypeError, ValueError, OverflowError) as error:
            raise CheckpointError(f"the trainer's blocks cannot be read: {error}") from None


def as_blocks(weights: "Mapping[str, Tensor] | Iterable[Held]") -> list[Held]:
    """Whole tensors by name, or blocks: as blocks."""
    if isinstance(weights, Mapping):
        return [Whole(name, tensor) for name, tensor in weights.items()]
    return list(weights)


def byte_view(tensor: Tensor) -> Tensor:
    """Any tensor -> its bytes, flat; a view where it is contiguous."""
    return tensor.detach().contiguous().view(-1).view(torch.uint8)
