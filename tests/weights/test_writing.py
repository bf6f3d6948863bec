"""Writing folders: layout, what is copied and kept, and refusals that leave the old one whole."""

import errno
import json
import os
import resource
import stat
import tempfile
from collections.abc import Mapping
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors import safe_open
from torch import Tensor

from isomodels.errors import CheckpointError
from isomodels.weights_conv import write
from isomodels.weights_conv.bits import HeldTensors
from isomodels.weights_conv.files import read_tensors, replaced_name
from isomodels.weights_conv.write import write_checkpoint
from tests.weights.support import (
    any_bits,
    as_nobody,
    in_child,
    raw,
    raw_file,
    raw_folder,
    write_folder,
)

OLD = {"a": any_bits(3, 5), "b": any_bits(7, seed=1), "c": any_bits(2, 2, seed=2)}
NEW = {name: any_bits(*t.shape, seed=9) for name, t in OLD.items()}
SHARDS = {"x-1.safetensors": ["c", "a"], "x-2.safetensors": ["b"]}


def checkpoint(folder: Path, tensors: Mapping[str, Tensor] = OLD) -> Path:
    """Sharded, with the small files that released checkpoints have."""
    shards = {file: {n: tensors[n] for n in names} for file, names in SHARDS.items()}
    write_folder(folder, shards)
    for name in ("tokenizer.json", "generation_config.json", "modeling_x.py", "README.md"):
        (folder / name).write_text(name)
    return folder


def expected(tensors: Mapping[str, Tensor]) -> dict[str, tuple[list[int], bytes]]:
    return {name: raw(tensor) for name, tensor in tensors.items()}


def left_over(folder: Path) -> list[str]:
    return [p.name for p in folder.iterdir() if "isomodels" in p.name]


def test_like_keeps_the_division_into_files_and_the_small_files(tmp_path: Path) -> None:
    source = checkpoint(tmp_path / "source")
    for name in ("pytorch_model.bin", ".gitattributes"):
        (source / name).write_text(name)
    (source / "original").mkdir()
    write_checkpoint(tmp_path / "out" / "deep", NEW, like=source)
    out = tmp_path / "out" / "deep"
    assert raw_folder(out) == expected(NEW)
    for file, names in SHARDS.items():
        with safe_open(out / file, framework="pt") as opened:
            assert set(opened.keys()) == set(names)
            assert opened.metadata() == {"format": "pt"}
    small = {p.name for p in source.iterdir() if p.is_file() and p.suffix != ".safetensors"}
    small -= {"pytorch_model.bin", ".gitattributes"}
    assert {p.name for p in out.iterdir()} == small | SHARDS.keys()
    for name in small - {"model.safetensors.index.json"}:
        assert (out / name).read_bytes() == (source / name).read_bytes()
    assert raw_folder(source)["a"] == raw(OLD["a"])


def test_like_wants_the_same_names(tmp_path: Path) -> None:
    source = checkpoint(tmp_path / "source")
    with pytest.raises(CheckpointError, match="has other tensors: b, d"):
        write_checkpoint(
            tmp_path / "out", {"a": OLD["a"], "c": OLD["c"], "d": OLD["b"]}, like=source
        )
    assert not (tmp_path / "out").exists()


@settings(max_examples=40, deadline=None)
@given(sizes=st.lists(st.integers(0, 30), min_size=1, max_size=12), limit=st.integers(1, 200))
def test_shard_sizes(sizes: list[int], limit: int) -> None:
    tensors = {f"t{i}": any_bits(n, seed=i) for i, n in enumerate(sizes)}
    with tempfile.TemporaryDirectory() as name:
        out, seen = Path(name) / "out", []
        write_checkpoint(out, tensors, max_shard_size=limit, progress=seen.append)
        assert raw_folder(out) == expected(tensors)
        assert sum(seen) == sum(t.nbytes for t in tensors.values())
        for shard in out.glob("*.safetensors"):
            with safe_open(shard, framework="pt") as opened:
                members = list(opened.keys())
            size = sum(tensors[m].nbytes for m in members)
            # Only a tensor that is too large by itself makes a file too large.
            assert size <= limit or len([m for m in members if tensors[m].nbytes]) == 1
        assert read_tensors(out).keys() == tensors.keys()


