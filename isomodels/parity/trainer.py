"""The trainer's side of parity, run in a process of its own."""

from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from isomodels.batch import Batch
from isomodels.config import DTYPES
from isomodels.contract import contract_of
from isomodels.contract.served import ServedOperations
from isomodels.layers.routes import record_routes
from isomodels.megatron.degrees import Degrees
from isomodels.megatron.trainer import Trainer
from isomodels.parity.operations import answer

Sequences = Sequence[Sequence[int]]
Logprobs = list[npt.NDArray[np.float32]]  # of each sequence
Routes = list[npt.NDArray[np.int32]]  # of each sequence, [n, layers with experts, k]


class ParityTrainer:
    """A Megatron trainer that answers in arrays of the host."""

    trainer: Any

    def __init__(
        self,
        checkpoint: str,
        dtype: str,
        seed: int,
        lr: float,
        max_tokens: int,
        layout: str = "tp1",
    ):
        self.trainer = Trainer(
            checkpoint,
            dtype=DTYPES[dtype],
            seed=seed,
            lr=lr,
            recompute=True,
            max_tokens=max_tokens,
            layout=Degrees.parse(layout),
        )
        self.contract_args: tuple[Any, ...] = (checkpoint, DTYPES[dtype])
        self.count()

    def count(self) -> None:
        """Count operations from now on; a rank's parts have operations of their own."""
        whole = self.trainer.layout.ranks == 1
        self.served = ServedOperations(self.trainer.core) if whole else None

    def operations(self) -> dict[str, Any] | None:
        """See `isomodels.parity.operations.answer`; None of several ranks."""
        if self.served is None:
            return None
        checkpoint, dtype = self.contract_args
        device = self.trainer.core.head_weight.device
        return answer(contract_of(Path(checkpoint), device, dtype=dtype), self.served)

    def cases(self, sequences: Sequences) -> tuple[dict[str, Logprobs], Routes]:
        """Logprobs of the same tokens in every way a trainer computes them, and their routes.

        "forward" is the forward pass of a training step, "score" has no gradients, "recompute" is
        from layers recomputed in the backward pass (of a trainer that recomputes), "alone" is each
        sequence by itself: by the module outside Megatron, or in a layout of several ranks by its
        trainer. The routes are those of "forward"; none of a model without experts.
        """
        trainer = self.trainer
        with ExitStack() as stack:
            stack.enter_context(trainer.without_recompute())
            recorded = [stack.enter_context(record_routes(one.core)) for one in trainer.models]
            forward = trainer.forward_logprobs(sequences)
        routes: Routes = []
        if trainer.core.config.routing is not None:
            routes = trainer.split_routes(recorded, sequences)
        logprobs = {
            "forward": _arrays(forward),
            "score": self.score(sequences),
            "alone": _arrays(self._alone(sequences)),
        }
        if trainer.recompute:
            logprobs["recompute"] = _arrays(trainer.recompute_logprobs(sequences))
        return logprobs, routes

    def score(self, sequences: Sequences) -> Logprobs:
        """Logprobs without gradients."""
        return _arrays(self.trainer.score(sequences))

    @torch.no_grad()
    def _alone(self, sequences: Sequences) -> list[torch.Tensor]:
        if self.trainer.layout.ranks > 1:
            return [self.trainer.score([sequence])[0] for sequence in sequences]
        core, rows = self.trainer.core, []
        device = core.head_weight.device
        for sequence in sequences:
            ids = torch.tensor(sequence, device=device)
            bounds = torch.tensor([0, len(ids)], dtype=torch.int32, device=device)
            hidden = core(ids, torch.arange(len(ids), device=device), Batch.packed(bounds))
            rows.append(core.token_logprobs(hidden[:-1], ids[1:]))
        return rows

    def train(self, sequences: Sequences, steps: int) -> list[float]:
        """Optimizer steps on these sequences; the loss of each."""
        return [self.trainer.step(sequences).loss for _ in range(steps)]

    def save(self, path: str) -> None:
        """Write the weights as a Hugging Face checkpoint."""
        self.trainer.save_hf(path)

    def trace(self, token_ids: Sequence[int]) -> dict[str, str]:
        """Hash of every operation's output at the last of `token_ids`."""
        return self.trainer.trace(token_ids, len(token_ids) - 1)

    def close(self) -> None:
        """Give back the process groups."""
        self.trainer.close()


def _arrays(rows: Sequence[torch.Tensor]) -> Logprobs:
    everything = torch.cat(list(rows)).cpu().numpy()
    return np.split(everything, np.cumsum([len(row) for row in rows])[:-1])
