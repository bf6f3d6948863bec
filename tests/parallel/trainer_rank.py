"""One rank that opens Megatron trainers in one layout after another; see test_trainer.py."""

from collections.abc import Sequence
from typing import Any

import torch

from isomodels.config import DTYPES
from isomodels.megatron.layout import Degrees
from isomodels.megatron.trainer import Trainer

Sequences = Sequence[Sequence[int]]


class TrainerRank:
    """Each method opens trainers of its own: a process outlives many layouts."""

    def __init__(self) -> None:
        torch.set_num_threads(1)

    def open(self, path: str, dtype: str, layout: str, **how: Any) -> Trainer:
        return Trainer(path, dtype=DTYPES[dtype], layout=Degrees.parse(layout), **how)

    def bits(self, path: str, dtype: str, layout: str, sequences: Sequences) -> dict[str, Any]:
        """Logprobs of every way a trainer computes them, in two microbatches or more."""
        with self.open(path, dtype, layout, recompute=True, max_tokens=96) as trainer:
            return {
                "forward": trainer.forward_logprobs(sequences, 0.7),
                "score": trainer.score(sequences),
                "recompute": trainer.recompute_logprobs(sequences),
            }

    def train(
        self, path: str, dtype: str, layout: str, sequences: Sequences, out: str, **how: Any
    ) -> dict[str, Any]:
        """The losses, gradient norms and logprobs of some steps; the weights are saved to `out`."""
        with self.open(path, dtype, layout, **how) as trainer:
            steps = [trainer.step(sequences, num_microbatches=2) for _ in range(2)]
            trainer.save_hf(out)
            return {
                "losses": [step.loss for step in steps],
                "norms": [step.grad_norm for step in steps],
                "score": trainer.score(sequences),
            }
