"""Processes that write a save end with the one that saves, and no other process does."""

import multiprocessing
import os
import signal
import sys
import time
from pathlib import Path
from typing import Any

import psutil
import pytest

pytest.importorskip("megatron.core", reason="megatron-core is not installed")
from megatron.core.dist_checkpointing.strategies import filesystem_async

from isomodels.megatron.writers import bound_writers
from tests.weights.support import in_child

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="prctl is Linux's")


def forked(work: Any) -> psutil.Process:
    """A child of this process, by the way in which Megatron forks its writers."""
    child = multiprocessing.get_context("fork").Process(target=work)
    child.start()
    return psutil.Process(child.pid)


@pytest.mark.parametrize("bound", [True, False])
def test_a_killed_saver_takes_the_writers_with_it(tmp_path: Path, bound: bool) -> None:
    """Without the bound they live on: what kills them is the bound."""
    told = tmp_path / "pid"

    def wait() -> None:
        os.closerange(3, 1024)  # the pipe to the test, which would wait for it
        told.with_name(str(os.getpid())).touch()
        time.sleep(60)

    def save() -> None:
        if bound:
            with bound_writers():
                writer = forked(wait)
        else:
            with bound_writers():
                pass
            writer = forked(wait)
        while not told.with_name(str(writer.pid)).exists():
            time.sleep(0.01)
        os.kill(os.getpid(), signal.SIGKILL)

    status, text = in_child(save)
    assert status == signal.SIGKILL, text
    (pid,) = (int(entry.name) for entry in tmp_path.iterdir())
    try:
        writer = psutil.Process(pid)
        _, alive = psutil.wait_procs([writer], timeout=5 if bound else 0.3)
    except psutil.NoSuchProcess:
        alive = []
    for one in alive:
        one.kill()
    assert len(alive) == (not bound)


def test_a_writer_may_fork_and_other_threads_too() -> None:
    from concurrent.futures import ThreadPoolExecutor

    def inner() -> None:
        os._exit(7 if multiprocessing.parent_process() is not None else 8)

    def outer() -> None:
        child = multiprocessing.get_context("fork").Process(target=inner)
        child.start()
        child.join()
        os._exit(child.exitcode or 0)

    with bound_writers(), ThreadPoolExecutor(1) as pool:
        ends = [forked(outer).wait(10), pool.submit(forked, outer).result().wait(10)]
    assert ends == [7, 7]


def test_a_save_needs_no_helper_and_gives_the_queue_back() -> None:
    before = filesystem_async._results_queue
    with bound_writers():
        held = filesystem_async._results_queue
        held.put(1)
        assert held.get_nowait() == 1
        name = "get_write_results_queue"
        get = getattr(filesystem_async, name, None) or getattr(filesystem_async, f"_{name}")
        assert get() is held
    assert filesystem_async._results_queue is before
