"""Weights through the network, without an engine: what travels, and who is refused."""

import socket
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import pytest
import torch
from torch import Tensor

from isomodels.errors import CheckpointError
from isomodels.sync import Network, network
from isomodels.sync.blocks import Block, Blocks, Whole
from isomodels.sync.digest import digest
from isomodels.sync.network import NetworkReceiver

WEIGHTS = {
    "a": torch.randn(300, 7, generator=torch.Generator().manual_seed(0)).bfloat16(),
    "b": torch.tensor([-0.0, float("nan"), float("inf")]),
    "c": torch.randn(64, 50, generator=torch.Generator().manual_seed(1)).t(),
}


def workers_of(
    pool: ThreadPoolExecutor, count: int, joined: list[Future[NetworkReceiver]]
) -> Callable[[dict[str, Any]], None]:
    """An engine's answer to the handshake: `count` workers join."""

    def call(info: dict[str, Any]) -> None:
        joined.extend(pool.submit(NetworkReceiver, info["network"], n) for n in range(count))
        for one in joined:
            one.result()

    return call


def received(
    receiver: NetworkReceiver, sources: list[dict[str, Any]], blocks: Blocks
) -> list[Tensor]:
    with receiver.read(sources, blocks, torch.device("cpu")) as tensors:
        return [tensor.clone() for tensor in tensors]


def own_address() -> str:
    """Of this host as others see it, or the loopback where it has no other."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        try:
            probe.connect(("192.0.2.1", 9))  # sends nothing: asks for the route
            return str(probe.getsockname()[0])
        except OSError:
            return "127.0.0.1"


@pytest.mark.parametrize("address", ["127.0.0.1", own_address()], ids=["loopback", "own"])
def test_every_worker_has_every_bit(monkeypatch, address):
    monkeypatch.setattr(network, "_BUCKET", 1000)  # several broadcasts a tensor
    sender = Network(address, 2, timeout_s=20.0)
    joined: list[Future[NetworkReceiver]] = []
    with ThreadPoolExecutor(4) as pool:
        sender.connect(workers_of(pool, 2, joined))
        for _ in range(2):  # one handshake, several syncs
            held = [Whole(name, tensor) for name, tensor in WEIGHTS.items()]
            with sender.offer(held) as offer:
                blocks = Blocks(
                    Block.of(one, *place) for one, place in zip(held, offer.places, strict=True)
                )
                reads = []

                def call(reads=reads, offer=offer, blocks=blocks) -> None:
                    receivers = [one.result() for one in joined]
                    reads += [pool.submit(received, r, offer.sources, blocks) for r in receivers]
                    for read in reads:
                        read.result()

                sender.deliver(held, call)
            for read in reads:
                for one, tensor in zip(held, read.result(), strict=True):
                    assert (tensor.shape, tensor.dtype) == (one.tensor.shape, one.tensor.dtype)
                    assert digest(tensor) == digest(one.tensor)
        sender.close()


def test_an_engine_of_fewer_workers_than_said_is_refused():
    with (
        ThreadPoolExecutor(2) as pool,
        pytest.raises(CheckpointError, match=r"the engine has 0 workers, not 2: say so"),
    ):
        Network("127.0.0.1", 2, timeout_s=5.0).connect(workers_of(pool, 0, []))


def test_a_worker_too_many_is_refused():
    def call(info: dict[str, Any]) -> None:
        NetworkReceiver(info["network"], 1)

    with pytest.raises(CheckpointError, match=r"counts 1 workers, but there is a worker 1: say"):
        Network("127.0.0.1", 1, timeout_s=5.0).connect(call)


def test_workers_that_do_not_come_in_time_are_told():
    hold: Future[None] = Future()
    sender = Network("127.0.0.1", 1, timeout_s=0.3)

    def call(_: dict[str, Any]) -> None:
        hold.result(1.0)

    with pytest.raises(CheckpointError, match=r"0 of 1 workers came to 127\.0\.0\.1 in 0 s"):
        sender.connect(call)


def test_a_port_that_is_taken_and_a_trainer_that_has_gone_are_told():
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        port = taken.getsockname()[1]
        taken.listen()
        with pytest.raises(CheckpointError, match=f"no store at 127.0.0.1:{port}: "):
            Network("127.0.0.1", 1, port=port, timeout_s=1.0).connect(lambda info: None)
    info = {"address": "127.0.0.1", "port": port, "size": 2, "timeout_s": 2.0}
    with pytest.raises(CheckpointError, match=f"the trainer at 127.0.0.1:{port} cannot be reached"):
        NetworkReceiver(info, 0)
