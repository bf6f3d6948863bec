"""What a folder of Megatron's `dist_checkpointing` says about its tensors.

The format ("torch_dist") is that of torch.distributed.checkpoint: `.metadata` names each tensor's
shape, dtype and the chunks that it was saved in, and where in which file each chunk lies. That file
is a pickle, and so is `common.pt`: both are read by an unpickler that knows the classes listed here
and refuses every other name, so that reading cannot run code.
"""

import io
import json
import math
import pickle
import zipfile
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

import torch
from torch.distributed.checkpoint.metadata import (
    BytesStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorStorageMetadata,
)

from isomodels.errors import CheckpointError
from isomodels.weights_conv.bits import printable
from isomodels.weights_conv.dist_names import COMMON, CONFIG, LATEST, METADATA

_CLASSES = {
    "torch.distributed.checkpoint.metadata": (
        "BytesStorageMetadata",
        "ChunkStorageMetadata",
        "Metadata",
        "MetadataIndex",
        "StorageMeta",
        "TensorProperties",
        "TensorStorageMetadata",
        "_MEM_FORMAT_ENCODING",
    ),
    "torch.distributed.checkpoint.planner": (
        "BytesIOWriteData",
        "SavePlan",
        "TensorWriteData",
        "WriteItem",
        "WriteItemType",
    ),
    "torch.distributed.checkpoint.filesystem": ("_StorageInfo", "_StoragePrefix"),
    "torch": (
        "Size",
        "bfloat16",
        "bool",
        "float16",
        "float32",
        "float64",
        "float8_e4m3fn",
        "float8_e5m2",
        "int16",
        "int32",
        "int64",
        "int8",
        "uint8",
    ),
    "torch.serialization": ("_get_layout",),
    "collections": ("OrderedDict",),
    "pathlib": ("PosixPath",),
    "pathlib._local": ("PosixPath",),
}
_COMMON_CLASSES = {
    "argparse": ("Namespace",),
    "collections": ("OrderedDict", "defaultdict"),
    "torch": _CLASSES["torch"],
}


@dataclass(frozen=True)
class Chunk:
    """A box of a tensor, and the bytes of a file that `torch.save` wrote for it."""

    offsets: tuple[int, ...]
    sizes: tuple[int, ...]
    file: str
    begin: int
    length: int


@dataclass(frozen=True)
class StoredTensor:
    """A tensor of all ranks together; its chunks cover it, each element once."""

    shape: tuple[int, ...]
    dtype: torch.dtype
    chunks: tuple[Chunk, ...]


def find_distributed(path: Path) -> Path | None:
    """The folder of a `dist_checkpointing` save at a path: itself, or the latest of a training.

    Raises:
        CheckpointError: the file that names the latest save names none that is there, or one of
            them cannot be read.
    """
    try:
        return _find(path)
    except OSError as error:
        raise CheckpointError(f"cannot read {error.filename}: {error.strerror}") from None


def _find(path: Path) -> Path | None:
    if (path / METADATA).is_file():
        return path
    latest = path / LATEST
    if not latest.is_file():
        return None
    text = latest.read_text(errors="replace").strip()
    folder = path / (f"iter_{int(text):07d}" if text.isdecimal() and len(text) < 20 else "release")
    if not (folder / METADATA).is_file():
        raise CheckpointError(f"{latest} names {text!r}, and {folder} holds no {METADATA}")
    return folder


def read_metadata(folder: Path) -> dict[str, StoredTensor]:
    """The tensors of a folder by their names, optimizer states among them.

    Raises:
        CheckpointError: a file that is absent, damaged, of another format, names what is no part
            of the format, or describes chunks that overlap, leave gaps or lie outside their file.
    """
    _check_format(folder)
    file = folder / METADATA
    found = _unpickle(file.read_bytes, file, _CLASSES)
    try:
        sizes = {entry.name: entry.stat().st_size for entry in folder.iterdir()}
        return _tensors(found, sizes)
    except CheckpointError as error:
        raise CheckpointError(f"{file}: {error}") from None
    except OSError as error:
        raise CheckpointError(f"cannot read {folder}: {error.strerror}") from None
    except Exception as error:  # any shape of object may come out of a damaged pickle
        raise CheckpointError(f"{file} is damaged ({type(error).__name__}: {error})") from None


def read_common(folder: Path) -> Any:
    """What `common.pt` holds, without tensors.

    Raises:
        CheckpointError: it is absent, damaged, or holds objects of other than a few plain classes.
    """
    file = folder / COMMON

    def content() -> bytes:
        with zipfile.ZipFile(file) as archive:
            (record,) = [r for r in archive.infolist() if r.filename.endswith("/data.pkl")]
            refuse_compressed(record)
            return archive.read(record)

    return _unpickle(content, file, _COMMON_CLASSES)


def refuse_compressed(record: zipfile.ZipInfo) -> None:
    """torch.save stores records as they are; a compressed one could fill the memory.

    Raises:
        CheckpointError: the record is compressed.
    """
    if record.compress_type != zipfile.ZIP_STORED or record.file_size != record.compress_size:
        raise CheckpointError(f"its record {record.filename!r} is compressed")


def _check_format(folder: Path) -> None:
    file = folder / CONFIG
    try:
        stated = json.loads(file.read_text())
    except FileNotFoundError:
        raise CheckpointError(f"{folder} has no {CONFIG}: a save was cut off") from None
    except (OSError, UnicodeDecodeError, json.JSONDecodeError, RecursionError) as error:
        raise CheckpointError(f"cannot read {file}: {error}") from None
    backend = stated.get("sharded_backend") if isinstance(stated, dict) else None
    if backend != "torch_dist":
        raise CheckpointError(
            f"{file}: the format is {backend!r}, and only torch_dist is read: load it in Megatron "
            "and save it with --ckpt-format torch_dist"
        )


