"""The same loop on the stock pair: vLLM's own model samples, transformers' model trains.

    python examples/grpo/stock.py OUT

Takes the options of grpo.py. Nothing is asserted: the log shows by how much the two differ.
"""

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import torch

sys.path.insert(0, str(Path(__file__).parent))

from command_line import die_with_parent, run
from grpo import Rollouts, Sample, Update, base_model, clipped_loss, loop, start_engine

from isomodels.errors import IsoError


class StockPolicy:
    """transformers' model with fp32 master weights and AdamW, as small RL trainers have it."""

    def __init__(self, checkpoint: Path, rollouts: Rollouts, args: argparse.Namespace):
        from isomodels.parity.stock import load_transformers

        self.checkpoint, self.rollouts, self.weights = checkpoint, rollouts, args.out / "weights"
        self.steps = 0
        self.model = load_transformers(checkpoint, getattr(torch, args.dtype))
        self.model.to(args.device).train()
        self.master = [p.detach().float().clone() for p in self.model.parameters()]
        self.optimizer = torch.optim.AdamW(self.master, lr=args.lr, weight_decay=0.0)

    def update(self, samples: Sequence[Sample]) -> Update:
        """One step on the clipped objective, averaged over all answered tokens."""
        count = sum(len(sample.answer) for sample in samples)
        device, total, rows = self.model.device, 0.0, []
        for sample in samples:
            ids = torch.tensor([*sample.prompt, *sample.answer], device=device)
            logprobs = self.model(ids[None]).logits[0, :-1].float().log_softmax(-1)
            new = logprobs.gather(1, ids[1:, None])[len(sample.prompt) - 1 :, 0]
            old = torch.from_numpy(sample.logprobs).to(device)
            loss = clipped_loss(new, old, torch.full_like(old, sample.advantage)) / count
            loss.backward()
            total += float(loss.detach())
            rows.append(new.detach().cpu().numpy())
        norm = self._step()
        return Update(
            total, norm, np.concatenate(rows), np.concatenate([s.logprobs for s in samples])
        )

    def _step(self) -> float:
        parameters = list(self.model.parameters())
        norm = torch.nn.utils.clip_grad_norm_(parameters, 1.0)
        for master, parameter in zip(self.master, parameters, strict=True):
            master.grad = parameter.grad.float()
            parameter.grad = None
        self.optimizer.step()
        with torch.no_grad():
            for master, parameter in zip(self.master, parameters, strict=True):
                parameter.copy_(master)
        self.steps += 1
        return float(norm)

    def send(self) -> None:
        """Take the weights into the engine, through a checkpoint that vLLM reads."""
        from isomodels.weights_conv.write import write_checkpoint

        tensors = {n: p.detach().contiguous() for n, p in self.model.named_parameters()}
        write_checkpoint(self.weights, tensors, like=self.checkpoint)
        llm = self.rollouts.llm
        llm.collective_rpc("reload_weights", kwargs={"weights_path": str(self.weights)})
        llm.reset_prefix_cache()
        llm.update_weight_version(f"step {self.steps}")

    def verify(self, samples: Sequence[Sample]) -> None:
        """Nothing is asserted."""

    def save(self, folder: Path) -> None:
        """Nothing goes on from a comparison."""


def main(args: argparse.Namespace) -> None:
    """Put the two sides together and run the loop."""
    if args.resume:
        raise IsoError("stock.py saves no state: leave out --resume")
    base = base_model(args)
    rollouts = start_engine(args, base, "vllm")
    rollouts.llm.update_weight_version("step 0")
    loop(args, 0, rollouts, StockPolicy(base, rollouts, args))


if __name__ == "__main__":
    run(main, __doc__)
elif __name__ == "__mp_main__":  # a process of the engine
    die_with_parent()
