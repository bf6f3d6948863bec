"""The trainer's side alone: how weights travel where nobody chose, and ranks that send together."""

import multiprocessing
import os
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from isomodels.errors import CheckpointError, IsoError
from isomodels.sync import CudaIpc, SharedMemory, WeightSender, cuda_ipc
from isomodels.sync.blocks import Blocks, Whole
from isomodels.sync.digest import digest
from isomodels.sync.sender import transport_for

NAMES = ("a", "b", "c")
CONTRACT: Any = SimpleNamespace(
    semantic={"parameters": {name: [4] for name in NAMES}},
    digests={"numerical_policy": "x"},
    to_json=lambda: "{}",
)


def held(name: str, on_gpu: bool = False) -> Any:
    """A block that says where it lies."""
    return SimpleNamespace(name=name, tensor=SimpleNamespace(is_cuda=on_gpu))


def test_weights_travel_by_where_they_lie():
    assert isinstance(transport_for([held("a"), held("b")]), SharedMemory)
    assert isinstance(transport_for([held("a", True), held("b", True)]), CudaIpc)
    assert isinstance(transport_for([]), SharedMemory)


@pytest.mark.parametrize("where", [(True, False), (False, True), (True, True, False)])
def test_weights_in_two_kinds_of_memory_are_refused(where):
    blocks = [held(name, on_gpu) for name, on_gpu in zip(NAMES, where, strict=False)]
    gpu = blocks[max(i for i, on_gpu in enumerate(where) if on_gpu)].name
    with pytest.raises(CheckpointError, match=rf"{gpu} lies on a GPU and .* does not: move all"):
        transport_for(blocks)


def test_a_forked_process_is_another():
    """vLLM forks its engine from a trainer that has imported this: addresses mean nothing there."""
    read, write = os.pipe()
    child = os.fork()
    if not child:
        os.write(write, cuda_ipc._process().encode())
        os._exit(0)
    os.waitpid(child, 0)
    assert os.read(read, 1000).decode() != cuda_ipc._process() == cuda_ipc._process()


@dataclass
class Client:
    """An engine that keeps what it is told."""

    message: Any = None

    def __getattr__(self, name: str) -> Any:
        return lambda *_: None

    def update_weights(self, message: Any) -> None:
        self.message = message


def test_a_single_rank_names_where_its_blocks_lie():
    client = Client()
    sent = WeightSender(client, CONTRACT).send({n: torch.zeros(4) for n in NAMES}, "one")
    assert (sent.transport, sent.bytes) == ("shared_memory", 48)
    blocks = Blocks.from_text(client.message["blocks"])
    assert [(block.name, block.source) for block in blocks] == [(name, 0) for name in NAMES]
    assert client.message["digests"] == [str(digest(torch.zeros(4)))] * 3


def rank(number: int, store: str, case: str, pipe: Any) -> None:
    """One of three ranks; says how its send ended and, of the first, what the engine was told."""
    import torch.distributed as dist

    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=number, world_size=3)
    client = Client()
    sender = WeightSender(client if number == 0 else None, CONTRACT, group=dist.group.WORLD)
    own: list[Any] = [Whole(NAMES[number], torch.full((4,), float(number)))]
    if case == "an empty first rank" and number < 2:
        own = [] if number == 0 else [Whole(name, torch.zeros(4)) for name in NAMES[:2]]
    if case == "two kinds of memory" and number == 2:
        own.append(held("a", True))
    if case == "other transports" and number == 1:
        sender.transport = SimpleNamespace(name="cuda_ipc", offer=SharedMemory().offer)
    try:
        sender.send(own, "together")
        ended = "sent"
    except IsoError as error:
        ended = str(error)
    told = client.message and [
        (b.name, b.source, len(client.message["sources"]))
        for b in Blocks.from_text(client.message["blocks"])
    ]
    pipe.send((ended, told))
    dist.barrier()
    dist.destroy_process_group()


@pytest.mark.parametrize(
    ("case", "message", "told"),
    [
        ("whole", "sent", [("a", 0, 3), ("b", 1, 3), ("c", 2, 3)]),
        ("an empty first rank", "sent", [("a", 0, 2), ("b", 0, 2), ("c", 1, 2)]),
        ("two kinds of memory", "a lies on a GPU and c does not: move all", None),
        ("other transports", "the ranks send by cuda_ipc and shared_memory: choose one", None),
    ],
)
def test_ranks_send_or_refuse_together(tmp_path, case, message, told):
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["tests.sync.test_sender"])
    pipes, processes = [], []
    for number in range(3):
        ours, theirs = context.Pipe()
        process = context.Process(target=rank, args=(number, str(tmp_path / "s"), case, theirs))
        process.start()
        theirs.close()
        pipes.append(ours)
        processes.append(process)
    results = [pipe.recv() if pipe.poll(60) else ("hangs", None) for pipe in pipes]
    for process in processes:
        process.join(10)
        process.kill()
    assert [message in ended for ended, _ in results] == [True] * 3, results
    assert results[0][1] == told
