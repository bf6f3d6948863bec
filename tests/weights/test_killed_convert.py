"""A conversion that is killed or fails leaves no half checkpoint; the next run starts clean."""

import os
import random
import resource
import shutil
import signal
import sys
import time
from pathlib import Path

import pytest
import torch

from isomodels.conversion import convert_checkpoint, plan_conversion, run_conversion
from isomodels.errors import CheckpointError
from isomodels.stored_weights import open_weights
from tests.checkpoints import make_qwen3
from tests.weights.support import as_nobody, in_child, raw, raw_folder

SIZES = {
    "vocab_size": 64,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "head_dim": 8,
}
TARGETS = ["hf", "megatron"]


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_qwen3(tmp_path_factory.mktemp("source") / "hf", torch.bfloat16, **SIZES)


def raw_weights(folder: Path) -> dict[str, tuple[list[int], bytes]]:
    """Shape and bytes of every tensor of a checkpoint of any form."""
    return {name: raw(tensor) for name, tensor in open_weights(folder).tensors.items()}


def assert_whole(folder: Path, source: Path) -> None:
    """The folder is a whole checkpoint with the source's bits."""
    assert raw_weights(folder) == raw_folder(source)


def killed_after(delay: float, source: Path, out: Path, target: str) -> bool:
    """Convert in a process that is killed after some seconds; whether it came to its end before."""
    reader, writer = os.pipe()
    child = os.fork()
    if child == 0:
        try:
            os.write(writer, b"x")
            convert_checkpoint(source, out, to=target)
            os.write(writer, b"x")
            time.sleep(60)
        finally:
            os._exit(1)
    os.close(writer)
    assert os.read(reader, 1)
    time.sleep(delay)
    os.kill(child, signal.SIGKILL)
    os.waitpid(child, 0)
    ended = os.read(reader, 1) == b"x"
    os.close(reader)
    return ended


@pytest.mark.parametrize("target", TARGETS)
def test_killed_at_20_random_moments(source: Path, tmp_path: Path, target: str) -> None:
    """At once there is the old checkpoint, none or the whole new one; a second run makes the new
    one, and takes away what the first left. Every other time there is an old one."""
    old = make_qwen3(tmp_path / "old", torch.bfloat16, seed=1, **SIZES)
    before = convert_checkpoint(old, tmp_path / "before", to=target).path
    moments, out, left = random.Random(3), tmp_path / "out", 0
    convert_checkpoint(source, out, to=target)  # brings in what is imported late
    begin = time.monotonic()
    convert_checkpoint(source, out, to=target)
    usual = time.monotonic() - begin
    for number in range(20):
        shutil.rmtree(out)
        if number % 2:
            shutil.copytree(before, out)
        if killed_after(moments.random() * usual, source, out, target):
            assert_whole(out, source)
        elif out.exists() and raw_weights(out) != raw_folder(source):
            assert number % 2
            assert_whole(out, old)
        leftovers = {entry.name for entry in tmp_path.iterdir()} - {"old", "before", "out"}
        assert leftovers <= {".out.isomodels-partial"}
        left += bool(leftovers)
        convert_checkpoint(source, out, to=target)
        assert_whole(out, source)
        assert {entry.name for entry in tmp_path.iterdir()} == {"old", "before", "out"}
    assert left  # else nothing was seen of what a killed one leaves


def kill_at(event: int) -> None:
    """From now on, count every file operation of Python and die before the given one."""
    seen = 0

    def hook(name: str, _: object) -> None:
        nonlocal seen
        if name == "open" or name.startswith(("os.", "shutil.", "ctypes.", "fcntl.")):
            seen += 1
            if seen == event + 1:
                os.kill(os.getpid(), signal.SIGKILL)

    sys.addaudithook(hook)


@pytest.mark.parametrize("target", TARGETS)
def test_killed_at_every_fourth_file_operation(source: Path, tmp_path: Path, target: str) -> None:
    out, killed = tmp_path / "out", 0
    for event in range(0, 2000, 4):

        def work(event: int = event) -> None:
            kill_at(event)
            convert_checkpoint(source, out, to=target)

        status, text = in_child(work)
        if status == 0:
            break
        assert status == signal.SIGKILL, text
        killed += 1
        if out.exists():
            open_weights(out)
    assert killed > 5
    assert_whole(out, source)


@pytest.mark.parametrize("target", TARGETS)
@pytest.mark.parametrize("limit", [10, 4_000, 40_000])
def test_a_full_disk_is_one_error(source: Path, tmp_path: Path, target: str, limit: int) -> None:
    out = tmp_path / "out"

    def work() -> None:
        signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
        resource.setrlimit(resource.RLIMIT_FSIZE, (limit, limit))
        with pytest.raises(CheckpointError, match=f"^cannot write {out}: File too large$"):
            convert_checkpoint(source, out, to=target)

    status, text = in_child(work)
    assert status == 0, text
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("target", TARGETS)
def test_no_permission_is_one_error(source: Path, tmp_path: Path, target: str) -> None:
    def readable(folder: Path) -> None:
        for entry in (folder, *folder.parents):
            if entry.stat().st_uid == os.geteuid() and entry != Path("/"):
                entry.chmod(entry.stat().st_mode | 0o055)

    readable(source)
    for file in source.iterdir():
        file.chmod(0o644)
    closed = tmp_path / "closed"
    closed.mkdir()
    readable(closed)

    def work() -> None:
        message = f"^cannot write {closed / 'out'}: Permission denied$"
        with pytest.raises(CheckpointError, match=message):
            convert_checkpoint(source, closed / "out", to=target)

    status, text = as_nobody(work)
    assert status == 0, text
    (source / "model.safetensors").chmod(0)

    def read() -> None:
        with pytest.raises(CheckpointError, match=r"^cannot read .*model\.safetensors: Permission"):
            convert_checkpoint(source, closed / "out", to=target)

    status, text = as_nobody(read)
    (source / "model.safetensors").chmod(0o644)
    assert status == 0, text


def test_two_commands_into_one_folder(source: Path, tmp_path: Path) -> None:
    """The second is refused while the first writes, and the first is whole."""
    out = tmp_path / "out"
    writing, go_on = os.pipe(), os.pipe()
    child = os.fork()
    if child == 0:
        try:
            plan = plan_conversion(open_weights(source), to="megatron")

            def wait(_: int) -> None:
                os.write(writing[1], b"x")
                os.read(go_on[0], 1)

            run_conversion(plan, out, progress=wait)
            os._exit(0)
        finally:
            os._exit(1)
    assert os.read(writing[0], 1)  # the first tensor is written
    try:
        for _ in range(2):
            message = f"^another process is writing {out}: wait for"
            with pytest.raises(CheckpointError, match=message):
                convert_checkpoint(source, out, to="megatron")
    finally:
        os.write(go_on[1], bytes(200))
        status = os.waitpid(child, 0)[1]
    assert status == 0
    assert_whole(out, source)
    assert [entry.name for entry in tmp_path.iterdir()] == ["out"]
    for end in (*writing, *go_on):
        os.close(end)
