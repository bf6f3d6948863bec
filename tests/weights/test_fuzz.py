"""Damaged and hostile files: each ends in one clear error, or is read as what it says."""

import json
import os
import pickle
import random
import shutil
import struct
import zipfile
from collections.abc import Callable
from copy import deepcopy
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from isomodels.config import read_config
from isomodels.conversion import convert_checkpoint
from isomodels.errors import CheckpointError, IsoError
from isomodels.stored_weights import open_weights
from isomodels.weights_conv.dist_metadata import read_common, read_metadata
from tests.checkpoints import make_qwen3, make_qwen3_moe
from tests.hybrid.checkpoints import make_qwen3_5_moe
from tests.moe.mla.models import make as make_latent
from tests.weights.support import raw, raw_file

SIZES = {
    "vocab_size": 32,
    "hidden_size": 16,
    "intermediate_size": 16,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 8,
}
FAST, SLOW = 200, 2400
quiet = {
    "deadline": None,
    "suppress_health_check": list(HealthCheck),
    "database": None,
    "derandomize": True,
}


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    root = tmp_path_factory.mktemp("fuzz")
    hf = make_qwen3(root / "hf", torch.bfloat16, **SIZES)
    for name in ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja"):
        (hf / name).unlink()
    convert_checkpoint(hf, root / "megatron", to="megatron")
    return {"hf": hf, "megatron": root / "megatron"}


def reads(folder: Path) -> dict[str, Any] | str:
    """All tensors of a folder, or the one error that it ends in."""
    try:
        found = open_weights(folder).tensors
        return {name: raw(found[name]) for name in found}
    except IsoError as error:
        text = str(error)
        assert text
        assert "Traceback" not in text
        return text


def damaged(data: st.DataObject, content: bytes, spans: list[tuple[int, int]]) -> bytes:
    """A file with some bytes of the given spans changed, cut out, doubled, or cut short."""
    begin, end = data.draw(st.sampled_from(spans))
    kind = data.draw(st.sampled_from(["bytes", "bit", "cut", "insert", "truncate", "numbers"]))
    at = data.draw(st.integers(begin, max(begin, end - 1)))
    if kind == "bit":
        flipped = content[at] ^ (1 << data.draw(st.integers(0, 7)))
        return content[:at] + bytes([flipped]) + content[at + 1 :]
    if kind == "bytes":
        new = data.draw(st.binary(min_size=1, max_size=8))
        return content[:at] + new + content[at + len(new) :]
    if kind == "cut":
        return content[:at] + content[at + data.draw(st.integers(1, 40)) :]
    if kind == "insert":
        return content[:at] + data.draw(st.binary(min_size=1, max_size=20)) + content[at:]
    if kind == "truncate":
        return content[:at]
    number = data.draw(st.sampled_from([0, 1, 2**31 - 1, 2**31, 2**32 - 1, 2**62, 2**64 - 1]))
    width = data.draw(st.sampled_from(["<I", "<Q"]))
    packed = struct.pack(width, number % 2 ** (8 * struct.calcsize(width)))
    return content[:at] + packed + content[at + len(packed) :]


def edit_header(data: st.DataObject, content: bytes) -> bytes:
    """A safetensors file whose header is sound JSON that says something else."""
    length = int.from_bytes(content[:8], "little")
    header = json.loads(content[8 : 8 + length])
    name = data.draw(st.sampled_from([n for n in header if n != "__metadata__"]))
    numbers = st.sampled_from(
        [-1, 0, 1, 2, 15, 16, 31, 32, 2**31, 2**63, 2**64, 1.5, "3", None, True]
    )
    field = data.draw(st.sampled_from(["dtype", "shape", "data_offsets", "name", "gone", "any"]))
    if field == "dtype":
        header[name]["dtype"] = data.draw(
            st.sampled_from(["F32", "BF16", "F16", "I16", "F99", "F8_E4M3", "", None, 3])
        )
    elif field in ("shape", "data_offsets"):
        values = header[name][field]
        kind = data.draw(st.sampled_from(["replace", "append", "drop", "swap", "other"]))
        if kind == "replace" and values:
            values[data.draw(st.integers(0, len(values) - 1))] = data.draw(numbers)
        elif kind == "append":
            values.append(data.draw(numbers))
        elif kind == "drop" and values:
            values.pop()
        elif kind == "swap":
            values.reverse()
        else:
            header[name][field] = data.draw(st.sampled_from([None, {}, "x", 7, [[]]]))
    elif field == "name":
        other = data.draw(st.text(max_size=5))
        header[data.draw(st.sampled_from([other, f"{name}.", *header]))] = header.pop(name)
    elif field == "gone":
        del header[name]
    else:
        header[name] = data.draw(st.sampled_from([None, [], "x", {"dtype": "F32"}]))
    text = json.dumps(header).encode()
    return len(text).to_bytes(8, "little") + text + content[8 + length :]


