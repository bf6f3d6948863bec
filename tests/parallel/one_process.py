"""All ranks of a layout as threads of one process, of which one runs at a time.

They exchange through the two calls of torch.distributed that the layers make, so that one GPU, or
none, shows what several give. Gradients on a GPU need processes: autograd has one thread for it.
"""

import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor


class Meeting:
    """What a process group is to the layers."""

    def __init__(self, size: int):
        self.size = size
        self._barrier = threading.Barrier(size)
        self._running = threading.Lock()
        self._sent: list[Any] = [None] * size
        self._rank = threading.local()

    def run(self, work: Callable[[int], Any]) -> list[Any]:
        """work(rank) of every rank; results in the order of the ranks."""
        results: list[Any] = [None] * self.size
        errors: list[BaseException] = []

        def one(rank: int) -> None:
            self._rank.number = rank
            try:
                with self._running, torch.no_grad():
                    results[rank] = work(rank)
            except threading.BrokenBarrierError:  # another rank failed
                pass
            except BaseException as error:
                errors.append(error)
                self._barrier.abort()

        threads = [threading.Thread(target=one, args=(rank,)) for rank in range(self.size)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        if errors:
            raise errors[0]
        return results

    def _wait(self) -> None:
        self._running.release()
        try:
            self._barrier.wait(60.0)
        finally:
            self._running.acquire()

    def exchange(self, sent: Any) -> tuple[int, list[Any]]:
        """This rank, and what every rank sent."""
        rank = self._rank.number
        self._sent[rank] = sent
        self._wait()
        everything = list(self._sent)
        self._wait()  # until all have read
        return rank, everything


def _all_gather(out: Tensor, x: Tensor, group: Meeting) -> None:
    _, parts = group.exchange(x)
    out.copy_(torch.cat(parts))


def _all_to_all(
    out: Tensor,
    x: Tensor,
    come: Sequence[int] | None = None,
    to: Sequence[int] | None = None,
    *,
    group: Meeting,
) -> None:
    sizes = list(to) if to is not None else [len(x) // group.size] * group.size
    rank, parts = group.exchange(x.split(sizes))
    out.copy_(torch.cat([part[rank] for part in parts]))


@contextmanager
def in_one_process() -> Iterator[None]:
    """Groups are meetings while the context is open."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(dist, "all_gather_into_tensor", _all_gather)
        patch.setattr(dist, "all_to_all_single", _all_to_all)
        yield
