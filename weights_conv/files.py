"""Checkpoint folders of safetensors: strict lazy reading.

A folder holds either `model.safetensors`, or shards and `model.safetensors.index.json`. The index
and the shards must tell the same story: two readers of one folder must not see different weights.
"""

import json
import os
from collections.abc import Mapping
from dataclasses import dataclass
from io import FileIO
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from isomodels.errors import CheckpointError
from isomodels.weights_conv.bits import LazyTensors, shorten

SINGLE = "model.safetensors"
INDEX = "model.safetensors.index.json"
CONTRACT = "isomodels_contract.json"  # of the weights beside it: never copied to others
DIGESTS = "isomodels_digests.json"  # of a saved training's files: as little
_PICKLES = (".bin", ".pt", ".pth", ".ckpt")
DTYPES = {
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E5M2": torch.float8_e5m2,
    "I64": torch.int64,
    "I32": torch.int32,
    "I16": torch.int16,
    "I8": torch.int8,
    "U8": torch.uint8,
    "BOOL": torch.bool,
}


@dataclass(frozen=True)
class _File:
    """One open file: name -> (dtype as the format names it, shape, first byte)."""

    handle: FileIO
    tensors: dict[str, tuple[str, tuple[int, ...], int]]
    metadata: dict[str, str]


class TensorFiles(LazyTensors):
    """The tensors of a folder by HF name, each read from its file when it is asked for.

    The files stay open: a folder that is replaced meanwhile is still read as it was. They are read
    and not mapped, so that memory holds no more than the tensors that someone keeps, and a file
    that is cut short meanwhile is an error.

    Attributes:
        path: the folder.
        weight_map: tensor name -> file name.
        index_metadata: the index's own metadata; None where there is one file and no index.
    """

    def __init__(
        self,
        path: Path,
        files: Mapping[str, _File],
        weight_map: dict[str, str],
        index_metadata: dict[str, Any] | None = None,
    ):
        super().__init__(dict.fromkeys(weight_map, torch.empty(0, device="meta")))
        self.path = path
        self.weight_map = weight_map
        self.index_metadata = index_metadata
        self._files = files

    def __getitem__(self, name: str) -> Tensor:
        file = self._files[self.weight_map[name]]
        dtype, shape, begin = file.tensors[name]
        tensor = torch.empty(shape, dtype=DTYPES[dtype], device="cpu")  # whatever the default is
        if tensor.numel():
            read_into(file.handle, tensor.view(-1).view(torch.uint8).numpy().data, begin)
        return tensor

    def meta(self) -> dict[str, Tensor]:
        """Every tensor's shape and dtype, from the headers, as meta tensors.

        Raises:
            CheckpointError: a dtype that PyTorch lacks.
        """
        tensors, unknown = {}, []
        for name, file in self.weight_map.items():
            found, shape, _ = self._files[file].tensors[name]
            if found in DTYPES:
                tensors[name] = torch.empty(shape, dtype=DTYPES[found], device="meta")
            else:
                unknown.append(f"{name} ({found})")
        if unknown:
            raise CheckpointError(f"{self.path}: unknown dtype: {shorten(unknown)}")
        return tensors

    def file_metadata(self, file: str) -> dict[str, str]:
        """The text metadata in the header of one file."""
        return self._files[file].metadata


def read_into(handle: FileIO, place: memoryview, begin: int) -> None:
    """Fill `place` from the bytes of an open file that start at `begin`.

    Raises:
        CheckpointError: the file ends before, or cannot be read.
    """
    done = 0
    while done < len(place):
        try:
            count = os.preadv(handle.fileno(), [place[done:]], begin + done)
        except OSError as error:
            raise CheckpointError(f"cannot read {handle.name}: {error.strerror}") from None
        if count == 0:
            raise CheckpointError(f"{handle.name} was cut short: copy or download it again")
        done += count


def read_tensors(path: Path | str) -> TensorFiles:
    """Open a checkpoint folder.

    Args:
        path: folder with safetensors files.

    Returns:
        A lazy mapping HF name -> tensor. Only headers have been read.

    Raises:
        CheckpointError: no folder, no weights, pickles, a damaged file, or an index that does not
            agree with its shards.
    """
    path = Path(path)
    names = _list(path)
    if INDEX in names:
        return _read_sharded(path, names)
    if SINGLE not in names:
        raise CheckpointError(_why_no_weights(path, names))
    _refuse_strays(path, names, {SINGLE})
    file = _open(path / SINGLE)
    return TensorFiles(path, {SINGLE: file}, dict.fromkeys(file.tensors, SINGLE))


def replaced_name(path: Path) -> Path:
    """Where a save keeps the old folder for the moment between two renames."""
    return path.with_name(f".{path.name}.isomodels-old")