def check_safetensors(folders: dict[str, Path], tmp: Path, data: st.DataObject) -> None:
    folder = tmp / "hf"
    if not folder.exists():
        shutil.copytree(folders["hf"], folder)
    content = (folders["hf"] / "model.safetensors").read_bytes()
    length = int.from_bytes(content[:8], "little")
    if data.draw(st.booleans()):
        new = edit_header(data, content)
    else:
        new = damaged(data, content, [(0, 8), (8, 8 + length), (8 + length - 8, len(content))])
    (folder / "model.safetensors").write_bytes(new)
    found = reads(folder)
    if not isinstance(found, str):  # it is still sound: then it is read as the format says
        assert found == raw_file(folder / "model.safetensors")
        assert found.keys() == raw_file(folders["hf"] / "model.safetensors").keys()


def check_distributed(folders: dict[str, Path], tmp: Path, data: st.DataObject) -> None:
    """Checksums and descriptions protect every byte that matters: it is refused, or equal."""
    folder = tmp / "megatron"
    shutil.rmtree(folder, ignore_errors=True)
    shutil.copytree(folders["megatron"], folder)
    name = data.draw(st.sampled_from([".metadata", "metadata.json", "__0_0.distcp"]))
    content = (folder / name).read_bytes()
    (folder / name).write_bytes(damaged(data, content, [(0, len(content))]))
    found = reads(folder)
    if not isinstance(found, str):
        assert found == raw_file(folders["hf"] / "model.safetensors")


NUMBERS = (True, False, 0, -1, 1, 3, 2**40, 0.5, float("nan"), float("inf"))
OTHERS = (None, "", "silu", "x", [], [1], [None], ["full_attention"], {}, {"factor": 0})
ROPES = ({"rope_type": "yarn"}, {"rope_theta": "x"}, {"rope_theta": 1e4, "rope_type": "default"})
VALUES = st.sampled_from([*NUMBERS, *OTHERS, *ROPES])


def check_config(raw: dict[str, Any], data: st.DataObject) -> None:
    config = json.loads(json.dumps(raw))
    for _ in range(data.draw(st.integers(1, 3))):
        place = config
        nested = [v for v in config.values() if isinstance(v, dict) and v]
        if nested and data.draw(st.booleans()):
            place = data.draw(st.sampled_from(nested))
        key = data.draw(st.sampled_from([*place, "unknown"]))
        kind = data.draw(st.sampled_from(["gone", "other", "renamed"]))
        if kind == "gone":
            place.pop(key, None)
        elif kind == "other":
            place[key] = deepcopy(data.draw(VALUES))
        else:
            place[data.draw(st.text(max_size=4))] = place.pop(key, None)
    try:
        _, read = read_config(config)
    except IsoError:
        return
    # what is accepted is what is written, or what was there
    for key, value in read.model_dump().items():
        if isinstance(value, bool | int | str) and key in config:
            assert value == config[key], key


def config_cases() -> dict[str, Callable[[Path], Path]]:
    return {
        "qwen3": lambda path: make_qwen3(path),
        "qwen3-moe": lambda path: make_qwen3_moe(path),
        "glm": lambda path: make_latent("glm", path),
        "deepseek": lambda path: make_latent("deepseek", path),
        "qwen3_5-moe": lambda path: make_qwen3_5_moe(path),
    }


