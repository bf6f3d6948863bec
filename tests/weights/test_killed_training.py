"""A training that is killed at any moment of its saves resumes from its last whole one, by bits."""

import multiprocessing
import random
import shutil
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch

pytest.importorskip("megatron.core", reason="megatron-core is not installed")

from isomodels.parity.remote import Remote
from tests.checkpoints import make_qwen3_moe
from tests.weights import saver

KILLS = 20
PRELOADED = "isomodels.parity.preloaded"
ALONE = {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(Path(__file__).parents[2])}


class Training:
    """Processes of one training after another, forked from one that has imported Megatron."""

    def __init__(self, path: Path, out: Path, marks: Path):
        self.arguments = (str(path), str(out), str(marks), ALONE)
        self.marks = marks
        self.context: Any = multiprocessing.get_context("forkserver")
        self.context.set_forkserver_preload([PRELOADED])
        self.process: Any = None

    def start(self) -> None:
        """Begin, or go on from the last save; until a save begins."""
        shutil.rmtree(self.marks, ignore_errors=True)
        self.marks.mkdir()
        # no daemon: Megatron's saves start processes
        self.process = self.context.Process(target=saver.train_on, args=self.arguments)
        self.process.start()
        self.wait(1)

    def begun(self) -> list[int]:
        """The steps before each save that has begun."""
        return sorted(int(mark.name) for mark in self.marks.iterdir())

    def wait(self, count: int) -> None:
        """Until so many saves have begun."""
        end = time.monotonic() + 120
        while len(self.begun()) < count:
            assert self.process.is_alive()
            assert time.monotonic() < end
            time.sleep(0.002)

    def kill(self) -> None:
        """SIGKILL, at this moment of whatever it does; writers of a save end with it."""
        assert self.process.is_alive()
        writers = psutil.Process(self.process.pid).children(recursive=True)
        self.process.kill()
        self.process.join()
        _, alive = psutil.wait_procs(writers, timeout=10)
        assert alive == []


@pytest.fixture
def training(tmp_path: Path) -> Iterator[Training]:
    path = make_qwen3_moe(tmp_path / "hf", torch.bfloat16)
    (tmp_path / "saves").mkdir()
    training = Training(path, tmp_path / "saves" / "last", tmp_path / "marks")
    yield training
    if training.process is not None and training.process.is_alive():
        training.kill()


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_killed_at_20_random_moments_of_its_saves(training: Training) -> None:
    path, out = training.arguments[:2]
    moments, kept, moved, cut = random.Random(5), 0, 0, 0
    last = 0
    with Remote("reader", "tests.weights.saver:Reader", environment=ALONE) as reader:
        reader.result()
        expected = reader.call("states", path, 100)
        assert len({tuple(state) for state in expected}) == len(expected)
        training.start()
        begin = time.monotonic()
        training.wait(3)
        usual = time.monotonic() - begin  # of the first two saves of a process
        training.kill()
        for _ in range(KILLS):
            training.start()
            time.sleep(moments.uniform(0, usual))
            training.kill()
            begun = training.begun()[-1]
            steps, state = reader.call("loaded", path, out)
            assert state == expected[steps]
            assert last <= steps
            # of the save that was cut off, or of the one before, whichever process made that
            assert steps in (begun - 1, begun)
            kept, moved, last = kept + (steps == last), moved + (steps > last), steps
            leftovers = {entry.name for entry in Path(out).parent.iterdir()} - {"last"}
            assert leftovers <= {".last.isomodels-partial"}
            cut += bool(leftovers)
        steps = reader.call("saved", path, out)
        assert reader.call("loaded", path, out) == (steps, expected[steps])
        assert [entry.name for entry in Path(out).parent.iterdir()] == ["last"]
    print(f"{KILLS} kills: {kept} left the save before, {moved} a new one, {cut} a part of one")
    assert kept
    assert moved
    assert cut > 2


@pytest.mark.slow
def test_a_killed_save_of_many_tensors_leaves_no_writer_and_no_lock(tmp_path: Path) -> None:
    """A writer that hung on its pipe held the folder's lock for ever."""
    context: Any = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload([PRELOADED])
    out = tmp_path / "out"

    def start() -> Any:
        process = context.Process(target=saver.save_many, args=(str(out), ALONE))
        process.start()
        return process

    process = start()
    writers: list[psutil.Process] = []
    while not (out.exists() and writers):
        assert process.is_alive()
        writers = psutil.Process(process.pid).children()
        time.sleep(0.001)
    process.kill()
    process.join()
    _, alive = psutil.wait_procs(writers, timeout=10)
    assert alive == []
    before = out.stat().st_ino
    process = start()
    while out.stat().st_ino == before:
        assert process.is_alive()
        time.sleep(0.01)
    process.kill()
    process.join()
