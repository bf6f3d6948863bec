"""Weights from a trainer into this engine: vLLM's weight transfer "isomodels".

Started by `--weight-transfer-config '{"backend": "isomodels"}'`. The trainer's side is
`isomodels.sync.WeightSender`. One call of the engine does a whole sync: no step runs in between.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, TypeVar

from vllm.distributed.weight_transfer.base import (
    WeightTransferEngine,
    WeightTransferInitInfo,
    WeightTransferUpdateInfo,
)

from isomodels.contract import Contract, require_same
from isomodels.errors import CheckpointError, ContractError, IsoError
from isomodels.sync.cuda_ipc import CudaIpcReceiver
from isomodels.sync.network import NetworkReceiver
from isomodels.sync.shared import SharedMemoryReceiver
from isomodels.sync.transport import Receiver
from isomodels.vllm.incoming import Plan, arrive, copy_in_place

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
        blocks: of `isomodels.sync.blocks.to_text`.
        digests: of each block's bits, as the trainer has them; decimals.
        contract: digest of the trainer's numerical policy.
        version: name of the weights.
    """

    transport: str
    sources: list[dict[str, Any]]
    blocks: str
    digests: list[str]
    contract: str
    version: str


class IsoModelsWeightTransfer(WeightTransferEngine[InitInfo, UpdateInfo]):
    """A worker's side of a sync."""

    init_info_cls = InitInfo
    update_info_cls = UpdateInfo
    supports_draft_weight_update = False

    _agreed: str | None = None
    _parameters: dict[str, list[int]] | None = None
    _network: NetworkReceiver | None = None
    _plan: Plan | None = None
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
        plan, receiver = self._together(lambda: self._admit(update_info))
        with receiver.read(update_info.sources, plan.blocks, self.device) as blocks:
            expected = update_info.digests
            come = self._together(lambda: arrive(receiver, plan, expected, blocks, self.device))
            self.model.refusal = "a sync of weights was interrupted: send them again"
            self._together(lambda: copy_in_place(plan, come, expected))
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
        self._agreed = self._parameters = self._network = self._plan = None

    def _admit(self, update: UpdateInfo) -> tuple[Plan, Receiver]:
        """Refuse what is not for this engine, before anything is opened."""
        if update.contract != self._agreed or self._parameters is None:
            raise ContractError(
                "these weights are of another contract than the one that was compared: make a new "
                "WeightSender after a change of the trainer"
            )
        core = self.model.core
        if self._plan is None or not self._plan.fits(update.blocks, core):
            self._plan = None  # it may hold tensors that the module has given up
            self._plan = Plan.of(update.blocks, core, self._parameters)
        return self._plan, self._receiver(update.transport)

    def _receiver(self, transport: str) -> Receiver:
        if transport == "network":
            if self._network is None:
                raise CheckpointError("no network was joined: make a new WeightSender")
            return self._network
        if transport == "cuda_ipc":
            return CudaIpcReceiver()
        if transport == "shared_memory":
            return SharedMemoryReceiver()
        raise CheckpointError(f"no weights travel by {transport!r} here")

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
