"""Folders of Megatron's `dist_checkpointing`, written without the code under test."""

import json
import pickle
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.distributed.checkpoint.filesystem import _StorageInfo
from torch.distributed.checkpoint.metadata import (
    BytesStorageMetadata,
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorProperties,
    TensorStorageMetadata,
)

Chunks = list[tuple[tuple[int, ...], Tensor]]  # (offsets, part)


def write_dcp(folder: Path, tensors: Mapping[str, Chunks], *, files: int = 2) -> Path:
    """Write chunks of tensors as ranks would, dealt out over some files."""
    folder.mkdir(parents=True)
    described: dict[str, Any] = {"rng_state": BytesStorageMetadata()}
    storage = {}
    streams = [(folder / f"__{rank}_0.distcp").open("wb") for rank in range(files)]
    number = 0
    for name, chunks in tensors.items():
        ends = [[o + s for o, s in zip(at, t.shape, strict=True)] for at, t in chunks]
        shape = torch.Size(max(end) for end in zip(*ends, strict=True))
        boxes = []
        for offsets, part in chunks:
            stream = streams[number % files]
            number += 1
            begin = stream.tell()
            torch.save(part.clone(), stream)
            where = torch.Size(offsets)
            file = Path(stream.name).name
            storage[MetadataIndex(name, where)] = _StorageInfo(file, begin, stream.tell() - begin)
            boxes.append(ChunkStorageMetadata(where, part.shape))
        dtype = chunks[0][1].dtype
        described[name] = TensorStorageMetadata(TensorProperties(dtype), shape, boxes)
    for stream in streams:
        stream.close()
    (folder / ".metadata").write_bytes(pickle.dumps(Metadata(described, storage_data=storage)))
    torch.save({"iteration": 12, "checkpoint_version": 3.0}, folder / "common.pt")
    (folder / "metadata.json").write_text(
        json.dumps({"sharded_backend": "torch_dist", "sharded_backend_version": 1})
    )
    return folder


def whole(tensor: Tensor) -> Chunks:
    """A tensor in one chunk."""
    return [((0,) * tensor.dim(), tensor)]


def rows(tensor: Tensor, ranks: int, dim: int = 0) -> Chunks:
    """Equal cuts along a dimension, one a rank."""
    chunks, begin = [], 0
    for part in tensor.chunk(ranks, dim):
        offsets = [0] * tensor.dim()
        offsets[dim] = begin
        begin += part.shape[dim]
        chunks.append((tuple(offsets), part))
    return chunks


def grid(tensor: Tensor, cuts: Iterable[int]) -> Chunks:
    """Equal cuts along several dimensions."""
    chunks: Chunks = whole(tensor)
    for dim, count in enumerate(cuts):
        chunks = [
            (tuple(a + b for a, b in zip(at, inner, strict=True)), piece)
            for at, part in chunks
            for inner, piece in rows(part, count, dim)
        ]
    return chunks
