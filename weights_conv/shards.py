"""Safetensors files written as a stream: one tensor at a time is in memory.

The format: the header's length in 8 bytes, the header in JSON, the data without gaps. safetensors'
own writer wants all tensors of a file at once.
"""

import json
import math
from collections.abc import Callable
from pathlib import Path
from typing import BinaryIO

import torch
from torch import Tensor

from isomodels.errors import CheckpointError
from isomodels.weights_conv.bits import LazyTensors, dtype_name, shorten
from isomodels.weights_conv.files import DTYPES, INDEX, SINGLE, TensorFiles

DEFAULT_SHARD_SIZE = 5_000_000_000
_NAMES = {dtype: name for name, dtype in DTYPES.items()}
Progress = Callable[[int], None]


def plan_shards(
    tensors: LazyTensors, source: TensorFiles | None, max_shard_size: int | None
) -> dict[str, list[str]]:
    """File name -> tensor names: the source's division into files, or files of a size.

    Raises:
        CheckpointError: the source's division is asked for and it has other tensors.
    """
    plan: dict[str, list[str]] = {}
    if source is not None and max_shard_size is None:
        different = set(source) ^ set(tensors)
        if different:
            raise CheckpointError(f"{source.path} has other tensors: {shorten(different)}")
        for name, file in source.weight_map.items():
            plan.setdefault(file, []).append(name)
        return plan
    shards: list[list[str]] = [[]]
    limit, filled = max_shard_size or DEFAULT_SHARD_SIZE, 0
    for name, tensor in tensors.meta().items():
        if shards[-1] and filled + tensor.nbytes > limit:
            shards.append([])
            filled = 0
        shards[-1].append(name)
        filled += tensor.nbytes
    if len(shards) == 1:
        return {SINGLE: shards[0]}
    count = len(shards)
    return {f"model-{i:05d}-of-{count:05d}.safetensors": s for i, s in enumerate(shards, 1)}


def write_shards(
    folder: Path,
    tensors: LazyTensors,
    plan: dict[str, list[str]],
    source: TensorFiles | None,
    progress: Progress,
) -> None:
    """Write the files of a plan, and their index unless it is the one whole file.

    Args:
        folder: where.
        tensors: HF name -> tensor.
        plan: from `plan_shards`.
        source: a folder whose metadata is kept, file by file.
        progress: called with the number of bytes after each tensor.
    """
    meta = tensors.meta()
    for file, names in plan.items():
        known = source is not None and file in source.weight_map.values()
        metadata = source.file_metadata(file) if source is not None and known else {"format": "pt"}
        with (folder / file).open("wb") as out:
            _write_file(out, tensors, {name: meta[name] for name in names}, metadata, progress)
    if set(plan) != {SINGLE}:
        weight_map = {name: file for file, names in plan.items() for name in names}
        old = (source.index_metadata or {}) if source is not None else {}
        index = {
            "metadata": {**old, "total_size": sum(meta[name].nbytes for name in weight_map)},
            "weight_map": dict(sorted(weight_map.items())),
        }
        (folder / INDEX).write_text(json.dumps(index, indent=2) + "\n")


def _write_file(
    out: BinaryIO,
    tensors: LazyTensors,
    meta: dict[str, Tensor],
    metadata: dict[str, str],
    progress: Progress,
) -> None:
    # wide dtypes first, so that every tensor is aligned; else as given, since neighbours are often
    # parts of one tensor of the source
    order = sorted(meta, key=lambda name: -meta[name].itemsize)
    header: dict[str, object] = {"__metadata__": metadata}
    begin = 0
    for name in order:
        one = meta[name]
        header[name] = {
            "dtype": _NAMES[one.dtype],
            "shape": list(one.shape),
            "data_offsets": [begin, begin + one.nbytes],
        }
        begin += one.nbytes
    text = json.dumps(header).encode()
    text += b" " * (math.ceil(len(text) / 8) * 8 - len(text))
    out.write(len(text).to_bytes(8, "little"))
    out.write(text)
    for name in order:
        tensor = tensors[name]
        if tensor.shape != meta[name].shape or tensor.dtype != meta[name].dtype:
            raise ValueError(f"{name} is {list(tensor.shape)} {dtype_name(tensor.dtype)}")
        if tensor.numel():
            out.write(tensor.contiguous().view(-1).view(torch.uint8).numpy().data)
        progress(tensor.nbytes)
        del tensor  # a part of a larger one: let go of it before the next is read