def _list(path: Path) -> set[str]:
    try:
        return {entry.name for entry in path.iterdir()}
    except FileNotFoundError:
        kept = replaced_name(path.absolute())
        hint = f": a save was cut off; its old folder is {kept}, rename it" if kept.exists() else ""
        raise CheckpointError(f"there is no folder {path}{hint}") from None
    except NotADirectoryError:
        raise CheckpointError(f"{path} is a file: give the checkpoint's folder") from None
    except OSError as error:
        raise CheckpointError(f"cannot read {path}: {error.strerror}") from None


def _why_no_weights(path: Path, names: set[str]) -> str:
    other = [name for name in names if name.endswith(".safetensors")]
    pickles = [name for name in names if name.endswith(_PICKLES)]
    if other:
        return f"{path} has no {INDEX} and no {SINGLE}, only {shorten(other)}"
    if pickles:
        return (
            f"{path} holds pickled weights ({shorten(pickles)}), which are not read because they "
            "can run code: save the model as safetensors first"
        )
    return f"{path} has no weights: {SINGLE} or {INDEX} is expected"


def _refuse_strays(path: Path, names: set[str], used: set[str]) -> None:
    strays = [name for name in names - used if name.endswith(".safetensors")]
    if strays:
        raise CheckpointError(f"{path}: no index lists {shorten(strays)}: remove what is extra")


def _read_sharded(path: Path, names: set[str]) -> TensorFiles:
    weight_map, metadata = _read_index(path / INDEX)
    shards = set(weight_map.values())
    if shards - names:
        raise CheckpointError(f"{path}: {INDEX} names a missing file: {shorten(shards - names)}")
    _refuse_strays(path, names, shards)
    files = {name: _open(path / name) for name in sorted(shards)}
    _compare(path, weight_map, files)
    return TensorFiles(path, files, weight_map, metadata)


def _read_index(file: Path) -> tuple[dict[str, str], dict[str, Any]]:
    try:
        index = json.loads(file.read_text())
    except (OSError, ValueError, RecursionError) as error:  # also of too many digits, or too deep
        raise CheckpointError(f"cannot read {file}: {error}") from None
    weight_map = index.get("weight_map") if isinstance(index, dict) else None
    if not isinstance(weight_map, dict) or not weight_map:
        raise CheckpointError(f"{file} has no weight_map")
    for shard in weight_map.values():
        if not isinstance(shard, str) or Path(shard).name != shard:
            raise CheckpointError(f"{file}: {shard!r} is no file name")
    metadata = index.get("metadata") or {}
    return weight_map, metadata if isinstance(metadata, dict) else {}


def _compare(path: Path, listed: dict[str, str], files: Mapping[str, _File]) -> None:
    found: dict[str, list[str]] = {}
    for shard, file in files.items():
        for name in file.tensors:
            found.setdefault(name, []).append(shard)
    twice = [f"{name} ({', '.join(at)})" for name, at in found.items() if len(at) > 1]
    wrong = [
        f"{name} (listed in {listed[name]}, lies in {at[0]})"
        for name, at in found.items()
        if len(at) == 1 and name in listed and listed[name] != at[0]
    ]
    problems = {
        "in more than one file": twice,
        "listed in the wrong file": wrong,
        "listed but in no file": listed.keys() - found.keys(),
        "in a file but not listed": found.keys() - listed.keys(),
    }
    told = [f"{what}: {shorten(names)}" for what, names in problems.items() if names]
    if told:
        raise CheckpointError(f"{path}: {INDEX} and its files disagree: {'; '.join(told)}")


def refuse_undecodable(path: Path) -> None:
    """safetensors opens no file whose path is not UTF-8.

    Raises:
        CheckpointError: naming the path.
    """
    try:
        str(path).encode()
    except UnicodeEncodeError:
        raise CheckpointError(f"{str(path)!a} is no UTF-8 text: rename it") from None


def _open(path: Path) -> _File:
    refuse_undecodable(path)
    try:
        handle = path.open("rb", buffering=0)
        with safe_open(path, framework="pt") as checked:  # the library checks the whole header
            metadata = checked.metadata() or {"format": "pt"}
    except SafetensorError as error:
        raise CheckpointError(
            f"{path} is truncated or damaged ({error}): copy or download it again"
        ) from None
    except OSError as error:
        raise CheckpointError(f"cannot read {path}: {error.strerror or error}") from None
    # The format: the header's length in 8 bytes, the header in JSON, the data.
    size = bytearray(8)
    read_into(handle, memoryview(size), 0)
    header = bytearray(int.from_bytes(size, "little"))
    read_into(handle, memoryview(header), 8)
    first = 8 + len(header)
    tensors = {
        name: (one["dtype"], tuple(one["shape"]), first + one["data_offsets"][0])
        for name, one in json.loads(header).items()
        if name != "__metadata__"
    }
    return _File(handle, tensors, metadata)