@pytest.fixture(scope="module")
def configs(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    root = tmp_path_factory.mktemp("configs")
    made = [make(root / name) for name, make in config_cases().items()]
    return [json.loads((path / "config.json").read_text()) for path in made]


def run(check: Callable[[st.DataObject], None], examples: int) -> None:
    settings(max_examples=examples, **quiet)(given(st.data())(check))()


def test_damaged_safetensors(folders, tmp_path) -> None:
    run(lambda data: check_safetensors(folders, tmp_path, data), FAST)


def test_damaged_distributed_folders(folders, tmp_path) -> None:
    run(lambda data: check_distributed(folders, tmp_path, data), FAST // 2)


def test_damaged_configs(configs) -> None:
    run(lambda data: check_config(data.draw(st.sampled_from(configs)), data), FAST)


@pytest.mark.slow
def test_damaged_safetensors_long(folders, tmp_path) -> None:
    run(lambda data: check_safetensors(folders, tmp_path, data), SLOW)


@pytest.mark.slow
def test_damaged_distributed_folders_long(folders, tmp_path) -> None:
    run(lambda data: check_distributed(folders, tmp_path, data), SLOW)


@pytest.mark.slow
def test_damaged_configs_long(configs) -> None:
    run(lambda data: check_config(data.draw(st.sampled_from(configs)), data), SLOW)


class Hostile:
    """Runs a command when a pickle of it is read by a reader that trusts it."""

    def __init__(self, mark: Path):
        self.mark = mark

    def __reduce__(self) -> tuple[Any, ...]:
        return os.system, (f"touch {self.mark}",)


@pytest.mark.parametrize("protocol", [0, 2, 4])
@pytest.mark.parametrize("file", [".metadata", "common.pt", "__0_0.distcp"])
def test_no_pickle_runs_code(folders, tmp_path, file, protocol) -> None:
    folder, mark = tmp_path / "m", tmp_path / "mark"
    shutil.copytree(folders["megatron"], folder)
    hostile = {"x": Hostile(mark)}
    if file == ".metadata":
        (folder / file).write_bytes(pickle.dumps(hostile, protocol))
        with pytest.raises(CheckpointError, match=r"it names (posix|nt)\.system, .*never loaded"):
            read_metadata(folder)
    elif file == "common.pt":
        with zipfile.ZipFile(folder / file, "w") as archive:
            archive.writestr("common/data.pkl", pickle.dumps(hostile, protocol))
        with pytest.raises(CheckpointError, match=r"it names (posix|nt)\.system, .*never loaded"):
            read_common(folder)
        open_weights(folder)  # a conversion does not read it at all
    else:
        content = (folder / file).read_bytes()
        with (folder / file).open("wb") as out, zipfile.ZipFile(out, "w") as archive:
            archive.writestr("archive/data.pkl", pickle.dumps(hostile, protocol))
            archive.writestr("archive/version", "3\n")
        (folder / file).open("ab").write(bytes(len(content)))
        assert "is damaged at" in str(reads(folder))
    assert not mark.exists()


def test_a_pickle_changes_no_class(folders, tmp_path) -> None:
    from torch.distributed.checkpoint.metadata import Metadata

    folder = tmp_path / "m"
    shutil.copytree(folders["megatron"], folder)
    # Metadata with the state (None, {"version": "x"}), which sets attributes of the class
    code = b"\x80\x04ctorch.distributed.checkpoint.metadata\nMetadata\n"
    code += b"N}(X\x07\x00\x00\x00versionX\x01\x00\x00\x00xu\x86b."
    (folder / ".metadata").write_bytes(code)
    with pytest.raises(CheckpointError, match="it would change a class"):
        read_metadata(folder)
    assert Metadata.version is None


@pytest.mark.parametrize("opcode", [b"r", b"j", b"\x8d", b"\x8e", b"T"])
def test_a_pickle_takes_no_memory_for_a_number(folders, tmp_path, opcode) -> None:
    """Indices and lengths of 4 GiB and more in a file of a few bytes."""
    folder = tmp_path / "m"
    shutil.copytree(folders["megatron"], folder)
    width = 8 if opcode in (b"\x8d", b"\x8e") else 4
    code = b"\x80\x04N" + opcode + b"\xf0" + b"\xff" * (width - 2) + b"\x7f" + b"."
    (folder / ".metadata").write_bytes(code)
    with pytest.raises(CheckpointError):
        read_metadata(folder)


def test_a_metadata_that_points_out_of_its_folder(folders, tmp_path) -> None:
    folder = tmp_path / "m"
    shutil.copytree(folders["megatron"], folder)
    content = (folder / ".metadata").read_bytes()
    for name in (b"../a_0.disttp", b"/etc/passwd00"):
        assert len(name) == len(b"__0_0.distcp") + 1
        changed = content.replace(b"\x8c\x0c__0_0.distcp", b"\x8c\x0d" + name)
        # the frame is longer by a byte for each
        (folder / ".metadata").write_bytes(changed)
        assert isinstance(reads(folder), str)


def test_random_files(folders, tmp_path) -> None:
    """Nothing of the format at all."""
    generator = random.Random(0)
    folder = tmp_path / "m"
    shutil.copytree(folders["megatron"], folder)
    for _ in range(50):
        for name in (".metadata", "metadata.json", "config.json"):
            sound = (folders["megatron"] / name).read_bytes()
            (folder / name).write_bytes(generator.randbytes(generator.randrange(0, 200)))
            assert isinstance(reads(folder), str)
            (folder / name).write_bytes(sound)
