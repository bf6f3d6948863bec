"""Weights through the network: one broadcast to all workers, which keep it aside until it is whole.

A process group of its own over torch's gloo, beside whatever groups trainer and engine have, from
host memory to host memory. A store at the trainer's address says who has come.
"""

import socket
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch._C._distributed_c10d import PrefixStore, TCPStore

from isomodels.errors import CheckpointError
from isomodels.sync.blocks import Blocks, Held, byte_view
from isomodels.sync.transport import Offer, Places

_BUCKET = 64 << 20  # bytes of one broadcast
_POLL_SECONDS = 0.002
_GONE = "make a new WeightSender"


class Network:
    """The trainer's side.

    Args:
        address: of this host, as the engine's workers reach it.
        workers: of the engine: tensor parallel size times the number of replicas.
        port: for the store; 0 takes a free one.
        timeout_s: after which one side gives the other up.
    """

    name = "network"

    def __init__(
        self,
        address: str,
        workers: int,
        *,
        port: int = 0,
        timeout_s: float = 300.0,
    ):
        self.address, self.workers = address, workers
        self.port, self.timeout_s = port, timeout_s
        self._updates = 0
        self._group: Any = None
        self._store: Any = None

    def connect(self, call: Callable[[dict[str, Any]], None]) -> None:
        """Open the store and the group, in which every worker joins during the call.

        Raises:
            CheckpointError: the port is taken, or too few workers came in time.
        """
        limit = timedelta(seconds=self.timeout_s)
        try:
            self._store = TCPStore(
                self.address, self.port, is_master=True, timeout=limit, wait_for_workers=False
            )
        except RuntimeError as error:
            raise CheckpointError(
                f"no store at {self.address}:{self.port}: {str(error).splitlines()[0]}"
            ) from None
        info = {
            "address": self.address,
            "port": self._store.port,
            "size": 1 + self.workers,
            "timeout_s": self.timeout_s,
        }
        with ThreadPoolExecutor(1) as pool:
            answer = pool.submit(call, {"network": info})
            self._wait_for("joined", answer)
            own = _own_address(self.address, self._store.port, self.timeout_s)
            self._group = _group(self._store, 0, 1 + self.workers, own, limit)
            answer.result()

    @contextmanager
    def offer(self, blocks: Sequence[Held]) -> Iterator[Offer]:
        """One source: the bytes of all blocks, one after another."""
        places: Places = []
        at = 0
        for held in blocks:
            places.append((0, at))
            at += held.tensor.nbytes
        self._updates += 1
        yield Offer([{"update": self._updates, "bytes": at}], places)

    def deliver(self, blocks: Sequence[Held], call: Callable[[], None]) -> None:
        """Broadcast the blocks once every worker is ready for them.

        Raises:
            CheckpointError: a worker broke off; what the engine refused is raised as its own.
        """
        with ThreadPoolExecutor(1) as pool:
            answer = pool.submit(call)
            self._wait_for(f"ready/{self._updates}", answer)
            try:
                for held in blocks:
                    for part in _parts(byte_view(held.tensor).cpu()):
                        _broadcast(self._group, part, self.timeout_s)
            except RuntimeError as error:
                if answer.done():
                    answer.result()
                raise CheckpointError(
                    f"a worker of the engine broke off ({str(error).splitlines()[0]}): {_GONE}"
                ) from None
            answer.result()

    def close(self) -> None:
        """Leave the group."""
        self._group = self._store = None

    def _wait_for(self, key: str, answer: "Future[None]") -> None:
        """Until all workers have counted themselves, or the engine has answered already."""
        end = time.monotonic() + self.timeout_s
        while (come := self._store.add(key, 0)) < self.workers:
            if answer.done():
                answer.result()  # a refusal
                raise CheckpointError(
                    f"the engine has {come} workers, not {self.workers}: say so to Network(...)"
                )
            if time.monotonic() > end:
                raise CheckpointError(
                    f"{come} of {self.workers} workers came to {self.address} in "
                    f"{self.timeout_s:.0f} s: does the engine reach that address?"
                )
            time.sleep(_POLL_SECONDS)


class NetworkReceiver:
    """A worker's side, from the handshake on.

    Args:
        info: what `Network.connect` gave.
        worker: this one's number among all workers.

    Raises:
        CheckpointError: the trainer is out of reach, or counts fewer workers.
    """

    lasting = False
    damages = True

    def __init__(self, info: dict[str, Any], worker: int):
        self.timeout_s = info["timeout_s"]
        limit = timedelta(seconds=self.timeout_s)
        where = f"{info['address']}:{info['port']}"
        if 1 + worker >= info["size"]:
            raise CheckpointError(
                f"the trainer counts {info['size'] - 1} workers, but there is a worker {worker}: "
                "say so to Network(...)"
            )
        try:
            # A store would wait for a trainer that has ended already.
            own = _own_address(info["address"], info["port"], self.timeout_s)
            self._store = TCPStore(info["address"], info["port"], is_master=False, timeout=limit)
            self._store.add("joined", 1)
            self._group = _group(self._store, 1 + worker, info["size"], own, limit)
        except (OSError, RuntimeError) as error:
            raise CheckpointError(
                f"the trainer at {where} cannot be reached: {str(error).splitlines()[0]}"
            ) from None

    @contextmanager
    def read(
        self, sources: Sequence[dict[str, Any]], blocks: Blocks, device: torch.device
    ) -> Iterator[Iterator[Tensor]]:
        """The blocks as they come, each valid until the next; see `Receiver`."""
        yield self._received(sources[0]["update"], blocks)

    def _received(self, update: int, blocks: Blocks) -> Iterator[Tensor]:
        try:
            self._store.add(f"ready/{update}", 1)
            buffer = torch.empty(max(b.nbytes for b in blocks), dtype=torch.uint8)
            for block in blocks:
                data = buffer[: block.nbytes]
                for part in _parts(data):
                    _broadcast(self._group, part, self.timeout_s)
                yield data.view(block.torch_dtype).view(block.shape)
        except RuntimeError as error:
            raise CheckpointError(
                f"the trainer broke off ({str(error).splitlines()[0]}): the old weights stay; "
                f"{_GONE}"
            ) from None


def _parts(data: Tensor) -> Iterator[Tensor]:
    for start in range(0, len(data), _BUCKET):
        yield data[start : start + _BUCKET]


def _own_address(address: str, port: int, timeout_s: float) -> str:
    """This host's address on its way to the store.

    Gloo takes what the host's own name stands for, which in most containers is 127.0.0.1.
    """
    with socket.create_connection((address, port), timeout_s) as connection:
        return str(connection.getsockname()[0])


def _group(store: Any, rank: int, size: int, own: str, limit: timedelta) -> Any:
    """A process group at this host's address `own`; no part of torch's global state."""
    gloo: Any = dist.ProcessGroupGloo
    options = gloo._Options()
    options._devices = [gloo.create_device(hostname=own)]
    options._timeout = limit
    return gloo(PrefixStore("weights", store), rank, size, options)


def _broadcast(group: Any, data: Tensor, timeout_s: float) -> None:
    """From rank 0, and wait for it: a peer that is gone is an error here."""
    options = dist.BroadcastOptions()
    options.rootRank = options.rootTensor = 0
    group.broadcast([data], options).wait(timedelta(seconds=timeout_s))
