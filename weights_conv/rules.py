"""Conversion rules as data: how Hugging Face tensors become a module's tensors, and back.

A rule names the module's tensor and the HF tensors it is made of, with their shapes. `join` and
`split` are inverses and only move bits, so one table loads and saves without loss. An
architecture's table must name every tensor of its checkpoints: what is left over, missing or of
another shape or dtype is an error.
"""

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from isomodels.errors import CheckpointError


@dataclass(frozen=True)
class Source:
    """One HF tensor; `dtype` where it has its own, whatever the checkpoint's.

    `or_common`: a file may also hold it in the checkpoint's dtype.
    """

    name: str
    shape: tuple[int, ...]
    dtype: torch.dtype | None = None
    or_common: bool = False


@dataclass(frozen=True)
class Same:
    """The module's tensor is the HF tensor, under the same name unless `hf_name` is given.

    `dtype` pins a tensor whose precision must not follow the checkpoint's: no load, cast or save
    changes it.
    """

    name: str
    shape: tuple[int, ...]
    hf_name: str | None = None
    dtype: torch.dtype | None = None

    @property
    def sources(self) -> tuple[Source, ...]:
        """The HF tensors, in the order of `join`."""
        return (Source(self.hf_name or self.name, self.shape, self.dtype),)

    def join(self, parts: Sequence[Tensor]) -> Tensor:
        """HF tensors -> module tensor."""
        (tensor,) = parts
        return tensor

    def split(self, tensor: Tensor) -> list[Tensor]:
        """Module tensor -> HF tensors, as views."""
        return [tensor]


@dataclass(frozen=True)
class Widened(Same):
    """A float32 tensor that a file holds in float32 or in the checkpoint's dtype.

    A save writes float32: what a training made of it need not fit into less.
    """

    dtype: torch.dtype | None = torch.float32

    @property
    def sources(self) -> tuple[Source, ...]:
        """The one HF tensor."""
        return (Source(self.hf_name or self.name, self.shape, self.dtype, or_common=True),)

    def join(self, parts: Sequence[Tensor]) -> Tensor:
        """HF tensor -> module tensor."""
        (tensor,) = parts
        return tensor.to(self.dtype)


@dataclass(frozen=True)
class Shifted(Same):
    """The module holds the HF tensor minus one: a norm whose weight is stored around zero.

    The sum is float32, which keeps every bit of a smaller dtype near one; so is the HF tensor.
    """

    dtype: torch.dtype | None = torch.float32

    def join(self, parts: Sequence[Tensor]) -> Tensor:
        """HF tensor -> module tensor, float32."""
        (tensor,) = parts
        return tensor.float() - 1.0

    def split(self, tensor: Tensor) -> list[Tensor]:
        """Module tensor -> HF tensor, float32."""
        return [tensor.float() + 1.0]


@dataclass(frozen=True)
class Swapped(Same):
    """The module has the halves of the last dimension in the other order."""

    def join(self, parts: Sequence[Tensor]) -> Tensor:
        """HF tensor -> module tensor."""
        (tensor,) = parts
        return torch.cat(tensor.chunk(2, -1)[::-1], -1)

    def split(self, tensor: Tensor) -> list[Tensor]:
        """Module tensor -> HF tensor, as a copy."""
        return [torch.cat(tensor.chunk(2, -1)[::-1], -1)]


@dataclass(frozen=True)
class Cropped(Same):
    """A table of a vocabulary that the module may have padded with rows of no meaning."""

    def split(self, tensor: Tensor) -> list[Tensor]:
        """Module tensor -> HF tensor, as a view of its first rows."""
        return [tensor[: self.shape[0]]]


class Carried:
    """Marks a rule whose tensor is kept for the next save and never run: an engine may leave it
    out."""


@dataclass(frozen=True)
class CarriedSame(Same, Carried):
    """`Same`, only kept."""


