"""The trainer's side: contract first, then weights."""

import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, Protocol

import torch.distributed as dist
from torch import Tensor

from isomodels.contract import Contract
from isomodels.errors import CheckpointError, IsoError
from isomodels.sync.blocks import Block, Held, as_blocks, to_text
from isomodels.sync.cuda_ipc import CudaIpc
from isomodels.sync.digest import begin_digests
from isomodels.sync.shared import SharedMemory
from isomodels.sync.transport import Offer, Transport


class SyncClient(Protocol):
    """vLLM's calls, as its `VLLMWeightSyncClient`s: in process, over HTTP, or over Ray."""

    def init_weight_transfer_engine(self, init_info: dict[str, Any]) -> None:
        """Shake hands."""

    def shutdown_weight_transfer_engine(self) -> None:
        """Let go of the trainer."""

    def start_weight_update(self) -> None:
        """Begin."""

    def update_weights(self, update_info: Any) -> None:
        """Change the weights, and check them."""

    def finish_weight_update(self, weight_version: str | None = None) -> None:
        """End."""


@dataclass(frozen=True)
class Sent:
    """One sync.

    Attributes:
        version: name of the weights, which the engine gives with its outputs.
        bytes: of all tensors.
        seconds: from the first digest to the engine's confirmation.
        transport: by which they went.
    """

    version: str
    bytes: int
    seconds: float
    transport: str

    def __str__(self) -> str:
        rate = self.bytes / self.seconds / 1e9
        return (
            f"{self.version}: {self.bytes / 1e9:.2f} GB by {self.transport} in "
            f"{self.seconds:.3f} s, {rate:.2f} GB/s"
        )


class WeightSender:
    """Sends weights into engines that were started with the weight transfer "isomodels".

    Args:
        client: the engine's control; see `SyncClient`. None on ranks of a group but the first.
        contract: the trainer's; an engine whose contract gives other bits refuses here.
        transport: how the weights travel; None chooses by where they lie (`transport_for`).
        group: torch.distributed's group of the ranks that send blocks together, over a backend
            that takes objects; all of them make a WeightSender. None: this process sends all.

    Raises:
        ContractError: as the engine's own error type where it runs in another process.
    """

    def __init__(
        self,
        client: SyncClient | None,
        contract: Contract,
        transport: Transport | None = None,
        group: dist.ProcessGroup | None = None,
    ):
        self.client, self.transport, self.group = client, transport, group
        self.contract = contract
        if group is not None and transport is not None and transport.name == "network":
            raise CheckpointError(
                "a network sync goes from one process: send Trainer.weights() without a group"
            )
        self._first = group is None or group.rank() == 0
        problem = None
        if self._first:
            try:
                self._connect()
            except Exception as error:
                problem = error
        self._agree(problem)

    def send(self, weights: Mapping[str, Tensor] | Iterable[Held] | None, version: str) -> Sent:
        """Replace the engine's weights by these.

        The engine checks the contract, names, shapes and dtypes before it changes anything, and
        the digests of what travelled as copies; it copies in place, compares the digests of what
        then lies on its device, drops its prefix cache and recomputes running requests. If this
        raises before the engine began to copy, it goes on with its old weights; if later, it
        serves nothing until a sync succeeds.

        Args:
            weights: all of the module, by its own names, whole; or blocks (`Held`), of a group's
                ranks each its own (`isomodels.megatron.sharding.own_pieces`). What only a trainer
                carries (MTP layers) stays here. None: nothing of this rank.
            version: name of these weights.

        Raises:
            CheckpointError: a tensor that the contract names is missing, or the engine refused.
        """
        start = time.perf_counter()
        names = self.contract.semantic["parameters"]
        blocks = [held for held in as_blocks(weights or ()) if held.name in names]
        with ExitStack() as offered:
            own, problem, transport = _Told(), None, self.transport
            try:
                transport = transport or transport_for(blocks)
                offer = offered.enter_context(transport.offer(blocks))
                own = _Told.of(blocks, transport.name, offer)
                if self.group is not None:
                    own = own.settled()
            except Exception as error:
                own, problem = _Told(problem=str(error)), error
            told = self._gathered(own)
            if self._first and problem is None and transport is not None:
                try:
                    self._update(transport, blocks, told, version)
                except Exception as error:
                    problem = error
            self._agree(problem)
        size = sum(rank.nbytes for rank in told)
        return Sent(version, size, time.perf_counter() - start, own.transport)

    def close(self) -> None:
        """End the connection; the engine goes on with the weights that it has."""
        if self.transport is not None:
            self.transport.close()
        if self.client is not None:
            self.client.shutdown_weight_transfer_engine()

    def _connect(self) -> None:
        if self.client is None:
            raise CheckpointError("a WeightSender needs a client, or a rank other than 0")
        shake, contract = self.client.init_weight_transfer_engine, self.contract.to_json()

        def call(info: dict[str, Any]) -> None:
            shake({"contract": contract, **info})

        if self.transport is None:
            call({})
        else:
            self.transport.connect(call)

    def _update(
        self, transport: Transport, blocks: list[Held], told: "list[_Told]", version: str
    ) -> None:
        if problems := [rank.problem for rank in told if rank.problem is not None]:
            raise CheckpointError(f"a rank of the trainer has nothing to send: {problems[0]}")
        told = [rank for rank in told if rank.blocks]
        names = {block.name for rank in told for block in rank.blocks}
        if missing := sorted(self.contract.semantic["parameters"].keys() - names):
            raise CheckpointError(f"the trainer's weights lack {', '.join(missing[:5])}")
        if len(others := {rank.transport for rank in told}) > 1:
            raise CheckpointError(f"the ranks send by {' and '.join(sorted(others))}: choose one")
        message = {
            "transport": told[0].transport,
            "sources": [source for rank in told for source in rank.sources],
            "blocks": to_text(_joined(told)),
            "contract": self.contract.digests["numerical_policy"],
            "version": version,
        }
        client = self.client
        assert client is not None
        client.start_weight_update()
        # A GPU has computed them meanwhile. Decimals: JSON's numbers may be floats.
        message["digests"] = [str(value) for rank in told for value in rank.digests()]
        transport.deliver(blocks, lambda: client.update_weights(message))
        client.finish_weight_update()  # the version came with the weights

    def _gathered(self, own: "_Told") -> "list[_Told]":
        """What each rank offers; on the first, else this rank's own."""
        if self.group is None:
            return [own]
        told: list[Any] | None = [None] * self.group.size() if self._first else None
        dist.gather_object(own, told, group=self.group, group_dst=0)
        return [own] if told is None else told

    def _agree(self, problem: Exception | None) -> None:
        """Raise on every rank what the first met."""
        if self.group is not None:
            said = [None if problem is None else str(problem)]
            dist.broadcast_object_list(said, group=self.group, group_src=0)
            if problem is None and said[0] is not None:
                raise IsoError(said[0])
        if problem is not None:
            raise problem


