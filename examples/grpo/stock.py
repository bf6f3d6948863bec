"""The same loop on the stock pair: vLLM's own model samples, transformers' model trains.

    python examples/grpo/stock.py OUT

Takes the options of grpo.py. Nothing is asserted: the log shows by how much the two differ.
"""

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch

sys.path.insert(0, str(Path(__file__).parent))

from grpo import Rollouts, Sample, Update, base_model, engine_options, loop, parse, state_of

CLIP = 0.2


class StockPolicy:
    """transformers' model with fp32 master weights and AdamW, as small RL trainers have it."""

    def __init__(self, checkpoint: Path, args: argparse.Namespace):
        from isomodels.parity.stock import load_transformers

        self.dtype, self.checkpoint = getattr(torch, args.dtype), checkpoint
        self.model = load_transformers(checkpoint, self.dtype).to(args.device).train()
        self.master = [p.detach().float().clone() for p in self.model.parameters()]
        self.optimizer = torch.optim.AdamW(self.master, lr=args.lr, weight_decay=0.0)

    def update(self, samples: Sequence[Sample]) -> Update:
        """One step on the clipped objective, averaged over all answered tokens."""
        count = sum(len(sample.answer) for sample in samples)
        signed, total = [], 0.0
        for sample in samples:
            device = next(self.model.parameters()).device
            ids = torch.tensor([*sample.prompt, *sample.answer], device=device)
            logprobs = self.model(ids[None]).logits[0, :-1].float().log_softmax(-1)
            new = logprobs.gather(1, ids[1:, None])[len(sample.prompt) - 1 :, 0]
            difference = new - torch.from_numpy(sample.logprobs).to(device)
            ratio = difference.exp()
            clipped = ratio.clamp(1 - CLIP, 1 + CLIP)
            loss = (
                -torch.minimum(ratio * sample.advantage, clipped * sample.advantage).sum() / count
            )
            loss.backward()
            total += float(loss.detach())
            signed.append(difference.detach().double().cpu().numpy())
        norm = self._step()
        differences = np.concatenate(signed)
        return Update(total, norm, abs(differences), np.exp(differences))

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
        return float(norm)

    def save(self, folder: Path) -> None:
        """Write a checkpoint that vLLM reads."""
        from isomodels.weights_conv.write import write_checkpoint

        tensors = {n: p.detach().contiguous() for n, p in self.model.named_parameters()}
        write_checkpoint(folder, tensors, like=self.checkpoint)


def main(args: argparse.Namespace) -> None:
    """Put the two sides together and run the loop."""
    base = base_model(args)
    options = engine_options(args)
    rollouts: Any = Rollouts(base, "vllm", args.dtype, options)
    policy = StockPolicy(base, args)
    folder = state_of(args)

    def send(version: str) -> None:
        policy.save(folder)
        rollouts.llm.collective_rpc("reload_weights", kwargs={"weights_path": str(folder)})
        rollouts.llm.reset_prefix_cache()

    loop(args, 0, rollouts, policy.update, send, lambda _: None, check=False)


if __name__ == "__main__":
    main(parse())
