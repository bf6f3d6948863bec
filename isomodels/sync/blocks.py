"""What a sync tells of the weights: blocks of whole tensors, and where the bytes of each lie."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from math import prod
from typing import Any, Protocol

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


@dataclass(frozen=True)
class Whole:
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


@dataclass(frozen=True)
class Block:
    """A block as the message of a sync names it.

    Attributes:
        name, offset, whole: as in `Held`.
        shape, dtype: of the block; torch's name of the dtype, as "bfloat16".
        digest: of its bits, as the trainer has them; a decimal, since JSON's numbers may be floats.
        source, place: which of the message's sources holds it, contiguous, from which byte on.
    """

    name: str
    offset: tuple[int, ...]
    whole: tuple[int, ...]
    shape: tuple[int, ...]
    dtype: str
    digest: str
    source: int
    place: int

    @classmethod
    def of(cls, held: Held, value: int, source: int, place: int) -> "Block":
        """The description of a block with this digest that lies there."""
        tensor = held.tensor
        shape, dtype = tuple(tensor.shape), str(tensor.dtype).removeprefix("torch.")
        offset, whole = tuple(held.offset), tuple(held.whole)
        return cls(held.name, offset, whole, shape, dtype, str(value), source, place)

    @classmethod
    def from_json(cls, fields: Mapping[str, Any]) -> "Block":
        """From `to_json`, or what became of it on the way."""
        tuples = {key: tuple(fields[key]) for key in ("offset", "whole", "shape")}
        return cls(**{**fields, **tuples})

    def to_json(self) -> dict[str, Any]:
        """For a message."""
        return dict(vars(self))  # dataclasses.asdict would copy each field deeply

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
        """The block's tensor as a view of its source, a flat tensor of bytes.

        Raises:
            CheckpointError: it does not lie in the source.
        """
        size, dtype = self.nbytes, self.torch_dtype
        if self.place < 0 or self.place + size > source.numel():
            raise CheckpointError(f"the trainer's {self.name} lies outside of what it sent")
        if size == 0:
            return source.new_empty(self.shape, dtype=dtype)
        return source[self.place : self.place + size].view(dtype).view(self.shape)


def as_blocks(weights: "Mapping[str, Tensor] | Iterable[Held]") -> list[Held]:
    """Whole tensors by name, or blocks: as blocks."""
    if isinstance(weights, Mapping):
        return [Whole(name, tensor) for name, tensor in weights.items()]
    return list(weights)


def byte_view(tensor: Tensor) -> Tensor:
    """Any tensor -> its bytes, flat; a view where it is contiguous."""
    return tensor.detach().contiguous().view(-1).view(torch.uint8)
