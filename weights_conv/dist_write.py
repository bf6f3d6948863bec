"""A Megatron `dist_checkpointing` folder written as a stream: one tensor at a time is in memory.

Megatron's own save wants every tensor at once and a process group. The format allows more: chunks
follow one another in files, each as `torch.save` writes it, and `.metadata`, written last, tells
where. Megatron reads it in any parallel layout.
"""

import json
import pickle
from collections.abc import Iterator
from pathlib import Path
from typing import Any, BinaryIO

import torch
from torch import Tensor
from torch.distributed.checkpoint.filesystem import _StorageInfo
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    StorageMeta,
    TensorProperties,
    TensorStorageMetadata,
)

from isomodels.weights_conv.bits import LazyTensors, dtype_name
from isomodels.weights_conv.dist_names import COMMON, CONFIG, METADATA
from isomodels.weights_conv.shards import DEFAULT_SHARD_SIZE, Progress

# A rank that loads a slice reads whole chunks; torch.save copies a chunk once more.
_CHUNK_SIZE = 64 * 2**20
_FORMAT = {
    "sharded_backend": "torch_dist",
    "sharded_backend_version": 1,
    "common_backend": "torch",
    "common_backend_version": 1,
}


def write_distributed(
    folder: Path,
    tensors: LazyTensors,
    *,
    max_shard_size: int | None = None,
    progress: Progress = lambda _: None,
) -> None:
    """Write tensors into a folder as Megatron's `dist_checkpointing` would.

    Args:
        folder: where.
        tensors: name -> tensor, under the names that `sharded_state_dict` gives them.
        max_shard_size: bytes after which a new file is begun.
        progress: called with the number of bytes after each tensor.
    """
    limit = max_shard_size or DEFAULT_SHARD_SIZE
    described: dict[str, Any] = {}
    places: dict[MetadataIndex, _StorageInfo] = {}
    left = list(tensors)
    number = 0
    while left:
        file = f"__0_{number}.distcp"
        with (folder / file).open("wb") as out:
            while left and out.tell() < limit:
                name = left.pop(0)
                tensor, expected = tensors[name], tensors.meta()[name]
                if tensor.shape != expected.shape or tensor.dtype != expected.dtype:
                    raise ValueError(f"{name} is {list(tensor.shape)} {dtype_name(tensor.dtype)}")
                described[name] = _write_tensor(out, file, name, tensor, places)
                progress(tensor.nbytes)
                del tensor
        number += 1
    metadata = Metadata(described, storage_data=places, storage_meta=StorageMeta())
    torch.save({"iteration": 0, "checkpoint_version": 3.0}, folder / COMMON)
    (folder / METADATA).write_bytes(pickle.dumps(metadata))
    (folder / CONFIG).write_text(json.dumps(_FORMAT))


def _write_tensor(
    out: BinaryIO,
    file: str,
    name: str,
    tensor: Tensor,
    places: dict[MetadataIndex, _StorageInfo],
) -> TensorStorageMetadata:
    chunks = []
    for offsets, part in _chunks(tensor):
        begin = out.tell()
        # a clone of its own: torch.save writes all of the storage that a view lies in
        torch.save(part.clone(memory_format=torch.contiguous_format), out)
        where = torch.Size(offsets)
        places[MetadataIndex(name, where)] = _StorageInfo(file, begin, out.tell() - begin)
        chunks.append(ChunkStorageMetadata(where, part.shape))
    return TensorStorageMetadata(TensorProperties(tensor.dtype), tensor.shape, chunks)


def _chunks(tensor: Tensor) -> Iterator[tuple[tuple[int, ...], Tensor]]:
    """Ranges of rows, and of the second dimension where one row is large: (offsets, chunk)."""
    if tensor.nbytes <= _CHUNK_SIZE or tensor.dim() == 0:
        yield (0,) * tensor.dim(), tensor
        return
    row = tensor.nbytes // tensor.shape[0]
    if row > _CHUNK_SIZE and tensor.dim() > 1:
        for index in range(tensor.shape[0]):
            for offsets, part in _chunks(tensor[index]):
                yield (index, *offsets), part[None]
        return
    step = max(1, _CHUNK_SIZE // row)
    for begin in range(0, tensor.shape[0], step):
        yield (begin, *(0,) * (tensor.dim() - 1)), tensor[begin : begin + step]
