"""Reading folders: what is damaged or ambiguous is one clear error, whatever the damage."""

import json
import os
import tempfile
from pathlib import Path

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from safetensors.torch import save_file

from isomodels.errors import CheckpointError
from isomodels.weights_conv.files import read_tensors, replaced_name
from tests.weights.support import any_bits, as_nobody, raw, write_folder, write_index

A, B = any_bits(3, 5), any_bits(7, seed=1)
ONE, TWO = "model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors"


def single(folder: Path) -> Path:
    return write_folder(folder, {"model.safetensors": {"a": A, "b": B}})


def sharded(folder: Path) -> Path:
    return write_folder(folder, {ONE: {"a": A}, TWO: {"b": B}})


def error_of(folder: Path) -> str:
    with pytest.raises(CheckpointError) as error:
        read_tensors(folder).meta()
    message = str(error.value)
    assert str(folder) in message
    assert "\n" not in message
    return message


@pytest.mark.parametrize("make", [single, sharded])
def test_reads_every_bit(tmp_path: Path, make) -> None:
    tensors = read_tensors(make(tmp_path / "x"))
    assert {name: raw(t) for name, t in tensors.items()} == {"a": raw(A), "b": raw(B)}
    assert {name: (t.shape, t.dtype, t.is_meta) for name, t in tensors.meta().items()} == {
        "a": (A.shape, A.dtype, True),
        "b": (B.shape, B.dtype, True),
    }


def test_a_default_device_does_not_matter(tmp_path: Path) -> None:
    read = read_tensors(single(tmp_path / "model"))
    with torch.device("meta"):
        assert raw(read["a"]) == raw(A)


def test_a_replaced_folder_is_still_read_as_it_was(tmp_path: Path) -> None:
    folder = sharded(tmp_path / "x")
    tensors = read_tensors(folder)
    folder.rename(tmp_path / "y")
    write_folder(folder, {ONE: {"a": B}, TWO: {"b": A}})
    assert raw(tensors["a"]) == raw(A)
    assert raw(tensors["b"]) == raw(B)


def test_no_folder(tmp_path: Path) -> None:
    assert error_of(tmp_path / "x") == f"there is no folder {tmp_path / 'x'}"


def test_no_folder_but_a_save_that_was_cut_off(tmp_path: Path) -> None:
    sharded(replaced_name(tmp_path / "x"))
    assert str(replaced_name(tmp_path / "x")) in error_of(tmp_path / "x")


def test_a_file_instead_of_a_folder(tmp_path: Path) -> None:
    (tmp_path / "x").touch()
    assert "is a file" in error_of(tmp_path / "x")


def test_no_weights(tmp_path: Path) -> None:
    assert "has no weights" in error_of(tmp_path)


@pytest.mark.parametrize("name", ["pytorch_model.bin", "pytorch_model-00001-of-00002.bin", "x.pt"])
def test_pickles(tmp_path: Path, name: str) -> None:
    torch.save({"a": A}, tmp_path / name)
    assert f"holds pickled weights ({name})" in error_of(tmp_path)


def test_pickles_beside_safetensors_do_not_matter(tmp_path: Path) -> None:
    torch.save({"a": A}, single(tmp_path / "x") / "pytorch_model.bin")
    assert raw(read_tensors(tmp_path / "x")["a"]) == raw(A)


def test_weights_of_another_name(tmp_path: Path) -> None:
    save_file({"a": A}, tmp_path / "adapter_model.safetensors")
    assert "only adapter_model.safetensors" in error_of(tmp_path)


@pytest.mark.parametrize("make", [single, sharded])
def test_a_stray_file(tmp_path: Path, make) -> None:
    save_file({"c": A}, make(tmp_path / "x") / "extra.safetensors")
    assert "no index lists extra.safetensors" in error_of(tmp_path / "x")


def test_a_whole_file_beside_shards(tmp_path: Path) -> None:
    """transformers would read the one, vLLM the others."""
    save_file({"a": A, "b": B}, sharded(tmp_path / "x") / "model.safetensors")
    assert "no index lists model.safetensors" in error_of(tmp_path / "x")


