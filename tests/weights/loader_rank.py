"""One rank of a Megatron trainer that saves, and loads what `convert` wrote; see its test."""

import torch
from megatron.core import dist_checkpointing

from isomodels.megatron.degrees import Degrees
from isomodels.megatron.trainer import Trainer


class LoaderRank:
    """Each method opens a trainer of its own."""

    def __init__(self) -> None:
        torch.set_num_threads(1)

    def save(self, path: str, layout: str, out: str) -> None:
        """One step, then the training to `out`, and its weights to `out`-hf."""
        with Trainer(path, dtype=torch.bfloat16, layout=Degrees.parse(layout), lr=1e-2) as trainer:
            trainer.step([[1, 2, 3, 4, 5, 6, 7, 8]] * 4, num_microbatches=2)
            trainer.save(out)
            trainer.save_hf(f"{out}-hf")

    def stepped(
        self, path: str, layout: str, out: str, sequence: list[int]
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Logprobs of a sequence before a step and after it; then the weights to `out`."""
        with Trainer(path, dtype=torch.bfloat16, layout=Degrees.parse(layout), lr=1e-2) as trainer:
            (before,) = trainer.score([sequence])
            trainer.step([sequence] * 2)
            (after,) = trainer.score([sequence])
            trainer.save_hf(out)
            return before, after

    def load(self, path: str, layout: str, saved: str, out: str) -> None:
        """Megatron's loader into other weights, then those to `out`."""
        with Trainer(path, dtype=torch.bfloat16, layout=Degrees.parse(layout)) as trainer:
            for tensor in trainer.core.state_dict().values():
                tensor.fill_(1.0)
            loaded = dist_checkpointing.load({"model": trainer.model.sharded_state_dict()}, saved)
            trainer.model.load_state_dict(loaded["model"])
            trainer.save_hf(out)
