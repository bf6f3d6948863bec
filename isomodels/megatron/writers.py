"""Megatron's writers of a save, which end with the process that saves.

`dist_checkpointing` forks processes that write (threads, in later releases) and takes their
results through a queue of a helper process. Both would outlive a rank that is killed: the helper
for ever, and a writer too where its results fill a pipe that nobody reads any more. A writer has
inherited the lock of the folder, where nobody could save again.

The queue is a name of `filesystem_async` that Megatron keeps to itself: checked on megatron-core
0.16.1 (processes) and 0.19.2 (threads); without it a save fails.
"""

import ctypes
import os
import queue
import signal
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache

_PR_SET_PDEATHSIG = 1  # of Linux's <sys/prctl.h>

# (process, thread) that saves, while it does
_saving: tuple[int, int] | None = None


@contextmanager
def bound_writers() -> Iterator[None]:
    """Within it, processes that this thread forks are killed when this process ends (on Linux).

    And `dist_checkpointing.save` starts no helper process: it waits for its writers, so that a
    queue of this process serves.
    """
    global _saving
    from megatron.core.dist_checkpointing.strategies import filesystem_async

    _hook()
    before = filesystem_async._results_queue, _saving
    filesystem_async._results_queue = queue.Queue()
    _saving = os.getpid(), threading.get_ident()
    try:
        yield
    finally:
        filesystem_async._results_queue, _saving = before


@cache
def _hook() -> None:
    """Python has no way to take it back: outside `bound_writers` it does nothing."""
    if sys.platform != "linux":
        return
    prctl = ctypes.CDLL(None).prctl

    def bind() -> None:
        global _saving
        saving, _saving = _saving, None
        if saving is None or saving[1] != threading.get_ident():
            return
        prctl(_PR_SET_PDEATHSIG, ctypes.c_ulong(signal.SIGKILL))
        if os.getppid() != saving[0]:  # it ended before it could be bound to
            os._exit(1)

    os.register_at_fork(after_in_child=bind)
