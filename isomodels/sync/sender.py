"""The trainer's side: contract first, then weights."""

import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from torch import Tensor

from isomodels.contract import Contract
from isomodels.errors import CheckpointError
from isomodels.sync.digest import digest
from isomodels.sync.shared import published


class SyncClient(Protocol):
    """vLLM's four calls, as its `VLLMWeightSyncClient`: in process, over HTTP, or over Ray."""

    def init_weight_transfer_engine(self, init_info: dict[str, Any]) -> None:
        """Shake hands."""

    def start_weight_update(self) -> None:
        """Begin."""

    def update_weights(self, update_info: Any) -> None:
        """Change the weights."""

    def finish_weight_update(self, weight_version: str | None = None) -> None:
        """Check, and name the new weights."""


@dataclass(frozen=True)
class Sent:
    """One sync.

    Attributes:
        version: name of the weights, which the engine gives with its outputs.
        bytes: of all tensors.
        seconds: from the first digest to the engine's confirmation.
    """

    version: str
    bytes: int
    seconds: float


class WeightSender:
    """Sends weights into engines that were started with the weight transfer "isomodels".

    Args:
        client: the engine's control; see `SyncClient`.
        contract: the trainer's; an engine whose contract gives other bits refuses here.
        folder: see `published`.

    Raises:
        ContractError: as the engine's own error type where it runs in another process.
    """

    def __init__(self, client: SyncClient, contract: Contract, folder: Path | None = None):
        self.client, self.folder = client, folder
        self.contract = contract
        client.init_weight_transfer_engine({"contract": contract.to_json()})

    def send(self, tensors: Mapping[str, Tensor], version: str) -> Sent:
        """Replace the engine's weights by these.

        The engine checks names, shapes, dtypes and the contract before it changes anything, drops
        its prefix cache, recomputes running requests, and compares digests afterwards. If this
        raises before the engine began to copy, it goes on with its old weights; if later, it
        serves nothing more.

        Args:
            tensors: all of the module, by its own names, whole; what only a trainer carries (MTP
                layers) stays here.
            version: name of these weights.

        Raises:
            CheckpointError: a tensor that the contract names is missing, or the engine refused.
        """
        start = time.perf_counter()
        names = self.contract.semantic["parameters"]
        if missing := sorted(names.keys() - tensors.keys()):
            raise CheckpointError(f"the trainer's weights lack {', '.join(missing[:5])}")
        tensors = {name: tensors[name] for name in names}
        manifest = {name: digest(tensor) for name, tensor in tensors.items()}
        with published(tensors, self.folder) as path:
            self.client.start_weight_update()
            self.client.update_weights(
                {
                    "path": str(path),
                    "digests": {name: str(value) for name, value in manifest.items()},
                    "contract": self.contract.digests["numerical_policy"],
                    "version": version,
                }
            )
            self.client.finish_weight_update(version)
        size = sum(tensor.nbytes for tensor in tensors.values())
        return Sent(version, size, time.perf_counter() - start)