def test_a_missing_shard(tmp_path: Path) -> None:
    (sharded(tmp_path / "x") / TWO).unlink()
    assert f"names a missing file: {TWO}" in error_of(tmp_path / "x")


INDEX_FAULTS = [
    ({"a": ONE, "b": TWO, "c": TWO}, "listed but in no file: c"),
    ({"b": ONE, "a": TWO}, f"b (listed in {ONE}, lies in {TWO})"),
    ({"a": ONE, "b": "../x"}, "'../x' is no file name"),
    ({"a": ONE, "b": 3}, "3 is no file name"),
    ({}, "has no weight_map"),
]


@pytest.mark.parametrize(("weight_map", "message"), INDEX_FAULTS)
def test_an_index_that_disagrees(tmp_path: Path, weight_map: dict, message: str) -> None:
    write_index(sharded(tmp_path / "x"), weight_map)
    assert message in error_of(tmp_path / "x")


def test_a_tensor_that_the_index_does_not_list(tmp_path: Path) -> None:
    folder = sharded(tmp_path / "x")
    save_file({"b": B, "c": A}, folder / TWO)
    assert "in a file but not listed: c" in error_of(folder)


def test_a_tensor_in_two_shards(tmp_path: Path) -> None:
    folder = sharded(tmp_path / "x")
    save_file({"a": A, "b": B}, folder / ONE)
    assert f"in more than one file: b ({ONE}, {TWO})" in error_of(folder)


@pytest.mark.parametrize("text", ["", "{", "[]", "3", '{"weight_map": []}', "\x00", '"x"'])
def test_an_index_that_is_none(tmp_path: Path, text: str) -> None:
    (sharded(tmp_path / "x") / "model.safetensors.index.json").write_text(text)
    error_of(tmp_path / "x")


def test_every_truncation(tmp_path: Path) -> None:
    file = single(tmp_path / "x") / "model.safetensors"
    content = file.read_bytes()
    for length in {*range(12), *range(12, len(content), 7), len(content) - 1}:
        file.write_bytes(content[:length])
        assert "model.safetensors is truncated or damaged" in error_of(tmp_path / "x")


@settings(max_examples=150, deadline=None, suppress_health_check=list(HealthCheck))
@given(st.data())
def test_a_damaged_header_never_escapes(tmp_path: Path, data: st.DataObject) -> None:
    """Any damage before the data is either harmless or a CheckpointError."""
    folder = tmp_path / "x"
    if not folder.exists():
        single(folder)
        (tmp_path / "good").write_bytes((folder / "model.safetensors").read_bytes())
    content = bytearray((tmp_path / "good").read_bytes())
    end = 8 + int.from_bytes(content[:8], "little")
    for _ in range(data.draw(st.integers(1, 4))):
        content[data.draw(st.integers(0, end - 1))] = data.draw(st.integers(0, 255))
    (folder / "model.safetensors").write_bytes(content)
    try:
        tensors = read_tensors(folder)
        tensors.meta()
        dict(tensors)
    except CheckpointError:
        pass


@pytest.mark.parametrize(("dtype", "size"), [("F99", 4), ("F8_E8M0", 1), ("U16", 2)])
def test_an_unknown_dtype(tmp_path: Path, dtype: str, size: int) -> None:
    entry = {"dtype": dtype, "shape": [1], "data_offsets": [0, size]}
    header = json.dumps({"strange": entry}).encode()
    content = len(header).to_bytes(8, "little") + header + bytes(size)
    (tmp_path / "model.safetensors").write_bytes(content)
    assert dtype in error_of(tmp_path)


def test_an_unreadable_folder_and_file() -> None:
    with tempfile.TemporaryDirectory() as name:
        folder = single(Path(name) / "x")
        os.chmod(name, 0o755)
        for path, mode in ((folder / "model.safetensors", 0), (folder, 0)):
            path.chmod(mode)
            status, text = as_nobody(lambda: read_tensors(folder))
            assert status != 0
            assert f"CheckpointError: cannot read {path}: Permission denied" in text
