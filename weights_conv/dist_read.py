"""Tensors of a Megatron `dist_checkpointing` folder, put together from the chunks of its ranks.

A chunk is what `torch.save` writes for one tensor; it is read by torch's `weights_only` reader,
which builds tensors and nothing else.
"""

import io
import os
import re
import zipfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import combinations, product
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from isomodels.errors import CheckpointError
from isomodels.weights_conv.bits import LazyTensors, dtype_name, shorten
from isomodels.weights_conv.dist_metadata import (
    Chunk,
    StoredTensor,
    read_metadata,
    refuse_compressed,
)
from isomodels.weights_conv.rules import Ranked, Resolved, Tied

# Optimizer states, and what trainers keep of random generators and of their quantisation.
_NO_WEIGHTS = re.compile(
    r"(^|\.)(optimizer|chained_\d+)\.|(^|[./])(_extra_state|rng_state)($|[./])"
)


class _Window(io.RawIOBase):
    """A part of an open file as a file of its own."""

    def __init__(self, handle: io.FileIO, begin: int, length: int):
        super().__init__()
        self._handle, self._begin, self._length, self._at = handle, begin, length, 0

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def tell(self) -> int:
        return self._at

    def seek(self, offset: int, whence: int = os.SEEK_SET) -> int:
        self._at = (
            offset + {os.SEEK_SET: 0, os.SEEK_CUR: self._at, os.SEEK_END: self._length}[whence]
        )
        return self._at

    def readinto(self, buffer: Any) -> int:
        place = memoryview(buffer)[: max(0, self._length - self._at)]
        count = os.preadv(self._handle.fileno(), [place], self._begin + self._at)
        self._at += count
        return count


class DistributedFiles:
    """The weights of a folder by the names that the trainer gave them.

    Attributes:
        path: the folder.
        tensors: name -> what is stored; weights only, no optimizer states.
    """

    def __init__(self, path: Path):
        self.path = path
        self.tensors: dict[str, StoredTensor] = {
            name: tensor
            for name, tensor in read_metadata(path).items()
            if not _NO_WEIGHTS.search(name)
        }
        used = {chunk.file for tensor in self.tensors.values() for chunk in tensor.chunks}
        try:
            self._files = {name: (path / name).open("rb", buffering=0) for name in sorted(used)}
        except OSError as error:
            raise CheckpointError(f"cannot read {error.filename}: {error.strerror}") from None
        self._last: tuple[Chunk, Tensor] | None = None
        self._slices: dict[tuple[str, int], dict[tuple[int, ...], list[Chunk]]] = {}

    def read(self, name: str, lead: Sequence[int] = ()) -> Tensor:
        """A tensor, or the slice of it at the given indices of its first dimensions.

        Raises:
            CheckpointError: a chunk that is damaged, or not of the shape and dtype that are stated.
        """
        stored = self.tensors[name]
        depth, shape = len(lead), stored.shape[len(lead) :]
        near = self.chunks_at(name, lead)
        if len(near) == 1 and near[0].sizes[depth:] == shape:
            return self._slice(name, stored, near[0], lead)
        tensor = torch.empty(shape, dtype=stored.dtype, device="cpu")
        for chunk in near:
            place = tensor
            for dim, (begin, size) in enumerate(
                zip(chunk.offsets[depth:], chunk.sizes[depth:], strict=True)
            ):
                place = place.narrow(dim, begin, size)
            place.copy_(self._slice(name, stored, chunk, lead))
        return tensor

    def chunks_at(self, name: str, lead: Sequence[int] = ()) -> list[Chunk]:
        """The chunks that hold a part of a slice."""
        if not lead:
            return list(self.tensors[name].chunks)
        by_lead = self._slices.get((name, len(lead)))
        if by_lead is None:  # made once: layers and experts make many slices of many chunks
            by_lead = self._slices[name, len(lead)] = {}
            for chunk in self.tensors[name].chunks:
                spans = zip(chunk.offsets, chunk.sizes, strict=True)
                ranges = [range(begin, begin + size) for begin, size in spans]
                for place in product(*ranges[: len(lead)]):
                    by_lead.setdefault(place, []).append(chunk)
        return by_lead.get(tuple(lead), [])

    def _slice(self, name: str, stored: StoredTensor, chunk: Chunk, lead: Sequence[int]) -> Tensor:
        if self._last is not None and self._last[0] == chunk:  # another slice of the same chunk
            tensor = self._last[1]
        else:
            self._last = None
            tensor = self._load(name, stored, chunk)
        if lead:
            self._last = (chunk, tensor)
        for index, begin in zip(lead, chunk.offsets, strict=False):
            tensor = tensor[index - begin]
        return tensor

    def _load(self, name: str, stored: StoredTensor, chunk: Chunk) -> Tensor:
        window: Any = _Window(self._files[chunk.file], chunk.begin, chunk.length)
        try:
            _check_sums(window)
            window.seek(0)
            tensor = torch.load(window, map_location="cpu", weights_only=True)
        except Exception as error:  # the reader of a damaged archive may raise anything
            reason = str(error).splitlines()[0] if str(error) else type(error).__name__
            raise CheckpointError(
                f"{self.path / chunk.file} is damaged at {name} ({reason}): copy it again"
            ) from None
        if not isinstance(tensor, Tensor):
            raise CheckpointError(f"{self.path / chunk.file} holds no tensor for {name}")
        if tuple(tensor.shape) != chunk.sizes or tensor.dtype != stored.dtype:
            raise CheckpointError(
                f"{self.path / chunk.file} holds {list(tensor.shape)} in "
                f"{dtype_name(tensor.dtype)} for a chunk of {name}, which is said to be "
                f"{list(chunk.sizes)} in {dtype_name(stored.dtype)}"
            )
        return tensor.detach()


