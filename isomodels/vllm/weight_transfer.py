"""Weights from a trainer into this engine: vLLM's weight transfer "isomodels".

Started by `--weight-transfer-config '{"backend": "isomodels"}'`. The trainer's side is
`isomodels.sync.WeightSender`. One call of the engine does a whole sync: no step runs in between.
"""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, TypeVar

from vllm.distributed.weight_transfer.base import (
    WeightTransferEngine,
    WeightTransferInitInfo,
    WeightTransferUpdateInfo,
)

from isomodels.contract import Contract, require_same
from isomodels.errors import CheckpointError, ContractError, IsoError
from isomodels.layers.pieces import Piece, pieces
from isomodels.sync.blocks import Block
from isomodels.sync.cuda_ipc import CudaIpcReceiver
from isomodels.sync.network import NetworkReceiver
from isomodels.sync.shared import SharedMemoryReceiver
from isomodels.sync.transport import Receiver
from isomodels.vllm.incoming import arrive, check_blocks, copy_in_place

T = TypeVar("T")


@dataclass
class InitInfo(WeightTransferInitInfo):
    """A handshake.

    Attributes:
        contract: the trainer's, as JSON.
        network: how its `Network` is reached, if it has one.
    """

    contract: str
    network: dict[str, Any] | None = None


@dataclass
class UpdateInfo(WeightTransferUpdateInfo):
    """One set of weights.

    Attributes:
        transport: name of the trainer's.
        sources: where the bytes lie, as that transport says it.
        blocks: each as `Block.to_json`.
        contract: digest of the trainer's numerical policy.
        version: name of the weights.
    """

    transport: str
    sources: list[dict[str, Any]]
    blocks: list[dict[str, Any]]
    contract: str
    version: str
    parsed: list[Block] = field(init=False)

    def __post_init__(self) -> None:
        self.parsed = [Block.from_json(one) for one in self.blocks]


class IsoModelsWeightTransfer(WeightTransferEngine[InitInfo, UpdateInfo]):
    """A worker's side of a sync."""

    init_info_cls = InitInfo
    update_info_cls = UpdateInfo
    supports_draft_weight_update = False

    _agreed: str | None = None
    _parameters: dict[str, list[int]] | None = None
    _network: NetworkReceiver | None = None
    _received = False

    def init_transfer_engine(self, init_info: InitInfo) -> None:
        """Compare contracts, and join the trainer's network if it has one.

        Raises:
            ContractError: the trainer would not give the bits of this engine.
            CheckpointError: its network is out of reach.
        """
        self.shutdown()
        trainer = Contract.from_json(init_info.contract, "the trainer's contract")
        own = self.model.contract()
        require_same(trainer, own)
        if init_info.network is not None:
            self._network = NetworkReceiver(init_info.network, self._worker)
        self._agreed = trainer.digests["numerical_policy"]
        self._parameters = own.semantic["parameters"]

    def start_weight_update(self) -> None:
        """Nothing changes yet.

        Raises:
            ContractError: no contracts were compared.
        """
        if self._agreed is None:
            raise ContractError(
                "weights were sent before contracts were compared: send them with "
                "isomodels.sync.WeightSender"
            )
        self._received = False

    def update_weights(self, update_info: dict[str, Any]) -> None:
        """Check everything, copy in place (CUDA graphs stay valid), and check what lies there.

        All workers of the engine go on together, or none does.

        Raises:
            ContractError, CheckpointError: nothing was changed; or, where the message says that
                the engine serves nothing, the copy was interrupted or gave other bits.
        """
        self.receive_weights(self.parse_update_info(update_info))

    def receive_weights(self, update_info: UpdateInfo) -> None:
        """See `update_weights`."""
        blocks, mine = update_info.parsed, pieces(self.model.core)
        receiver = self._together(lambda: self._admit(update_info, mine))
        with receiver.read(update_info.sources, blocks, self.device) as tensors:
            sources = self._together(lambda: arrive(receiver, blocks, tensors, mine, self.device))
            self.model.refusal = "a sync of weights was interrupted: send them again"
            self._together(lambda: copy_in_place(sources, mine))
        self.model.refusal = None
        self._received = True

    def finish_weight_update(self) -> None:
        """End; all was checked already.

        Raises:
            CheckpointError: no weights came.
        """
        if not self._received:
            raise CheckpointError("a weight update ended without weights: the old ones stay")
        self._received = False

    def shutdown(self) -> None:
        """The trainer has gone."""
        self._agreed = self._parameters = self._network = None

    def _admit(self, update: UpdateInfo, mine: list[Piece]) -> Receiver:
        """Refuse what is not for this engine, before anything is opened."""
        if update.contract != self._agreed or self._parameters is None:
            raise ContractError(
                "these weights are of another contract than the one that was compared: make a new "
                "WeightSender after a change of the trainer"
            )
        check_blocks(update.parsed, self._parameters, mine)
        if update.transport == "network":
            if self._network is None:
                raise CheckpointError("no network was joined: make a new WeightSender")
            return self._network
        if update.transport == "cuda_ipc":
            return CudaIpcReceiver()
        if update.transport == "shared_memory":
            return SharedMemoryReceiver()
        raise CheckpointError(f"no weights travel by {update.transport!r} here")

    @property
    def _worker(self) -> int:
        parallel = self.parallel_config
        return int(parallel.data_parallel_index * parallel.world_size + parallel.rank)

    def _together(self, step: Callable[[], T]) -> T:
        """What a step gives here, if it succeeded in every worker; else its error, in every one."""
        problem: Exception | None = None
        try:
            result = step()
        except Exception as error:
            problem = error
        if self.parallel_config.world_size > 1:
            import torch.distributed as dist
            from vllm.distributed import get_world_group

            said: list[Any] = [None] * self.parallel_config.world_size
            own = None if problem is None else f"{type(problem).__name__}: {problem}"
            dist.all_gather_object(said, own, group=get_world_group().cpu_group)
            if problem is None and (others := [text for text in said if text is not None]):
                raise IsoError(f"another worker refused: {others[0]}")
        if problem is not None:
            raise problem
        return result