def transport_for(blocks: Sequence[Held]) -> Transport:
    """How weights travel where nobody chose: on the same host, without leaving their device.

    Args:
        blocks: of one rank.

    Returns:
        `CudaIpc` if all lie on GPUs, else `SharedMemory`.

    Raises:
        CheckpointError: some lie on a GPU and some do not.
    """
    on_gpu = {held.tensor.is_cuda: held for held in blocks}
    if len(on_gpu) > 1:
        raise CheckpointError(
            f"{on_gpu[True].name} lies on a GPU and {on_gpu[False].name} does not: move all "
            "weights to GPUs, or choose isomodels.sync.SharedMemory(), which copies from any device"
        )
    return CudaIpc() if True in on_gpu else SharedMemory()


@dataclass(frozen=True)
class _Told:
    """What one rank offers, or why it cannot; `digests` waits for the blocks' digests."""

    transport: str = ""
    sources: Sequence[dict[str, Any]] = ()
    blocks: Sequence[Block] = ()
    digests: Callable[[], list[int]] = list
    nbytes: int = 0
    problem: str | None = None

    @classmethod
    def of(cls, blocks: Sequence[Held], transport: str, offer: Offer) -> "_Told":
        """Places of this rank's blocks, and their digests, which are begun."""
        tensors = [held.tensor for held in blocks]
        digests = begin_digests(tensors)
        places = zip(blocks, offer.places, strict=True)
        described = [Block.of(held, *place) for held, place in places]
        nbytes = sum(tensor.nbytes for tensor in tensors)
        return cls(transport, offer.sources, described, digests, nbytes)

    def settled(self) -> "_Told":
        """For other processes: its digests are there."""
        return replace(self, digests=partial(list, self.digests()))


def _joined(told: Sequence[_Told]) -> Iterable[Block]:
    """The blocks of all ranks for a message, their sources counted through."""
    first = 0
    for rank in told:
        for block in rank.blocks:
            yield block._replace(source=first + block.source) if first else block
        first += len(rank.sources)
