"""A save that is killed at any moment leaves the whole old or the whole new checkpoint."""

import itertools
import os
import random
import signal
import sys
import time
from pathlib import Path

import pytest

from isomodels.weights_conv import write
from isomodels.weights_conv.files import replaced_name
from isomodels.weights_conv.write import write_checkpoint
from tests.weights.support import any_bits, in_child, raw, raw_folder, write_folder

NAMES = ("a", "b", "c", "d")
FILES = {"x-1.safetensors": ("a", "b"), "x-2.safetensors": ("c", "d")}


def generation(number: int) -> dict:
    return {n: any_bits(5, 3, seed=10 * number + i) for i, n in enumerate(NAMES)}


def checkpoint(folder: Path, number: int) -> Path:
    """Its weights and its small files carry one number."""
    tensors = generation(number)
    write_folder(folder, {f: {n: tensors[n] for n in names} for f, names in FILES.items()})
    for name in ("config.json", "tokenizer.json"):
        (folder / name).write_text(str(number))
    return folder


def which(folder: Path) -> int:
    """The number of a checkpoint that is whole and from one generation."""
    number = int((folder / "config.json").read_text())
    assert (folder / "tokenizer.json").read_text() == str(number)
    assert raw_folder(folder) == {n: raw(t) for n, t in generation(number).items()}
    return number


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


@pytest.mark.parametrize("exchange", [True, False], ids=["exchange", "two renames"])
def test_killed_at_every_file_operation(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, exchange: bool
) -> None:
    if not exchange:
        monkeypatch.setattr(write, "_exchange", lambda *_: False)
    sources = [checkpoint(tmp_path / f"source{i}", i) for i in range(2)]
    out = tmp_path / "out"
    write_checkpoint(out, generation(0), like=sources[0])
    current, between, killed = 0, 0, 0
    for event in range(1000):
        new = 1 - current

        def save(event: int = event, new: int = new) -> None:
            kill_at(event)
            write_checkpoint(out, generation(new), like=sources[new])

        status, text = in_child(save)
        if status == 0:
            assert which(out) == new
            break
        assert status == signal.SIGKILL, text
        killed += 1
        if not out.exists():
            assert not exchange
            assert which(replaced_name(out)) == current
            between += 1
        else:
            current = which(out)
    else:
        pytest.fail("the save never ended")
    assert killed > 30
    assert exchange or between > 0
    assert sorted(p.name for p in tmp_path.iterdir()) == ["out", "source0", "source1"]


def test_killed_at_random_moments(tmp_path: Path) -> None:
    """The library writes outside Python's sight: only a clock finds those moments."""
    sources = [checkpoint(tmp_path / f"source{i}", i) for i in range(2)]
    out = checkpoint(tmp_path / "out", 0)
    moments, cut_off = random.Random(0), 0
    for _ in range(25):
        reader, writer = os.pipe()
        child = os.fork()
        if child == 0:
            try:
                for number in itertools.cycle((1, 0)):
                    write_checkpoint(out, generation(number), like=sources[number])
                    os.write(writer, b"x")
            finally:
                os._exit(1)
        os.close(writer)
        # Two saves tell how long one takes here, whatever else runs on the machine.
        assert os.read(reader, 1)
        begin = time.monotonic()
        assert os.read(reader, 1)
        time.sleep(moments.random() * (time.monotonic() - begin))
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)
        os.close(reader)
        which(out)
        cut_off += any("partial" in p.name for p in tmp_path.iterdir())
    assert cut_off > 5
    write_checkpoint(out, generation(1), like=sources[1])
    assert sorted(p.name for p in tmp_path.iterdir()) == ["out", "source0", "source1"]
