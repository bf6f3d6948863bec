"""One rank that runs a Megatron trainer in one layout after another; see layouts.py."""

import gc
from collections.abc import Sequence

import torch

from isomodels.parity.trainer import Logprobs, ParityTrainer, Routes

_MICROBATCH = 1024  # tokens: several microbatches, so that pipeline stages overlap


class LayoutRank:
    """Each method opens a trainer of its own: a process outlives many layouts."""

    def run(
        self, checkpoint: str, dtype: str, layout: str, sequences: Sequence[Sequence[int]]
    ) -> tuple[dict[str, Logprobs], Routes]:
        """Logprobs of every way a trainer computes them, and the routes."""
        trainer = ParityTrainer(
            checkpoint, dtype, seed=0, lr=1e-3, max_tokens=_MICROBATCH, layout=layout
        )
        # After a failure nothing is given back, which could wait for another rank: this one ends.
        found = trainer.cases(sequences)
        trainer.close()
        del trainer
        gc.collect()  # what cycles hold would be missing to the next layout
        if torch.cuda.is_available():
            torch.cuda.empty_cache()
        return found
