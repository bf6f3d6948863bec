"""A training that saves into one folder after every step, and what reads it; see its test."""

import os
from collections.abc import Sequence
from pathlib import Path

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.dist_checkpointing.mapping import ShardedTensor

from isomodels.megatron import cpu_redirect, resume
from isomodels.megatron.trainer import Trainer
from isomodels.trace.digest import tensor_digest
from isomodels.weights_conv.write import place

BATCH = [[1, 2, 3, 4, 5, 6, 7, 8, 9], [9, 8, 7, 6, 5]]


def open_trainer(path: str) -> Trainer:
    torch.set_num_threads(1)
    return Trainer(path, dtype=torch.bfloat16, lr=1e-2)


def train_on(path: str, out: str, marks: str, environment: dict[str, str]) -> None:
    """Resume if there is a save; then steps and saves without end, a mark before each save."""
    os.environ.update(environment)
    with open_trainer(path) as trainer:
        if Path(out).exists():
            trainer.load(out)
        while True:
            trainer.step(BATCH, num_microbatches=2)
            Path(marks, str(trainer.steps)).touch()
            trainer.save(out)


def save_many(out: str, environment: dict[str, str]) -> None:
    """Save 3,000 tensors over and over: what a writer tells of them is more than a pipe holds."""
    os.environ.update(environment, RANK="0", WORLD_SIZE="1")
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT="0")
    torch.set_num_threads(1)
    cpu_redirect.install()
    dist.init_process_group("gloo")
    parallel_state.initialize_model_parallel()
    whole = ShardedTensor.from_rank_offsets
    state = {name: whole(name, torch.zeros(1000)) for name in map(str, range(3000))}
    while True:
        place(out, lambda folder: resume._write(folder, out, state), distributed=True)


class Reader:
    """Opens a trainer of its own in each method."""

    def states(self, path: str, count: int) -> list[list[int]]:
        """Of uninterrupted training, the digests after each number of steps."""
        with open_trainer(path) as trainer:
            found = [digests(trainer)]
            for _ in range(count):
                trainer.step(BATCH, num_microbatches=2)
                found.append(digests(trainer))
        return found

    def loaded(self, path: str, out: str) -> tuple[int, list[int]]:
        """Steps and digests of what a save holds."""
        with open_trainer(path) as trainer:
            trainer.load(out)
            return trainer.steps, digests(trainer)

    def saved(self, path: str, out: str) -> int:
        """Load, take a step and save again; the number of steps."""
        with open_trainer(path) as trainer:
            trainer.load(out)
            trainer.step(BATCH, num_microbatches=2)
            trainer.save(out)
            return trainer.steps


def digests(trainer: Trainer) -> list[int]:
    """Of the weights, their float32 masters, and Adam's two means and step counts, in order."""
    tensors = list(trainer.core.state_dict().values())
    for one in getattr(trainer.optimizer, "chained_optimizers", [trainer.optimizer]):
        adam = one.optimizer
        masters: Sequence[torch.Tensor] = [p for g in adam.param_groups for p in g["params"]]
        for master in masters:
            state = adam.state.get(master) or {}
            zeros = torch.zeros_like(master)
            tensors.append(master.detach())
            tensors += [state.get(key, zeros) for key in ("exp_avg", "exp_avg_sq")]
            tensors.append(torch.as_tensor(state.get("step", 0.0)).reshape(1).float())
    return [int(tensor_digest(tensor)) for tensor in tensors]