# Python's own form: the one in C can be made to take any amount of memory by a number in the file.
_PythonUnpickler: Any = pickle._Unpickler


class _Unpickler(_PythonUnpickler):
    """Knows the given names and nothing else, and sets attributes of instances only."""

    def __init__(self, stream: Any, names: Mapping[str, Iterable[str]]):
        super().__init__(stream)
        self._names = names

    def find_class(self, module: str, name: str) -> Any:
        """The class of a name, where it is one of the known."""
        if name not in self._names.get(module, ()):
            raise CheckpointError(
                f"it names {module}.{name}, which is no part of the format and is never loaded, "
                "since it might run code"
            )
        return super().find_class(module, name)

    def _build(self) -> None:
        if isinstance(self.stack[-2], type) or callable(self.stack[-2]):
            raise CheckpointError("it would change a class, which is no part of the format")
        self.load_build()

    dispatch: ClassVar = {**_PythonUnpickler.dispatch, pickle.BUILD[0]: _build}


def _unpickle(content: Any, file: Path, names: Mapping[str, Iterable[str]]) -> Any:
    try:
        return _Unpickler(io.BytesIO(content()), names).load()
    except CheckpointError as error:
        raise CheckpointError(f"{file}: {error}") from None
    except FileNotFoundError:
        raise CheckpointError(f"{file} is absent") from None
    except OSError as error:
        raise CheckpointError(f"cannot read {file}: {error.strerror}") from None
    except Exception as error:  # a damaged pickle may raise anything
        raise CheckpointError(f"{file} is damaged ({type(error).__name__}: {error})") from None


def _tensors(found: Any, files: Mapping[str, int]) -> dict[str, StoredTensor]:
    if not isinstance(found, Metadata):
        raise CheckpointError(f"it holds a {type(found).__name__}, no Metadata")
    tensors = {}
    for name, stored in found.state_dict_metadata.items():
        if isinstance(stored, BytesStorageMetadata):
            continue  # an object, such as the state of a random generator
        if not isinstance(name, str) or not isinstance(stored, TensorStorageMetadata):
            raise CheckpointError(f"it holds a {type(stored).__name__} under {name!r}")
        shape, dtype, shown = _box(stored.size), stored.properties.dtype, printable(name)
        if not isinstance(dtype, torch.dtype):
            raise CheckpointError(f"the dtype of {shown} is {dtype!r}")
        chunks = []
        for one in stored.chunks:
            index = MetadataIndex(name, one.offsets)
            place = found.storage_data.get(index)
            if place is None:
                raise CheckpointError(f"{shown}: nothing tells where its chunk {one.offsets} lies")
            chunks.append(_chunk(shown, dtype, _box(one.offsets), _box(one.sizes), place, files))
        if not _covers(shape, [(c.offsets, c.sizes) for c in chunks]):
            raise CheckpointError(f"the chunks of {shown} overlap or leave gaps")
        tensors[name] = StoredTensor(shape, dtype, tuple(chunks))
    return tensors


def _box(values: Any) -> tuple[int, ...]:
    box = tuple(values)
    known = all(type(value) is int and value >= 0 for value in box)
    if not known or math.prod(max(1, value) for value in box) >= 2**62:  # torch counts strides so
        raise CheckpointError(f"{box} is no shape")
    return box


def _chunk(
    name: str,
    dtype: torch.dtype,
    offsets: tuple[int, ...],
    sizes: tuple[int, ...],
    place: Any,
    files: Mapping[str, int],
) -> Chunk:
    file = place.relative_path
    if getattr(place, "transform_descriptors", None):
        raise CheckpointError(f"{name} is compressed or encrypted, which is not implemented")
    begin, length = _box((place.offset, place.length))
    if math.prod(sizes) * dtype.itemsize > length:
        raise CheckpointError(f"{name} has a chunk {list(sizes)} in {length} bytes")
    if file not in files:  # only names, no paths: nothing outside of the folder is read
        raise CheckpointError(f"{name} lies in {file!r}, which is absent: copy the folder again")
    if begin + length > files[file]:
        raise CheckpointError(f"{file} was cut short, and {name} is lost: copy the folder again")
    return Chunk(offsets, sizes, file, begin, length)


def _covers(shape: tuple[int, ...], boxes: list[tuple[tuple[int, ...], tuple[int, ...]]]) -> bool:
    """Whether boxes (offsets, sizes) cover a shape, each element once: cut dimension by dimension.

    Whoever cuts each dimension into ranges, and each range anew in the next, gets such boxes; a
    grid, which is what parallel layouts are, is one of them.
    """
    if any(len(offsets) != len(shape) or len(sizes) != len(shape) for offsets, sizes in boxes):
        return False
    if not shape:
        return len(boxes) == 1
    if 0 in shape:
        return all(math.prod(sizes) == 0 for _, sizes in boxes)
    ranges: dict[tuple[int, int], list[tuple[tuple[int, ...], tuple[int, ...]]]] = {}
    for offsets, sizes in boxes:
        ranges.setdefault((offsets[0], sizes[0]), []).append((offsets[1:], sizes[1:]))
    end = 0
    for (begin, size), inner in sorted(ranges.items()):
        if begin != end or size == 0 or not _covers(shape[1:], inner):
            return False
        end = begin + size
    return end == shape[0]
