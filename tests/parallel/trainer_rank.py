"""One rank that opens Megatron trainers in one layout after another; see test_trainer.py."""

import resource
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from isomodels.config import DTYPES
from isomodels.errors import CheckpointError, IsoError
from isomodels.megatron.degrees import Degrees
from isomodels.megatron.sharding import own_pieces
from isomodels.megatron.trainer import Trainer
from tests.megatron.bits import assert_same_bits
from tests.megatron.full_disk import no_file_above

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

    def pieces(self, path: str, dtype: str, layout: str) -> bool | None:
        """Whether what the ranks are to send is the whole model, each bit once; on rank 0."""
        with self.open(path, dtype, layout) as trainer:
            ranks: list[Any] = [None] * dist.get_world_size()
            dist.all_gather_object(ranks, own_pieces(trainer.models))
            whole = trainer.weights()
        if whole is None:
            return None
        sent = [one for rank in ranks for one in rank]
        elements = dict.fromkeys(whole, 0)
        for one in sent:
            elements[one.name] += one.tensor.numel()
            own = tuple(slice(o, o + n) for o, n in zip(one.offset, one.tensor.shape, strict=True))
            assert_same_bits(one.tensor, whole[one.name][own], one.name)
        return elements == {name: tensor.numel() for name, tensor in whole.items()}

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

    def train_and_save(
        self, path: str, dtype: str, layout: str, sequences: Sequences, out: str
    ) -> None:
        """Two steps, then model and optimizer to `out`, and the weights to `out`-hf."""
        with self.open(path, dtype, layout) as trainer:
            for _ in range(2):
                trainer.step(sequences, num_microbatches=2)
            trainer.save(out)
            trainer.save_hf(f"{out}-hf")

    def load_and_save(self, path: str, dtype: str, layout: str, saved: str, out: str) -> int:
        """What another layout saved, loaded and saved again; the number of steps."""
        with self.open(path, dtype, layout) as trainer:
            trainer.load(saved)
            for one in trainer.optimizer.chained_optimizers:
                for state in one.optimizer.state.values():
                    assert int(state["step"]) == trainer.steps  # AdamW corrects its bias by it
            trainer.save(out)
            trainer.save_hf(f"{out}-hf")
            return trainer.steps

    def train_on(
        self, path: str, layout: str, sequences: Sequences, started: str, timeout_s: float
    ) -> None:
        """Steps without end, and a mark after the first."""
        with self.open(path, "float32", layout, timeout_s=timeout_s) as trainer:
            while True:
                trainer.step(sequences)
                Path(started).touch()

    def save_on(self, path: str, layout: str, started: str, out: str, timeout_s: float) -> None:
        """Saves without end, and a mark when the first begins."""
        with self.open(path, "float32", layout, timeout_s=timeout_s) as trainer:
            number = 0
            while True:
                Path(started).touch()
                trainer.save(f"{out}/{number}")
                number += 1

    def told(self, path: str, layout: str, out: str) -> dict[str, str | None]:
        """What this rank is told of a shard that changed, and of a rank that cannot write its own.

        `out` is saved before and can be loaded after.
        """
        told: dict[str, str | None] = {}

        def attempt(what: str, act: Callable[[str], object]) -> None:
            dist.barrier()
            try:
                act(out)
                told[what] = None
            except CheckpointError as error:
                told[what] = str(error)
            dist.barrier()

        with self.open(path, "bfloat16", layout) as trainer:
            trainer.save(out)
            shard = Path(out, "__1_0.distcp")
            whole = shard.read_bytes()
            dist.barrier()
            if dist.get_rank() == 0:
                shard.write_bytes(whole[:-1] + bytes([whole[-1] ^ 1]))
            attempt("changed", trainer.load)
            if dist.get_rank() == 0:
                shard.unlink()
            attempt("missing", trainer.load)
            if dist.get_rank() == 0:
                shard.write_bytes(whole)
            for rank in range(dist.get_world_size()):
                limit = len(whole) // 2 if dist.get_rank() == rank else resource.RLIM_INFINITY
                with no_file_above(limit):
                    attempt(f"full for {rank}", trainer.save)
            attempt("whole", trainer.load)
        return told

    def told_of_the_first(self, path: str, layout: str, out: str) -> str:
        """What this rank is told where the first, and it alone, cannot write what it writes."""
        with self.open(path, "bfloat16", layout, timeout_s=60.0) as trainer:
            limit = resource.RLIM_INFINITY if dist.get_rank() else 1000  # of common.pt
            try:
                with no_file_above(limit):
                    trainer.save(out)
            except IsoError as error:
                return f"{type(error).__name__}: {error}"
        return "nothing"
