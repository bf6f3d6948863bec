"""A trainer's process that syncs through a pipe, and the engine's end of the pipe."""

import contextlib
import multiprocessing
import os
from collections.abc import Callable
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from isomodels.contract import Contract
from isomodels.errors import IsoError
from isomodels.sync import CudaIpc, Network, SharedMemory, WeightSender
from isomodels.sync.transport import Transport

CALLS = (
    "init_weight_transfer_engine",
    "start_weight_update",
    "update_weights",
    "finish_weight_update",
)


class PipeClient:
    """`SyncClient` whose calls are made at the other end of a pipe."""

    def __init__(self, pipe: Connection):
        self.pipe = pipe

    def _call(self, name: str, *args: Any) -> None:
        self.pipe.send((name, args))
        error = self.pipe.recv()
        if error is not None:
            raise IsoError(error)

    def init_weight_transfer_engine(self, init_info: dict[str, Any]) -> None:
        self._call("init_weight_transfer_engine", init_info)

    def shutdown_weight_transfer_engine(self) -> None:
        self._call("shutdown_weight_transfer_engine")

    def start_weight_update(self) -> None:
        self._call("start_weight_update")

    def update_weights(self, update_info: Any) -> None:
        self._call("update_weights", update_info)

    def finish_weight_update(self, weight_version: str | None = None) -> None:
        self._call("finish_weight_update", weight_version)


def serve(pipe: Connection, client: Any, before: Callable[[str], None] = lambda name: None) -> str:
    """Make the calls that come until the other end closes; what ended it."""
    while True:
        try:
            name, args = pipe.recv()
        except (EOFError, ConnectionResetError):
            return "gone"
        if name == "done":
            return "done"
        before(name)
        try:
            getattr(client, name)(*args)
            answer = None
        except Exception as error:
            answer = str(error)
        with contextlib.suppress(OSError):  # it has gone meanwhile
            pipe.send(answer)


def send_weights(
    pipe: Connection, contract: str, files: list[str], transport: str, workers: int
) -> None:
    """The trainer: sends each file of tensors, over and over, until it is killed or told to end."""
    torch.set_num_threads(1)
    how: Transport = SharedMemory()
    if transport == "network":
        how = Network("127.0.0.1", workers, timeout_s=5.0)
    place = "cpu"
    if transport == "cuda_ipc":
        how, place = CudaIpc(), "cuda"
    weights: list[dict[str, Tensor]] = [torch.load(file, map_location=place) for file in files]
    pipe.send(("ready", ()))
    while (number := pipe.recv()) is not None:
        sender = WeightSender(PipeClient(pipe), Contract.from_json(contract), how)
        sent = sender.send(weights[number], f"step {number}")
        pipe.send(("done", sent.seconds))


def start(*args: Any) -> tuple[Any, Connection]:
    """The trainer's process, forked from a clean one that has imported all, and our end."""
    context: Any = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["tests.sync.support"])
    ours, theirs = context.Pipe()
    process = context.Process(target=send_weights, args=(theirs, *args), daemon=True)
    process.start()
    theirs.close()
    assert ours.recv()[0] == "ready"
    return process, ours


def held_files() -> list[str]:
    """Weights that this process still maps or holds, and names of ours in /dev/shm."""
    maps = [
        line for line in Path("/proc/self/maps").read_text().splitlines() if "isomodels" in line
    ]
    found = [line.split()[-2] for line in maps if "memfd:isomodels-weights" in line]
    for entry in Path("/proc/self/fd").iterdir():
        with contextlib.suppress(OSError):
            if "isomodels-weights" in os.readlink(entry):
                found.append(str(entry))
    return found + [str(path) for path in Path("/dev/shm").glob("*isomodels*")]