@dataclass(frozen=True)
class Concat:
    """The module's tensor is HF tensors laid one after the other along `dim`."""

    name: str
    parts: tuple[Source, ...]
    dim: int = 0

    @property
    def sources(self) -> tuple[Source, ...]:
        """The HF tensors, in the order of `join`."""
        return self.parts

    @property
    def shape(self) -> tuple[int, ...]:
        """Shape of the module's tensor."""
        shape = list(self.parts[0].shape)
        shape[self.dim] = sum(part.shape[self.dim] for part in self.parts)
        return tuple(shape)

    def join(self, parts: Sequence[Tensor]) -> Tensor:
        """HF tensors -> module tensor."""
        return torch.cat(list(parts), dim=self.dim)

    def split(self, tensor: Tensor) -> list[Tensor]:
        """Module tensor -> HF tensors, as views."""
        return list(tensor.split([part.shape[self.dim] for part in self.parts], dim=self.dim))


@dataclass(frozen=True)
class Grouped(Concat):
    """As `Concat`, but the module's rows lie group by group (of heads, of ranks).

    `sizes` holds, for each HF tensor, the rows that its pieces have in one group; a group of the
    module is all pieces of all HF tensors, one below the other. `heads` tells for each how HF has
    them: 0, each piece of all groups together; n, group by group, and there in n heads of rows,
    each head with its share of every piece.
    """

    groups: int = 1
    sizes: tuple[tuple[int, ...], ...] = ()
    heads: tuple[int, ...] = ()

    def join(self, parts: Sequence[Tensor]) -> Tensor:
        """HF tensors -> module tensor."""
        pieces = []
        for part, sizes, heads in zip(parts, self.sizes, self.heads, strict=True):
            if heads:
                apart = part.unflatten(0, (self.groups, heads, -1))  # [G, n, rows, ...]
                shares = apart.split([size // heads for size in sizes], dim=2)
                pieces += [share.flatten(1, 2) for share in shares]
            else:
                whole = part.split([self.groups * size for size in sizes])
                pieces += [piece.unflatten(0, (self.groups, -1)) for piece in whole]
        return torch.cat(pieces, dim=1).flatten(0, 1)

    def split(self, tensor: Tensor) -> list[Tensor]:
        """Module tensor -> HF tensors, as copies: their rows lie apart."""
        rows = [size for sizes in self.sizes for size in sizes]
        pieces = iter(tensor.unflatten(0, (self.groups, -1)).split(rows, dim=1))
        parts = []
        for sizes, heads in zip(self.sizes, self.heads, strict=True):
            own = [next(pieces) for _ in sizes]
            if heads:
                shares = [piece.unflatten(1, (heads, -1)) for piece in own]
                parts.append(torch.cat(shares, dim=2).flatten(0, 2))
            else:
                parts.append(torch.cat([piece.flatten(0, 1) for piece in own]))
        return parts


@dataclass(frozen=True)
class Ranked(Grouped):
    """As `Grouped`, with one group a rank of tensor parallelism; `ranks` is asked of the file.

    A file may also hold the pieces of all ranks apart, under the module's name and theirs.
    """

    pieces: tuple[str, ...] = ()

    def over(self, ranks: int) -> Grouped:
        """The rule for a file of so many ranks.

        Raises:
            CheckpointError: the rows do not divide.
        """
        uneven = [size for sizes in self.sizes for size in sizes if size % ranks]
        if uneven or any(heads % ranks for heads in self.heads):
            raise CheckpointError(f"{self.name} lies in {ranks} parts, which its heads do not fit")
        sizes = tuple(tuple(size // ranks for size in sizes) for sizes in self.sizes)
        heads = tuple(heads // ranks for heads in self.heads)
        return Grouped(self.name, self.parts, self.dim, ranks, sizes, heads)


@dataclass(frozen=True)
class Stack:
    """The module's tensor [E, N, K] has a slice an expert, each of HF matrices one below the other.

    `slices` holds the matrices of each expert; all experts have the same shapes.
    """

    name: str
    slices: tuple[tuple[Source, ...], ...]

    @property
    def sources(self) -> tuple[Source, ...]:
        """The HF tensors, in the order of `join`."""
        return tuple(source for parts in self.slices for source in parts)

    @property
    def shape(self) -> tuple[int, ...]:
        """Shape of the module's tensor."""
        parts = self.slices[0]
        return len(self.slices), sum(part.shape[0] for part in parts), parts[0].shape[1]

    def join(self, parts: Sequence[Tensor]) -> Tensor:
        """HF tensors -> module tensor."""
        joined = parts[0].new_empty(self.shape)
        for place, part in zip(self.split(joined), parts, strict=True):
            place.copy_(part)
        return joined

    def split(self, tensor: Tensor) -> list[Tensor]:
        """Module tensor -> HF tensors, as views."""
        rows = [part.shape[0] for part in self.slices[0]]
        return [part for one in tensor.unbind() for part in one.split(rows)]


@dataclass(frozen=True)
class Fused(Same):
    """All experts in one HF tensor, [E, N, K], as transformers 5 defines it.

    Older files of other models held [E, K, N]. `layout_known` says whether the checkpoint's
    metadata tells the two apart; where N == K, the shape cannot.
    """

    layout_known: bool = True


@dataclass(frozen=True)
class CarriedStack(Stack, Carried):
    """`Stack`, only kept."""


@dataclass(frozen=True)
class CarriedFused(Fused, Carried):
    """`Fused`, only kept."""


@dataclass(frozen=True)
class Either:
    """Experts that a file holds apart or fused; `resolve` tells by the names in it."""

    apart: Stack
    fused: Fused

    @property
    def name(self) -> str:
        """Name of the module's tensor."""
        return self.apart.name


@dataclass(frozen=True)
class Tied:
    """An HF tensor that a file may repeat or leave out: the module has only `to`.

    Where a file has it, its bits must be those of `to`.
    """

    name: str
    shape: tuple[int, ...]
    to: str

    @property
    def sources(self) -> tuple[Source, ...]:
        """The one HF tensor."""
        return (Source(self.name, self.shape),)


Stored = Same | Concat | Stack
Resolved = Stored | Tied
Rule = Resolved | Either
Rules = Sequence[Rule]


class ForeignTable(NamedTuple):
    """The table of another program's module.

    Attributes:
        rules: one form of every tensor.
        aliases: (pattern in a name, what may stand in its place).
    """

    rules: tuple[Resolved, ...]
    aliases: tuple[tuple[str, str], ...] = ()


def resolve(rules: Rules, names: Collection[str]) -> tuple[Resolved, ...]:
    """Put the form in which a file holds its experts in the place of each `Either`.

    Args:
        rules: the architecture's table.
        names: of the file's HF tensors; without any of an `Either`, its experts are apart.

    Raises:
        CheckpointError: for experts in both forms, or fused ones whose layout nothing tells.
    """
    return tuple(_resolve(rule, names) if isinstance(rule, Either) else rule for rule in rules)


def _resolve(rule: Either, names: Collection[str]) -> Resolved:
    (fused,) = (source.name for source in rule.fused.sources)
    if fused not in names:
        return rule.apart
    apart = next((source.name for source in rule.apart.sources if source.name in names), None)
    if apart is not None:
        raise CheckpointError(
            f"the weights hold the same experts twice, as {fused} and as {apart}: remove one"
        )
    if rule.fused.shape[1] == rule.fused.shape[2] and not rule.fused.layout_known:
        raise CheckpointError(
            f"{fused} is {list(rule.fused.shape)}: its shape does not tell rows from columns, and "
            "config.json states no transformers_version of 5 or above, which would: save the "
            "experts one by one"
        )
    return rule.fused
