"""Checkpoints with every kind of bit pattern, and reading them without the code under test."""

import json
import os
import shutil
import traceback
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor

from isomodels.checkpoint import Checkpoint
from isomodels.weights_conv.bits import same_bits
from isomodels.weights_conv.rules import Tied, Widened
from isomodels.weights_conv.tables import JoinedTensors, SplitTensors

INTEGERS = {torch.float32: torch.int32, torch.bfloat16: torch.int16}
# -0, the smallest subnormals, infinities, quiet and signalling NaNs with payloads.
SPECIAL = {
    torch.float32: (0x80000000, 1, 0x80000001, 0x7F800000, 0xFF800000, 0x7FC12345, 0xFF812345),
    torch.bfloat16: (0x8000, 1, 0x8001, 0x7F80, 0xFF80, 0x7FC5, 0xFF85),
}


def any_bits(*shape: int, dtype: torch.dtype = torch.float32, seed: int = 0) -> Tensor:
    """Uniform over all bit patterns, the special ones first."""
    integer = INTEGERS[dtype]
    info = torch.iinfo(integer)
    generator = torch.Generator().manual_seed(seed)
    x = torch.randint(info.min, info.max + 1, shape, generator=generator).to(integer)
    special = torch.tensor(SPECIAL[dtype]).to(integer)[: x.numel()]
    x.view(-1)[: len(special)] = special
    return x.view(dtype)


def raw(tensor: Tensor) -> tuple[list[int], bytes]:
    """Shape and bytes."""
    data = tensor.detach().contiguous().view(INTEGERS[tensor.dtype]).numpy().tobytes()
    return list(tensor.shape), data


def raw_file(file: Path) -> dict[str, tuple[list[int], bytes]]:
    """Tensors of a safetensors file by the format's definition: length, JSON header, data."""
    content = file.read_bytes()
    length = int.from_bytes(content[:8], "little")
    header = json.loads(content[8 : 8 + length])
    header.pop("__metadata__", None)
    data = content[8 + length :]
    return {name: (t["shape"], data[slice(*t["data_offsets"])]) for name, t in header.items()}


def raw_folder(folder: Path) -> dict[str, tuple[list[int], bytes]]:
    """All tensors of a checkpoint; the files must not overlap and must match the index."""
    tensors: dict[str, tuple[list[int], bytes]] = {}
    places = {}
    for file in sorted(folder.glob("*.safetensors")):
        found = raw_file(file)
        assert not tensors.keys() & found.keys()
        tensors |= found
        places |= dict.fromkeys(found, file.name)
    index = folder / "model.safetensors.index.json"
    if index.exists():
        content = json.loads(index.read_text())
        assert content["weight_map"] == places
        assert content["metadata"]["total_size"] == sum(len(data) for _, data in tensors.values())
    else:
        assert set(places.values()) == {"model.safetensors"}
    return tensors


def write_folder(folder: Path, shards: Mapping[str, Mapping[str, Tensor]]) -> Path:
    """A folder of weights with an empty config."""
    folder.mkdir(parents=True)
    (folder / "config.json").write_text("{}")
    write_shards(folder, shards)
    return folder


def write_shards(folder: Path, shards: Mapping[str, Mapping[str, Tensor]]) -> None:
    """Files of tensors, and their index unless it is the one whole file."""
    for name, tensors in shards.items():
        save_file(dict(tensors), folder / name, metadata={"format": "pt"})
    if set(shards) != {"model.safetensors"}:
        weight_map = {t: file for file, tensors in shards.items() for t in tensors}
        write_index(folder, weight_map, sum(t.nbytes for s in shards.values() for t in s.values()))


def write_index(folder: Path, weight_map: Any, total: int = 0) -> None:
    content = {"metadata": {"total_size": total}, "weight_map": weight_map}
    (folder / "model.safetensors.index.json").write_text(json.dumps(content))


def fill_with_any_bits(checkpoint: Path, *, shards: int = 1, seed: int = 0) -> Path:
    """Replace the weights of a one-file checkpoint by random bit patterns, in some shards.

    A tied head that the file repeats stays equal to the embedding.
    """
    config = json.loads((checkpoint / "config.json").read_text())
    dtype = {"float32": torch.float32, "bfloat16": torch.bfloat16}[config["torch_dtype"]]
    file = checkpoint / "model.safetensors"
    tensors = {
        name: any_bits(*shape, dtype=dtype, seed=seed + i)
        for i, (name, (shape, _)) in enumerate(sorted(raw_file(file).items()))
    }
    if config["tie_word_embeddings"] and "lm_head.weight" in tensors:
        tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"].clone()
    file.unlink()
    names = sorted(tensors)
    if shards == 1:
        write_shards(checkpoint, {file.name: tensors})
    else:
        # Neither in the order of layers nor by size: a layer's q, k, v lie in different files.
        parts = {
            f"model-{i + 1:05d}-of-{shards:05d}.safetensors": {
                name: tensors[name] for name in names[i::shards]
            }
            for i in range(shards)
        }
        write_shards(checkpoint, parts)
    return checkpoint


def copy_checkpoint(source: Path, target: Path) -> Path:
    shutil.copytree(source, target)
    return target


def edit_config(checkpoint: Path, **changes: Any) -> Path:
    """Change fields of config.json; None removes one."""
    file = checkpoint / "config.json"
    config = {**json.loads(file.read_text()), **changes}
    file.write_text(json.dumps({k: v for k, v in config.items() if v is not None}, indent=2))
    return checkpoint


def assert_round_trip(checkpoint: Checkpoint) -> None:
    """Every tensor goes through the module's form and back, and keeps its bits."""
    module = JoinedTensors(checkpoint.rules, checkpoint.tensors)
    back = SplitTensors(checkpoint.rules, module)
    tied = {rule.name for rule in checkpoint.rules if isinstance(rule, Tied)}
    assert back.keys() == checkpoint.tensors.keys() - tied
    widened = {s.name for r in checkpoint.rules if isinstance(r, Widened) for s in r.sources}
    for name, tensor in back.items():
        expected = checkpoint.tensors[name]
        assert same_bits(tensor, expected.float() if name in widened else expected), name


def in_child(work: Callable[[], object], *, uid: int | None = None) -> tuple[int, str]:
    """Run `work` in a forked process: its wait status, and what it raised as text."""
    reader, writer = os.pipe()
    child = os.fork()
    if child == 0:
        code = 1
        try:
            os.close(reader)
            if uid is not None:
                os.setuid(uid)
            work()
            code = 0
        except BaseException:
            os.write(writer, traceback.format_exc().encode())
        finally:
            os._exit(code)
    os.close(writer)
    with os.fdopen(reader) as pipe:
        text = pipe.read()
    return os.waitpid(child, 0)[1], text


def as_nobody(work: Callable[[], object]) -> tuple[int, str]:
    """Run `work` without root's right to read and write everything."""
    return in_child(work, uid=65534 if os.geteuid() == 0 else None)