def test_tensors_that_share_memory_or_are_not_contiguous(tmp_path: Path) -> None:
    whole = any_bits(6, 4)
    tensors = {
        "top": whole[:2],
        "rest": whole[2:],
        "again": whole[:2],
        "columns": whole[:, 1:3],
        "turned": whole.T,
        "parameter": torch.nn.Parameter(whole),
        "empty": whole[:0],
        "scalar": whole[0, 0],
    }
    write_checkpoint(tmp_path / "out", tensors)
    assert raw_folder(tmp_path / "out") == expected(tensors)


def test_replacing_keeps_what_a_user_put_there(tmp_path: Path) -> None:
    source, out = checkpoint(tmp_path / "source", NEW), checkpoint(tmp_path / "out")
    (out / "old.safetensors").write_text("weights that the new checkpoint lacks")
    (out / "eval.log").write_text("mine")
    (out / "deep" / "er").mkdir(parents=True)
    (out / "deep" / "er" / "notes").write_text("mine too")
    (out / "link").symlink_to("nowhere")
    (out / "config.json").write_text("old")
    write_checkpoint(out, NEW, like=source)
    assert raw_folder(out) == expected(NEW)
    assert (out / "eval.log").read_text() == "mine"
    assert (out / "deep" / "er" / "notes").read_text() == "mine too"
    assert str((out / "link").readlink()) == "nowhere"
    assert (out / "config.json").read_text() == "{}"
    assert left_over(tmp_path) == []


def test_a_checkpoint_can_replace_itself_while_it_is_read(tmp_path: Path) -> None:
    out = checkpoint(tmp_path / "out")
    write_checkpoint(out, read_tensors(out), like=out, max_shard_size=1)
    assert raw_folder(out) == expected(OLD)
    assert len(list(out.glob("*.safetensors"))) == 3


def test_a_link_to_a_folder_stays_a_link(tmp_path: Path) -> None:
    out = checkpoint(tmp_path / "real" / "out")
    (tmp_path / "link").symlink_to(out)
    write_checkpoint(tmp_path / "link", NEW, like=out)
    assert (tmp_path / "link").is_symlink()
    assert raw_folder(out) == expected(NEW)


def test_refuses_a_file_a_foreign_folder_and_a_nested_one(tmp_path: Path) -> None:
    source = checkpoint(tmp_path / "source")
    (tmp_path / "file").touch()
    (tmp_path / "home").mkdir()
    (tmp_path / "home" / "thesis.tex").touch()
    for place, message in (
        ("file", "is a file"),
        ("file/below", "cannot write"),
        ("home", "exists and is no checkpoint"),
        ("source/sub", "one in the other"),
        (".", "exists and is no checkpoint"),
    ):
        with pytest.raises(CheckpointError, match=message) as error:
            write_checkpoint(tmp_path / place, OLD, like=source)
        assert "\n" not in str(error.value)
    assert {p.name for p in tmp_path.iterdir()} == {"source", "file", "home"}
    assert raw_folder(source) == expected(OLD)


@pytest.mark.parametrize(
    ("names", "replaced"),
    [
        (["config.json"], False),
        (["config.json", "main.py"], False),
        (["config.json", "pytorch_model.bin"], False),
        (["model.safetensors"], False),
        (["config.json", "model.safetensors"], True),
        (["config.json", "model.safetensors.index.json"], True),
    ],
    ids=str,
)
def test_only_a_checkpoint_is_replaced(tmp_path: Path, names: list[str], replaced: bool) -> None:
    out = tmp_path / "out"
    out.mkdir()
    for name in names:
        (out / name).write_text("mine")
    if replaced:
        write_checkpoint(out, OLD)
        assert raw_file(out / "model.safetensors") == expected(OLD)
        return
    with pytest.raises(CheckpointError, match=r"is no checkpoint .* give a new or an empty folder"):
        write_checkpoint(out, OLD, files={"config.json": "{}"})
    assert {p.name: p.read_text() for p in out.iterdir()} == dict.fromkeys(names, "mine")
    assert left_over(tmp_path) == []


MOUNT = "is a mount point, which no folder can replace: give a folder below it"


def test_a_mount_point() -> None:
    with pytest.raises(CheckpointError, match=f"^/proc {MOUNT}$"):
        write_checkpoint("/proc", OLD)


