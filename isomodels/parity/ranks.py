"""One object on each of several ranks, called together: a trainer in a parallel layout."""

import contextlib
import os
import time
from datetime import timedelta
from typing import Any

import torch
from torch._C._distributed_c10d import TCPStore

from isomodels.errors import IsoError, LostRankError
from isomodels.parity.remote import ProcessError, Remote

_POLL_SECONDS = 0.002
_GRACE_SECONDS = 2.0  # in which the ranks that a dead one leaves behind tell what they saw


class Ranks:
    """`size` processes that run `factory(**kwargs)` and then the same methods.

    Each has the environment that `torch.distributed.run` gives: RANK, WORLD_SIZE, LOCAL_RANK and
    the address of a store, which lives here. Results are those of rank 0; `results` gives all.

    A rank that fails or ends takes the others with it, whatever they wait for: `result` raises
    what it said, and names it.
    """

    def __init__(self, name: str, factory: str, size: int, **kwargs: Any):
        self._store: Any = TCPStore(
            "127.0.0.1", 0, is_master=True, wait_for_workers=False, timeout=timedelta(minutes=5)
        )
        shared = {
            "WORLD_SIZE": str(size),
            "MASTER_ADDR": "127.0.0.1",
            "MASTER_PORT": str(self._store.port),
            "TORCHELASTIC_USE_AGENT_STORE": "True",  # no rank opens a store of its own
            "OMP_NUM_THREADS": os.environ.get("OMP_NUM_THREADS", "1"),
        }
        # A process that is forked from one where an import started CUDA cannot start it.
        fork = size > 1 and not torch.cuda.is_available()
        self.remotes = [
            Remote(
                name if size == 1 else f"{name}-rank{rank}",
                factory,
                environment={**shared, "RANK": str(rank), "LOCAL_RANK": str(rank)},
                forked=("isomodels.parity.preloaded",) if fork else (),
                **kwargs,
            )
            for rank in range(size)
        ]

    def submit(self, method: str, *args: Any, **kwargs: Any) -> None:
        """Start a method on every rank without waiting."""
        for remote in self.remotes:
            remote.submit(method, *args, **kwargs)

    def results(self) -> list[Any]:
        """Wait for the next outstanding value of every rank.

        Raises:
            IsoError, ProcessError: of the first rank that failed; the others have been ended.
        """
        values: dict[int, Any] = {}
        try:
            while len(values) < len(self.remotes):
                for rank, remote in enumerate(self.remotes):
                    if rank not in values and remote.ready:
                        values[rank] = remote.result()
                time.sleep(_POLL_SECONDS)
        except (IsoError, ProcessError) as error:
            cause = self._cause(error)
            self.kill()
            raise cause from None
        return [values[rank] for rank in range(len(self.remotes))]

    def result(self) -> Any:
        """As `results`, of rank 0."""
        return self.results()[0]

    def call(self, method: str, *args: Any, **kwargs: Any) -> Any:
        """Run a method on every rank and wait; rank 0's value. Nothing may be outstanding."""
        self.submit(method, *args, **kwargs)
        return self.result()

    def _cause(self, first: Exception) -> Exception:
        """Of several ranks' errors, that of one which ended, or a refusal of ours.

        The others fail in its wake, and may be heard first.
        """
        errors = [first]
        end = time.monotonic() + _GRACE_SECONDS
        while time.monotonic() < end and not _is_cause(errors[-1]):
            for remote in self.remotes:
                if remote.ready:
                    try:
                        remote.result()
                    except (IsoError, ProcessError) as error:
                        errors.append(error)
            time.sleep(_POLL_SECONDS)
        return next(filter(_is_cause, errors), first)

    def kill(self) -> None:
        """End every rank at once."""
        for remote in self.remotes:
            remote.kill()

    def close(self) -> None:
        """End every rank, at once where one has ended already."""
        with contextlib.ExitStack() as stack:
            for remote in self.remotes:
                stack.callback(remote.close)
                remote.stop()

    def __enter__(self) -> "Ranks":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def _is_cause(error: Exception) -> bool:
    if isinstance(error, LostRankError):  # of the others
        return False
    return isinstance(error, IsoError) or " ended (exit code" in str(error)
