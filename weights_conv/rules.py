"""Conversion rules as data: how Hugging Face tensors become a module's tensors, and back.

A rule names the module's tensor and the HF tensors it is made of, with their shapes. `join` and
`split` are inverses and only move bits, so one table loads and saves without loss. An
architecture's table must name every tensor of its checkpoints: what is left over, missing or of
another shape or dtype is an error.
"""

from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from isomodels.errors import CheckpointError

_SHOWN = 6
_INTEGERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


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
class Carried(Same):
    """A tensor that is kept for the next save and never run: an engine may leave it out."""


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
class Regrouped(Concat):
    """As `Concat`, of HF tensors whose rows lie group by group (of heads), the parts within.

    The module has each part of all groups together. `sizes` holds, for each HF tensor, the rows
    of its parts in one group.
    """

    groups: int = 1
    sizes: tuple[tuple[int, ...], ...] = ()

    def join(self, parts: Sequence[Tensor]) -> Tensor:
        """HF tensors -> module tensor."""
        pieces = []
        for part, sizes in zip(parts, self.sizes, strict=True):
            pieces += part.unflatten(0, (self.groups, -1)).split(sizes, dim=1)
        return torch.cat([piece.flatten(0, 1) for piece in pieces])

    def split(self, tensor: Tensor) -> list[Tensor]:
        """Module tensor -> HF tensors, as copies: their rows lie apart."""
        rows = [self.groups * size for sizes in self.sizes for size in sizes]
        pieces = iter(piece.unflatten(0, (self.groups, -1)) for piece in tensor.split(rows))
        return [torch.cat([next(pieces) for _ in sizes], 1).flatten(0, 1) for sizes in self.sizes]


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


Resolved = Same | Concat | Stack | Tied
Rule = Resolved | Either
Rules = Sequence[Rule]


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


def same_bits(a: Tensor, b: Tensor) -> bool:
    """Whether two tensors have one shape, one dtype and equal bits (-0 is not +0; NaN is NaN)."""
    if a.shape != b.shape or a.dtype != b.dtype:
        return False
    integer = _INTEGERS[a.element_size()]
    return torch.equal(a.contiguous().view(integer), b.contiguous().view(integer))


def dtype_name(dtype: torch.dtype) -> str:
    """`torch.bfloat16` -> "bfloat16"."""
    return str(dtype).removeprefix("torch.")


def shorten(names: Collection[str]) -> str:
    """A list of names for a message: the first few, and how many more there are."""
    ordered = sorted(names)
    more = len(ordered) - _SHOWN
    return ", ".join(ordered[:_SHOWN]) + (f" and {more} more" if more > 0 else "")


def check_tensors(
    rules: Rules, hf: Mapping[str, Tensor], *, dtype: torch.dtype | None = None
) -> None:
    """Check names, shapes and dtypes of HF tensors against the rules; meta tensors will do.

    Args:
        rules: the architecture's table.
        hf: HF name -> tensor.
        dtype: what every tensor without a dtype of its own must have; None: anything, but one
            for all.

    Raises:
        CheckpointError: naming all that is missing, left over, misshapen or mistyped.
    """
    chosen = resolve(rules, hf)
    expected = _sources(chosen)
    optional = {rule.name for rule in chosen if isinstance(rule, Tied)}
    if dtype is None:
        dtype = next((hf[n].dtype for n, s in expected.items() if n in hf and not s.dtype), None)
    missing = expected.keys() - optional - hf.keys()
    left_over = hf.keys() - expected.keys()
    shapes: list[str] = []
    mistyped: dict[torch.dtype, list[str]] = {}
    for name in sorted(expected.keys() & hf.keys()):
        tensor = hf[name]
        source = expected[name]
        if tuple(tensor.shape) != source.shape:
            shapes.append(f"{name} is {list(tensor.shape)} instead of {list(source.shape)}")
        wanted = source.dtype or dtype
        fits = tensor.dtype == wanted or (source.or_common and tensor.dtype == dtype)
        if wanted is not None and not fits:
            mistyped.setdefault(wanted, []).append(f"{name} is {dtype_name(tensor.dtype)}")
    problems = []
    if missing:
        problems.append(f"{_count(missing)} missing: {shorten(missing)}")
    if left_over:
        problems.append(f"{_count(left_over)} left over: {shorten(left_over)}")
    if shapes:
        problems.append(f"wrong shape: {shorten(shapes)}")
    for wanted, names in mistyped.items():
        problems.append(f"{dtype_name(wanted)} expected: {shorten(names)}")
    if problems:
        raise CheckpointError("the weights do not fit the config: " + "; ".join(problems))