@pytest.mark.parametrize("exchange", [True, False])
def test_a_mount_that_only_the_rename_shows(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, exchange: bool
) -> None:
    """A folder bound to another of the same file system looks like any other."""
    out = checkpoint(tmp_path / "out")

    def busy(first: object, second: Path) -> None:
        place = second if exchange else first
        raise OSError(errno.EBUSY, os.strerror(errno.EBUSY), str(place))

    monkeypatch.setattr(write, "_exchange", busy if exchange else no_exchange)
    monkeypatch.setattr(write.os, "rename", busy)
    with pytest.raises(CheckpointError, match=f"^{out} {MOUNT}$"):
        write_checkpoint(out, NEW, like=out)
    assert raw_folder(out) == expected(OLD)
    assert left_over(tmp_path) == []


def test_another_busy_file_is_no_mount_point(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def busy(path: Path) -> None:
        raise OSError(errno.EBUSY, os.strerror(errno.EBUSY), str(path / "x"))

    monkeypatch.setattr(write, "_sync_tree", busy)
    with pytest.raises(CheckpointError, match="busy"):
        write_checkpoint(tmp_path / "out", OLD)


def test_an_empty_folder_is_a_place_to_write(tmp_path: Path) -> None:
    (tmp_path / "out").mkdir()
    write_checkpoint(tmp_path / "out", OLD)
    assert raw_folder(tmp_path / "out") == expected(OLD)


def test_an_unwritable_folder() -> None:
    with tempfile.TemporaryDirectory() as name:
        os.chmod(name, 0o755)
        out = Path(name) / "out"
        status, text = as_nobody(lambda: write_checkpoint(out, OLD))
        assert status != 0
        assert f"CheckpointError: cannot write {out}: Permission denied" in text
        assert os.listdir(name) == []


def test_a_full_disk_leaves_the_old_checkpoint(tmp_path: Path) -> None:
    out = checkpoint(tmp_path / "out")
    big = {**NEW, "b": any_bits(100_000)}

    def save() -> None:
        resource.setrlimit(resource.RLIMIT_FSIZE, (50_000, 50_000))
        write_checkpoint(out, big, like=out)

    status, text = in_child(save)
    assert status != 0
    assert f"CheckpointError: cannot write {out}: " in text
    assert raw_folder(out) == expected(OLD)
    assert left_over(tmp_path) == []


class Failing(HeldTensors):
    """Tensors of which one cannot be had."""

    def __getitem__(self, name: str) -> Tensor:
        if name == "b":
            raise RuntimeError("device lost")
        return NEW[name]


def test_any_other_failure_leaves_the_old_checkpoint(tmp_path: Path) -> None:
    out = checkpoint(tmp_path / "out")
    with pytest.raises(RuntimeError, match="device lost"):
        write_checkpoint(out, Failing(NEW), like=out)
    assert raw_folder(out) == expected(OLD)
    assert left_over(tmp_path) == []


def test_clears_what_a_killed_save_left(tmp_path: Path) -> None:
    dead, other = tmp_path / ".out.isomodels-partial", tmp_path / ".out2.isomodels-partial"
    for folder in (dead, other):
        write_folder(folder, {"stray.safetensors": OLD})
        (folder / "deep" / "er").mkdir(parents=True)
    write_checkpoint(tmp_path / "out", OLD)
    assert {p.name for p in (tmp_path / "out").iterdir()} == {"model.safetensors"}
    assert left_over(tmp_path) == [other.name]


@pytest.mark.parametrize("replaced", [False, True])
def test_two_writers_of_one_folder(tmp_path: Path, replaced: bool) -> None:
    """The second is refused while the first writes, and changes nothing."""
    out = tmp_path / "out"
    if replaced:
        checkpoint(out)

    class Second(HeldTensors):
        def __getitem__(self, name: str) -> Tensor:
            with pytest.raises(CheckpointError, match=f"^another process is writing {out}: wait"):
                write_checkpoint(out, OLD)
            return NEW[name]

    source = checkpoint(tmp_path / "source")
    write_checkpoint(out, Second(NEW), like=source)
    assert raw_folder(out) == expected(NEW)
    assert left_over(tmp_path) == []
    write_checkpoint(out, OLD, like=source)  # the lock is gone


def test_writers_that_race(tmp_path: Path) -> None:
    """Many at once: each writes a whole folder or is refused; none meets another's files."""
    source, out = checkpoint(tmp_path / "source"), tmp_path / "out"

    def write_often() -> None:
        for _ in range(15):
            try:
                write_checkpoint(out, OLD, like=source)
            except CheckpointError as error:
                if "another process is writing" not in str(error):
                    raise

    children = []
    for _ in range(4):
        child = os.fork()
        if child == 0:
            try:
                write_often()
                os._exit(0)
            finally:
                os._exit(1)
        children.append(child)
    assert [os.waitpid(child, 0)[1] for child in children] == [0] * 4
    assert raw_folder(out) == expected(OLD)
    assert left_over(tmp_path) == []


def test_a_disk_that_is_too_small_is_refused_at_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(write.shutil, "disk_usage", lambda _: SimpleNamespace(free=100))
    with pytest.raises(CheckpointError, match=r"it needs 0\.0 GB and 0\.0 GB are free"):
        write_checkpoint(tmp_path / "out", OLD)
    assert left_over(tmp_path) == []


def test_the_check_comes_before_the_place(tmp_path: Path) -> None:
    out = checkpoint(tmp_path / "out")

    def check(folder: Path) -> None:
        assert raw_folder(folder) == expected(NEW)
        raise CheckpointError("not good")

    with pytest.raises(CheckpointError, match="not good"):
        write_checkpoint(out, NEW, like=out, check=check)
    assert raw_folder(out) == expected(OLD)
    assert left_over(tmp_path) == []


def no_exchange(*_: object) -> bool:
    return False


def test_without_exchange(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(write, "_exchange", no_exchange)
    out = checkpoint(tmp_path / "out")
    write_checkpoint(out, NEW, like=out)
    assert raw_folder(out) == expected(NEW)
    assert left_over(tmp_path) == []


@pytest.mark.parametrize("number", [errno.EINVAL, errno.ENOSYS, errno.EACCES])
def test_exchange_tells_cannot_from_failed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, number: int
) -> None:
    class Libc:
        def renameat2(self, *_: object) -> int:
            return -1

    monkeypatch.setattr(write.ctypes, "CDLL", lambda *_, **__: Libc())
    monkeypatch.setattr(write.ctypes, "get_errno", lambda: number)
    out = checkpoint(tmp_path / "out")
    if number == errno.EACCES:
        with pytest.raises(CheckpointError, match="Permission denied"):
            write_checkpoint(out, NEW, like=out)
        assert raw_folder(out) == expected(OLD)
    else:
        write_checkpoint(out, NEW, like=out)
        assert raw_folder(out) == expected(NEW)
    assert left_over(tmp_path) == []


@pytest.mark.parametrize("finished", [False, True])
def test_recovers_from_a_kill_between_two_renames(tmp_path: Path, finished: bool) -> None:
    out = tmp_path / "out"
    checkpoint(replaced_name(out))
    if finished:
        checkpoint(out, NEW)
    with pytest.raises(RuntimeError, match="device lost"):
        write_checkpoint(out, Failing(NEW), like=out if finished else replaced_name(out))
    assert raw_folder(out) == expected(NEW if finished else OLD)
    assert left_over(tmp_path) == []


def test_index_metadata_of_the_source_is_kept(tmp_path: Path) -> None:
    source = checkpoint(tmp_path / "source")
    index = source / "model.safetensors.index.json"
    content = json.loads(index.read_text())
    content["metadata"] = {"total_parameters": 26, "total_size": 1}
    index.write_text(json.dumps(content))
    write_checkpoint(tmp_path / "out", OLD, like=source)
    written = json.loads((tmp_path / "out" / index.name).read_text())
    assert written["metadata"] == {"total_parameters": 26, "total_size": 26 * 4}


def test_files_have_the_mode_that_the_umask_gives(tmp_path: Path) -> None:
    old = os.umask(0o027)
    try:
        write_checkpoint(tmp_path / "out", {"a": torch.zeros(3)}, files={"config.json": "{}"})
    finally:
        os.umask(old)
    modes = {stat.S_IMODE(file.stat().st_mode) for file in (tmp_path / "out").iterdir()}
    assert modes == {0o640}