def _check_sums(window: Any) -> None:
    """Compare the checksums of an archive, which torch's reader passes over; 0 means none."""
    with zipfile.ZipFile(window) as archive:
        for record in archive.infolist():
            refuse_compressed(record)
            if record.CRC:
                with archive.open(record) as content:
                    while content.read(2**20):
                        pass


@dataclass(frozen=True)
class _Place:
    """Where a module's tensor lies: tensors of the folder, or slices, one below the other."""

    names: tuple[str, ...]
    lead: tuple[int, ...] = ()


class ModuleTensors(LazyTensors):
    """A module's tensors by the names of its rules, from a distributed folder.

    A tensor may lie under its name with a prefix, under another name, in pieces (`Ranked`), or in a
    larger tensor: a trainer stacks the same parameter of all layers, or of all experts, so that the
    numbers in the name are indices of its first dimensions.

    Args:
        files: the folder.
        rules: the table that names the tensors.
        prefix: before every name in the folder.
        aliases: (pattern in a name, what may stand in its place), for those not found.

    Attributes:
        rules: the table for this folder: its `Ranked` rules told apart by ranks.
        left_over: tensors of the folder that no rule names.
    """

    def __init__(
        self,
        files: DistributedFiles,
        rules: Sequence[Resolved],
        prefix: str = "",
        aliases: Sequence[tuple[str, str]] = (),
    ):
        self._files = files
        self._places: dict[str, _Place] = {}
        settled: list[Resolved] = []
        for rule in rules:
            if isinstance(rule, Tied):
                settled.append(rule)
                continue
            names = [prefix + name for name in _aliased(rule.name, aliases)]
            found = (_find(files.tensors, name, rule) for name in names)
            place = next((one for one in found if one is not None), None)
            if place is not None:
                self._places[rule.name] = place
            if isinstance(rule, Ranked):
                whole = place is None or len(place.names) > 1
                settled.append(rule.over(1 if whole else self._ranks(place)))
            else:
                settled.append(rule)
        self.rules = tuple(settled)
        used = {name for place in self._places.values() for name in place.names}
        self.left_over = files.tensors.keys() - used
        super().__init__({name: self._describe(place) for name, place in self._places.items()})

    def _ranks(self, place: _Place | None) -> int:
        """How many ranks a tensor was saved by, told from its cuts along the rows."""
        assert place is not None
        depth = len(place.lead)
        chunks = self._files.chunks_at(place.names[0], place.lead)
        return len({chunk.offsets[depth] for chunk in chunks})

    def _describe(self, place: _Place) -> Tensor:
        parts = [self._files.tensors[name] for name in place.names]
        shapes = [part.shape[len(place.lead) :] for part in parts]
        dtypes = {part.dtype for part in parts}
        if len({shape[1:] for shape in shapes}) > 1 or len(dtypes) > 1:
            raise CheckpointError(f"{self._files.path}: {shorten(place.names)} do not fit together")
        rows = shapes[0] if len(shapes) == 1 else (sum(s[0] for s in shapes), *shapes[0][1:])
        return torch.empty(rows, dtype=parts[0].dtype, device="meta")

    def __getitem__(self, name: str) -> Tensor:
        place = self._places[name]
        parts = [self._files.read(one, place.lead) for one in place.names]
        return parts[0] if len(parts) == 1 else torch.cat(parts)


def _find(known: Mapping[str, StoredTensor], name: str, rule: Resolved) -> _Place | None:
    for whole, lead in _spellings(name):
        if whole in known:
            shape = known[whole].shape
            inside = all(index < size for index, size in zip(lead, shape, strict=False))
            return _Place((whole,), lead) if inside and len(shape) >= len(lead) else None
        if isinstance(rule, Ranked) and rule.pieces:
            pieces = tuple(f"{whole}.{piece}" for piece in rule.pieces)
            if all(piece in known for piece in pieces):
                return _Place(pieces, lead)
    return None


def _aliased(name: str, aliases: Sequence[tuple[str, str]]) -> list[str]:
    """A name, and what it becomes by any of the aliases."""
    names = [name]
    for pattern, other in aliases:
        names += [re.sub(pattern, other, one) for one in names if re.search(pattern, one)]
    return list(dict.fromkeys(names))


def _spellings(name: str) -> list[tuple[str, tuple[int, ...]]]:
    """A name as it is, then with some of its numbers taken for indices of leading dimensions."""
    parts = name.split(".")
    numbers = [place for place, part in enumerate(parts) if part.isdecimal()]
    found = []
    for count in range(len(numbers) + 1):
        for taken in combinations(numbers, count):
            kept = [part for place, part in enumerate(parts) if place not in taken]
            found.append((".".join(kept), tuple(int(parts[place]) for place in taken)))
    return found
