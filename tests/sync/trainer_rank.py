"""One rank of a Megatron trainer that sends its own pieces into an engine; see its test."""

from collections.abc import Sequence
from multiprocessing.connection import Client

import torch
import torch.distributed as dist

from isomodels.config import DTYPES
from isomodels.megatron.degrees import Degrees
from isomodels.megatron.sharding import own_pieces
from isomodels.megatron.trainer import Trainer
from isomodels.sync import SharedMemory, WeightSender
from tests.sync.support import PipeClient


class SyncRank:
    """A trainer that lives from `open` to `close`."""

    def __init__(self) -> None:
        torch.set_num_threads(1)

    def open(self, path: str, dtype: str, layout: str) -> None:
        self.trainer = Trainer(path, dtype=DTYPES[dtype], layout=Degrees.parse(layout), lr=1e-2)

    def connect(self, address: str) -> None:
        """Shake hands with the engine at the other end of a socket; the first rank speaks."""
        client = PipeClient(Client(address)) if dist.get_rank() == 0 else None
        contract = self.trainer.contract()
        self.sender = WeightSender(client, contract, SharedMemory(), dist.group.WORLD)

    def step(self, sequences: Sequence[Sequence[int]], out: str) -> None:
        """An optimizer step; the weights go to `out` as well."""
        self.trainer.step(sequences)
        self.trainer.save_hf(out)

    def send(self, version: str, without: int | None = None) -> int:
        """The rank's own pieces, of the rank `without` none; the bytes of all ranks."""
        own = own_pieces(self.trainer.models)
        sent = self.sender.send(None if without == dist.get_rank() else own, version)
        return sent.bytes

    def score(self, sequences: Sequence[Sequence[int]]) -> list[torch.Tensor]:
        """Logprobs of each token after the first."""
        return self.trainer.score(sequences)

    def close(self) -> None:
        if hasattr(self, "trainer"):
            self.trainer.close()