def pinned(rules: Rules) -> dict[str, torch.dtype]:
    """The module's tensors that have a dtype of their own, by name."""
    return {rule.name: rule.dtype for rule in rules if isinstance(rule, Same) and rule.dtype}


def check_tied(rules: Rules, hf: Mapping[str, Tensor]) -> None:
    """Check that a tied tensor which a file repeats has the bits of its twin.

    Raises:
        CheckpointError: naming the two.
    """
    for rule in rules:
        if isinstance(rule, Tied) and rule.name in hf and not same_bits(hf[rule.name], hf[rule.to]):
            raise CheckpointError(
                f"the config ties {rule.name} to {rule.to}, but the file has different "
                "values: set tie_word_embeddings to false, or remove one of the two"
            )


def iter_module(
    rules: Rules, hf: Mapping[str, Tensor], *, carried: bool = True
) -> Iterator[tuple[str, Tensor]]:
    """Module tensors one by one, from HF tensors that the checks have passed.

    Args:
        rules: the architecture's table.
        hf: HF name -> tensor; may be lazy, each tensor is read when it is needed.
        carried: whether to give the tensors of `Carried` rules.
    """
    for rule in resolve(rules, hf):
        if not isinstance(rule, Tied) and (carried or not isinstance(rule, Carried)):
            yield rule.name, rule.join([hf[source.name] for source in rule.sources])


def to_module(
    rules: Rules,
    hf: Mapping[str, Tensor],
    *,
    dtype: torch.dtype | None = None,
    carried: bool = True,
) -> dict[str, Tensor]:
    """HF tensors -> the module's tensors, each HF tensor used once.

    Args:
        rules: the architecture's table.
        hf: HF name -> tensor.
        dtype: what every tensor must have; None: anything, but one for all.
        carried: whether to return the tensors of `Carried` rules (checked in any case).

    Raises:
        CheckpointError: naming all that is missing, left over, misshapen or mistyped, or a tied
            tensor with bits of its own.
    """
    check_tensors(rules, hf, dtype=dtype)
    check_tied(rules, hf)
    return dict(iter_module(rules, hf, carried=carried))


def to_hf(
    rules: Rules, module: Mapping[str, Tensor], *, optional: Collection[str] = ()
) -> dict[str, Tensor]:
    """The module's tensors -> HF tensors, as views without a copy: the inverse of `to_module`.

    Args:
        rules: the architecture's table; of an `Either`, the experts apart.
        module: module name -> tensor.
        optional: HF names of `Tied` rules to write as well.

    Raises:
        CheckpointError: naming each module tensor that is missing, left over or misshapen.
    """
    chosen = resolve(rules, ())
    stored = [rule for rule in chosen if not isinstance(rule, Tied)]
    expected = {rule.name: rule.shape for rule in stored}
    problems = [f"{name} is missing" for name in expected.keys() - module.keys()]
    problems += [f"{name} has no rule" for name in module.keys() - expected.keys()]
    problems += [
        f"{name} is {list(module[name].shape)} instead of {list(shape)}"
        for name, shape in expected.items()
        if name in module and tuple(module[name].shape) != shape
    ]
    if problems:
        raise CheckpointError(f"the module does not fit the rules: {shorten(problems)}")
    hf = {}
    for rule in stored:
        tensors = rule.split(module[rule.name])
        hf.update({source.name: t for source, t in zip(rule.sources, tensors, strict=True)})
    for tied in chosen:
        if isinstance(tied, Tied) and tied.name in optional:
            hf[tied.name] = hf[tied.to]
    return hf


def _sources(rules: Sequence[Resolved]) -> dict[str, Source]:
    expected: dict[str, Source] = {}
    for rule in rules:
        for source in rule.sources:
            if source.name in expected:
                raise ValueError(f"two rules use {source.name}")
            expected[source.name] = source
    return expected


def _count(names: Collection[str]) -> str:
    return f"{len(names)} tensor{'' if len(names) == 1 else 's'}"
