"""A rank that dies or hangs ends the others with a clear error; what was saved before is whole."""

import os
import signal
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

pytest.importorskip("megatron.core", reason="megatron-core is not installed")

from isomodels.errors import LostRankError
from isomodels.megatron.degrees import Degrees
from isomodels.megatron.process import exchanging, start_process, stop_process
from isomodels.parity.ranks import Ranks
from isomodels.parity.remote import ProcessError
from tests.parallel.conftest import TRAINER

DOING = {"train_on": "a training step", "save_on": "a save"}


def wait_for(file: Path, seconds: float = 60.0) -> None:
    end = time.monotonic() + seconds
    while not file.exists():
        assert time.monotonic() < end, f"{file.name} did not begin"
        time.sleep(0.01)


@contextmanager
def busy(
    tiny: Callable[..., Path],
    sequences: list[list[int]],
    folder: Path,
    doing: str,
    layout: str,
    timeout_s: float,
) -> Iterator[Ranks]:
    """Ranks in the middle of steps, or of saves, after a save to "last"; ended with the context."""
    path = checkpoint(tiny, layout)
    long_enough = [s for s in sequences if len(s) > 1]
    started = folder / "started"
    with Ranks("killed", TRAINER, Degrees.parse(layout).ranks) as ranks:
        ranks.results()
        ranks.call("train_and_save", path, "float32", layout, long_enough, str(folder / "last"))
        if doing == "train_on":
            ranks.submit(doing, path, layout, long_enough, str(started), timeout_s)
        else:
            ranks.submit(doing, path, layout, str(started), str(folder / "next"), timeout_s)
        wait_for(started)
        time.sleep(0.2)
        try:
            yield ranks
        finally:
            ranks.kill()
            for remote in ranks.remotes:
                remote.log.unlink(missing_ok=True)


def checkpoint(tiny: Callable[..., Path], layout: str) -> str:
    architecture = "Qwen3MoeForCausalLM" if "ep" in layout else "MiMoForCausalLM"
    return str(tiny(architecture, "float32", num_hidden_layers=2))


def check_last(trainers: Callable[[int], Ranks], path: str, folder: Path) -> None:
    """What was saved before is whole."""
    last, out = str(folder / "last"), str(folder / "again")
    assert trainers(1).call("load_and_save", path, "float32", "tp1", last, out) == 2


@pytest.mark.parametrize(
    ("doing", "layout", "rank"),
    [
        ("train_on", "tp2", 1),
        ("save_on", "tp2", 1),
        *[
            pytest.param(*case, marks=pytest.mark.slow)
            for case in (
                ("train_on", "tp2,sp", 0),
                ("train_on", "pp2", 0),
                ("train_on", "pp2", 1),
                ("train_on", "dp2,ep2", 1),
                ("train_on", "tp2,pp2", 2),
                ("save_on", "pp2", 0),
                ("save_on", "dp2,ep2", 0),
            )
        ],
    ],
)
def test_a_killed_rank_ends_the_others(trainers, tiny, sequences, tmp_path, doing, layout, rank):
    with busy(tiny, sequences, tmp_path, doing, layout, 60.0) as ranks:
        begin = time.monotonic()
        ranks.remotes[rank].kill()
        said = rf"the killed-rank{rank} process ended \(exit code -9\)"
        with pytest.raises(ProcessError, match=said):
            ranks.results()
        assert time.monotonic() - begin < 30.0
    check_last(trainers, checkpoint(tiny, layout), tmp_path)


@pytest.mark.slow
@pytest.mark.parametrize("fate", ["killed", "stopped"])
@pytest.mark.parametrize("doing", ["train_on", "save_on"])
@pytest.mark.parametrize("layout", ["tp2", "pp2", "dp2,ep2"])
def test_the_others_see_it_themselves(trainers, tiny, sequences, tmp_path, layout, doing, fate):
    """Under a launcher that leaves them alone."""
    timeout_s = 10.0  # one that ended is seen at once, one that hangs after this
    with busy(tiny, sequences, tmp_path, doing, layout, timeout_s) as ranks:
        begin = time.monotonic()
        if fate == "killed":
            ranks.remotes[1].kill()
        else:
            os.kill(ranks.remotes[1]._process.pid, signal.SIGSTOP)
        with pytest.raises(LostRankError, match=rf"rank 0 of 2, in {DOING[doing]}: another rank"):
            ranks.remotes[0].result()
        assert time.monotonic() - begin < timeout_s + 20.0
    check_last(trainers, checkpoint(tiny, layout), tmp_path)


def test_errors_of_other_kinds_are_no_lost_rank():
    said = "rank 0 of 1, in a save: another rank ended"
    start_process()
    try:
        for text in (
            "Connection closed by peer [::1]:1",
            "Application timeout caused pair closure",
        ):
            with pytest.raises(LostRankError, match=said), exchanging("a save"):
                raise RuntimeError(text)
        with pytest.raises(RuntimeError, match=r"^out of memory$"), exchanging("a save"):
            raise RuntimeError("out of memory")
    finally:
        stop_process()
