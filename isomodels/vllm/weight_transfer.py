"""Weights from a trainer into this engine: vLLM's weight transfer "isomodels".

Started by `--weight-transfer-config '{"backend": "isomodels"}'`. The trainer's side is
`isomodels.sync.WeightSender`.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from vllm.distributed.weight_transfer.base import (
    WeightTransferEngine,
    WeightTransferInitInfo,
    WeightTransferUpdateInfo,
)

from isomodels.contract import Contract, require_same
from isomodels.errors import CheckpointError, ContractError
from isomodels.layers.parallel import named_tensors
from isomodels.sync.digest import digest
from isomodels.sync.shared import mapped
from isomodels.weights_conv.bits import dtype_name, shorten


@dataclass
class InitInfo(WeightTransferInitInfo):
    """Attributes: contract: the trainer's, as JSON."""

    contract: str


@dataclass
class UpdateInfo(WeightTransferUpdateInfo):
    """One set of weights.

    Attributes:
        path: safetensors file of all of the module's tensors, by its own names.
        digests: {name: `isomodels.sync.digest` as a decimal}.
        contract: digest of the trainer's numerical policy.
        version: name of the weights.
    """

    path: str
    digests: dict[str, str]
    contract: str
    version: str


class IsoModelsWeightTransfer(WeightTransferEngine[InitInfo, UpdateInfo]):
    """The worker's side of a sync."""

    init_info_cls = InitInfo
    update_info_cls = UpdateInfo
    supports_draft_weight_update = False

    _agreed: str | None = None
    _expected: dict[str, str] | None = None

    def init_transfer_engine(self, init_info: InitInfo) -> None:
        """Compare contracts.

        Raises:
            ContractError: the trainer would not give the bits of this engine.
        """
        trainer = Contract.from_json(init_info.contract, "the trainer's contract")
        require_same(trainer, self.model.contract())
        self._agreed = trainer.digests["numerical_policy"]

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
        self._expected = None

    def update_weights(self, update_info: dict[str, Any]) -> None:
        """Check everything, then copy in place: CUDA graphs stay valid.

        Raises:
            ContractError, CheckpointError: nothing was changed.
        """
        self.receive_weights(self.parse_update_info(update_info))

    def receive_weights(self, update_info: UpdateInfo) -> None:
        """See `update_weights`."""
        if update_info.contract != self._agreed:
            raise ContractError(
                "these weights are of another contract than the one that was compared: make a new "
                "WeightSender after a change of the trainer"
            )
        own = self._own_tensors()
        with mapped(Path(update_info.path)) as tensors:
            check_tensors(tensors, own, update_info.digests)
            self.model.refusal = "a sync of weights was interrupted: start the engine anew"
            with torch.no_grad():
                for name, tensor in tensors.items():
                    own[name].copy_(tensor)
        self._expected = dict(update_info.digests)

    def finish_weight_update(self) -> None:
        """Compare digests of what now lies on the device, and serve again.

        Raises:
            CheckpointError: no weights came (the old ones stay), or they differ from the trainer's
                (the engine then serves nothing more).
        """
        if self._expected is None:
            raise CheckpointError("a weight update ended without weights: the old ones stay")
        expected, self._expected = self._expected, None
        own = self._own_tensors()
        wrong = [name for name, value in expected.items() if str(digest(own[name])) != value]
        if wrong:
            raise CheckpointError(
                f"after the sync {shorten(wrong)} differ from the trainer's: start the engine anew"
            )
        self.model.refusal = None

    def shutdown(self) -> None:
        """The trainer has gone."""
        self._agreed = None

    def _own_tensors(self) -> dict[str, Tensor]:
        return named_tensors(self.model.core)


def check_tensors(
    tensors: Mapping[str, Tensor], own: Mapping[str, Tensor], digests: Mapping[str, str]
) -> None:
    """Check names on both sides, shapes, dtypes, and the bits as the trainer had them.

    Args:
        tensors: the trainer's.
        own: the engine's.
        digests: of the trainer's tensors, as decimals.

    Raises:
        CheckpointError: naming all that differs.
    """
    problems = []
    if missing := own.keys() - tensors.keys():
        problems.append(f"missing: {shorten(missing)}")
    if left_over := tensors.keys() - own.keys():
        problems.append(f"left over: {shorten(left_over)}")
    for name in sorted(own.keys() & tensors.keys()):
        theirs, ours = tensors[name], own[name]
        if theirs.shape != ours.shape or theirs.dtype != ours.dtype:
            problems.append(
                f"{name} is {dtype_name(theirs.dtype)} {list(theirs.shape)} instead of "
                f"{dtype_name(ours.dtype)} {list(ours.shape)}"
            )
    if not problems:
        wrong = [n for n, tensor in tensors.items() if str(digest(tensor)) != digests.get(n)]
        if wrong:
            problems.append(f"damaged on the way: {shorten(wrong)}")
    if problems:
        raise CheckpointError(
            "the trainer's weights are not those of this engine, which keeps its old ones: "
            + "; ".join(problems)
        )
