"""GRPO in one file: vLLM samples, Megatron trains, and every importance ratio is exactly 1.

The task is bracket matching. A prompt is a run of opening brackets, the right answer closes them in
order and stops; the reward is 1 for it and 0 for anything else. Each step

1. samples a group of answers to each prompt with the running vLLM engine,
2. computes their logprobs again in Megatron's forward pass and asserts that they have the engine's
   bits, so that the ratio of the two policies is exactly 1.0 before the update,
3. takes one optimizer step on the clipped GRPO objective (DeepSeekMath, 2024, equation 3, without
   the KL term),
4. sends the new weights into the engine, in place.

    python examples/grpo/grpo.py OUT                  isomodels on both sides
    python examples/grpo/grpo.py OUT --engine vllm    vLLM's own model: stops at the first step
    python examples/grpo/grpo.py OUT --resume         goes on where a killed run stopped
"""

import argparse
import json
import os
import random
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import torch
from rich.progress import track
from torch import Tensor

# Token ids: 0 ends an answer, 1 begins a prompt, 2 to 4 open a bracket, 5 to 7 close it.
END, BEGIN, OPEN, KINDS = 0, 1, 2, 3
CONFIG = {
    "architectures": ["Qwen3ForCausalLM"],
    "model_type": "qwen3",
    "vocab_size": 512,
    "hidden_size": 128,
    "intermediate_size": 256,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "hidden_act": "silu",
    "attention_bias": False,
    "rms_norm_eps": 1e-6,
    "rope_theta": 10000.0,
    "max_position_embeddings": 256,
    "tie_word_embeddings": False,
    "eos_token_id": END,
}


class RatioError(RuntimeError):
    """The trainer's logprobs are not those that the engine sampled with."""


# The task


def make_prompt(source: random.Random, most: int = 6) -> list[int]:
    """BEGIN and two to `most` opening brackets."""
    return [BEGIN, *(OPEN + source.randrange(KINDS) for _ in range(source.randint(2, most)))]


def solve(prompt: Sequence[int]) -> list[int]:
    """The right answer: every bracket closed in order, then END."""
    return [*(token + KINDS for token in reversed(prompt[1:])), END]


@dataclass
class Sample:
    """One answer.

    Attributes:
        prompt, answer: token ids.
        logprobs: fp32, of the answer's tokens, as the engine sampled them.
        version: of the weights that the engine sampled with.
        advantage: the reward's distance from its group's mean, in standard deviations.
    """

    prompt: list[int]
    answer: list[int]
    logprobs: np.ndarray
    version: str
    advantage: float = 0.0

    @property
    def reward(self) -> float:
        """1 for the right answer."""
        return float(self.answer == solve(self.prompt))


# The engine


class Rollouts:
    """A vLLM engine in a process of its own."""

    def __init__(self, checkpoint: Path, engine: str, dtype: str, options: dict[str, Any]):
        from vllm import LLM

        ours = engine == "isomodels"
        self.llm = LLM(
            model=str(checkpoint),
            model_impl=engine,
            dtype=dtype,
            skip_tokenizer_init=True,
            weight_transfer_config={"backend": "isomodels"} if ours else None,
            **options,
        )

    def sample(self, prompts: Sequence[list[int]], seed: int, version: str) -> list[Sample]:
        """One answer to each prompt; the same seed and weights give the same answers."""
        from vllm import SamplingParams

        params = [
            SamplingParams(
                temperature=1.0,
                logprobs=0,  # that of the sampled token
                max_tokens=max(map(len, prompts)) + 2,
                stop_token_ids=[END],
                seed=seed * len(prompts) + number,
                detokenize=False,
            )
            for number in range(len(prompts))
        ]
        inputs = [{"prompt_token_ids": prompt} for prompt in prompts]
        outputs = self.llm.generate(inputs, params, use_tqdm=False)
        samples = []
        for prompt, output in zip(prompts, outputs, strict=True):
            answer = output.outputs[0]
            rows = zip(answer.logprobs, answer.token_ids, strict=True)
            chosen = [row[token].logprob for row, token in rows]
            logprobs = np.asarray(chosen, np.float32)
            samples.append(Sample(prompt, list(answer.token_ids), logprobs, version))
        return samples


# The trainer


@dataclass
class Update:
    """What one optimizer step saw.

    Attributes:
        loss, grad_norm: of the objective.
        differences: |trainer's logprob - engine's| of every answered token.
        ratios: exp of the signed difference: the importance ratio before the update.
    """

    loss: float
    grad_norm: float
    differences: np.ndarray
    ratios: np.ndarray


@dataclass
class Policy:
    """A Megatron model with DDP, distributed optimizer, recomputation; a ratio counts to `clip`."""

    trainer: Any
    clip: float = 0.2
    _seen: list[tuple[np.ndarray, np.ndarray]] = field(default_factory=list)

    def update(self, samples: Sequence[Sample]) -> Update:
        """One step on the clipped objective, averaged over all answered tokens."""
        from megatron.core.pipeline_parallel import get_forward_backward_func

        from isomodels.megatron.packing import pack

        trainer = self.trainer
        device = next(trainer.core.parameters()).device
        sequences = [[*s.prompt, *s.answer] for s in samples]
        packs = pack(sequences, trainer.max_tokens, device)
        batches = list(zip(packs, self._targets(samples, packs), strict=True))
        self._seen, losses = [], []

        def forward_step(data: Iterator[Any], model: Any) -> tuple[Tensor, Any]:
            one, (old, advantage, answered) = next(data)
            # Megatron's model gives -logprob of each target, [1, T]
            loss = model(
                one.input_ids, None, None, labels=one.targets, packed_seq_params=one.params
            )
            return loss, lambda loss: self._objective(loss, old, advantage, answered, losses)

        trainer.ddp.zero_grad_buffer()
        trainer.optimizer.zero_grad()
        get_forward_backward_func()(
            forward_step_func=forward_step,
            data_iterator=[iter(batches)],
            model=[trainer.ddp],
            num_microbatches=len(batches),
            seq_length=trainer.max_tokens,
            micro_batch_size=1,
            forward_only=False,
        )
        updated, grad_norm, _ = trainer.optimizer.step()
        if not updated:
            raise RuntimeError("a gradient is not finite")
        trainer.steps += 1
        new, old = (np.concatenate(parts) for parts in zip(*self._seen, strict=True))
        signed = new.astype(np.float64) - old
        count = len(signed)
        return Update(sum(losses) / count, float(grad_norm), abs(signed), np.exp(signed))

    def _targets(self, samples: Sequence[Sample], packs: Any) -> Iterator[tuple[Tensor, ...]]:
        """For each microbatch [T]: the engine's logprob, the advantage, whether it was answered."""
        rest = iter(samples)
        for one in packs:
            old = torch.zeros(one.input_ids.numel())
            advantage, answered = torch.zeros_like(old), torch.zeros_like(old, dtype=torch.bool)
            for start, _ in one.bounds:
                sample = next(rest)
                first = start + len(sample.prompt) - 1  # its target is the first answered token
                place = slice(first, first + len(sample.answer))
                old[place] = torch.from_numpy(sample.logprobs)
                advantage[place] = sample.advantage
                answered[place] = True
            yield old, advantage, answered

    def _objective(
        self, loss: Tensor, old: Tensor, advantage: Tensor, answered: Tensor, losses: list[float]
    ) -> tuple[Tensor, Tensor, dict[str, Any]]:
        new = -loss.view(-1)[answered]
        old, advantage = old.to(new.device)[answered], advantage.to(new.device)[answered]
        self._seen.append((new.detach().cpu().numpy(), old.cpu().numpy()))
        ratio = torch.exp(new - old)
        clipped = ratio.clamp(1 - self.clip, 1 + self.clip)
        total = -torch.minimum(ratio * advantage, clipped * advantage).sum()
        losses.append(float(total.detach()))
        return total, answered.sum(dtype=torch.int), {}


def assert_ratio_one(update: Update, step: int) -> None:
    """Raise `RatioError` unless every ratio is 1.0: the two logprobs have the same bits."""
    differ = int((update.differences != 0).sum())
    if differ or (update.ratios != 1.0).any():
        raise RatioError(
            f"step {step}: {differ} of {len(update.ratios)} logprobs differ between engine and "
            f"trainer, on average by {update.differences.mean():.1e}, at most by "
            f"{update.differences.max():.1e}"
        )


# The loop


def advantages(samples: Sequence[Sample], group: int) -> None:
    """Set each sample's advantage within its group of answers to one prompt."""
    for start in range(0, len(samples), group):
        one = samples[start : start + group]
        rewards = np.array([sample.reward for sample in one])
        for sample, reward in zip(one, rewards, strict=True):
            sample.advantage = float((reward - rewards.mean()) / (rewards.std() + 1e-6))


def make_base(folder: Path, dtype: str, steps: int) -> Path:
    """A small model that has seen solved examples: it answers some prompts rightly, not all."""
    from isomodels.megatron import Trainer
    from isomodels.parity.checkpoints import random_checkpoint

    start, source = random_checkpoint(folder / "random", CONFIG, dtype, seed=0), random.Random(0)
    with Trainer(start, dtype=getattr(torch, dtype), lr=2e-3) as trainer:
        for _ in track(range(steps), "supervised start", transient=True):
            prompts = [make_prompt(source) for _ in range(32)]
            trainer.step([[*prompt, *solve(prompt)] for prompt in prompts])
        trainer.save_hf(folder / "base")
    return folder / "base"


def train(args: argparse.Namespace) -> None:
    """Put the two sides together and run the loop."""
    from isomodels.contract import contract_of
    from isomodels.megatron import Trainer
    from isomodels.sync import WeightSender
    from isomodels.vllm import LLMSyncClient

    base, dtype = base_model(args), getattr(torch, args.dtype)
    rollouts = Rollouts(base, args.engine, args.dtype, engine_options(args))
    with Trainer(base, dtype=dtype, lr=args.lr, recompute=True) as trainer:
        if args.resume and state_of(args).is_dir():
            trainer.load(state_of(args))
        send = None
        if args.engine == "isomodels":
            # Contracts are compared here, before the first weight is sent.
            contract = contract_of(base, args.device, dtype=dtype)
            sender = WeightSender(LLMSyncClient(rollouts.llm), contract)

            def send(version: str) -> None:
                sender.send(trainer.weights(), version)

            send(f"step {trainer.steps}")
        policy = Policy(trainer)
        loop(args, trainer.steps, rollouts, policy.update, send, trainer.save, check=True)


def state_of(args: argparse.Namespace) -> Path:
    """Where a run keeps what it goes on from."""
    return args.out / "state"


def engine_options(args: argparse.Namespace) -> dict[str, Any]:
    """Sizes of the engine, which shares the device with the trainer: answers are short."""
    os.environ.setdefault("VLLM_CPU_KVCACHE_SPACE", "1")  # GiB
    options: dict[str, Any] = {"max_model_len": 64, "gpu_memory_utilization": 0.3}
    if args.device == "cpu":  # where vLLM's sampler takes no seed of a prompt in chunks
        options |= {"enforce_eager": True, "enable_chunked_prefill": False}
    return options


def base_model(args: argparse.Namespace) -> Path:
    """The checkpoint that both sides start from."""
    args.out.mkdir(parents=True, exist_ok=True)
    if args.checkpoint:
        return args.checkpoint
    base = args.out / "base"
    return base if base.is_dir() else make_base(args.out, args.dtype, args.warm_up)


def loop(
    args: argparse.Namespace,
    first: int,
    rollouts: Rollouts,
    update: Callable[[Sequence[Sample]], Update],
    send: Callable[[str], None] | None,
    save: Callable[[Path], None],
    *,
    check: bool,
) -> None:
    """Rollouts, update, check that every ratio is 1, sync; one line of the log a step.

    `send` takes the new weights, named, into the engine; `save` writes the state to a folder.
    """
    with (args.out / "log.jsonl").open("a" if first else "w") as log:
        for step in track(range(first, args.steps), "steps"):
            source = random.Random(f"{args.seed} {step}")
            drawn = [make_prompt(source) for _ in range(args.prompts)]
            prompts = [prompt for prompt in drawn for _ in range(args.group)]
            times = [time.perf_counter()]
            samples = rollouts.sample(prompts, args.seed + step, f"step {step}")
            advantages(samples, args.group)
            times.append(time.perf_counter())
            result = update(samples)
            if check:
                assert_ratio_one(result, step)
            times.append(time.perf_counter())
            if send is not None:
                send(f"step {step + 1}")
            times.append(time.perf_counter())
            save(state_of(args))
            log.write(json.dumps(describe(step, samples, result, times)) + "\n")
            log.flush()


def describe(
    step: int, samples: Sequence[Sample], update: Update, times: Sequence[float]
) -> dict[str, Any]:
    """A step's line of the log."""
    generation, training, sync = (end - start for start, end in pairwise(times))
    return {
        "step": step,
        "weights": samples[0].version,
        "reward": float(np.mean([sample.reward for sample in samples])),
        "tokens": len(update.ratios),
        "differ": int((update.differences != 0).sum()),
        "mean_difference": float(update.differences.mean()),
        "max_difference": float(update.differences.max()),
        "loss": update.loss,
        "grad_norm": update.grad_norm,
        "seconds": {"generation": generation, "training": training, "sync": sync},
    }


def parse() -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("out", type=Path, help="folder for the log, the base model and the state")
    parser.add_argument("--checkpoint", type=Path, help="start here instead of a small new model")
    parser.add_argument("--engine", choices=("isomodels", "vllm"), default="isomodels")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--dtype", choices=("bfloat16", "float32"), default="bfloat16")
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--prompts", type=int, default=16, help="prompts a step")
    parser.add_argument("--group", type=int, default=8, help="answers to a prompt")
    parser.add_argument("--lr", type=float, default=3e-4)
    parser.add_argument("--warm-up", type=int, default=60, help="supervised steps of a new model")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--resume", action="store_true", help="go on from the state in OUT")
    return parser.parse_args()


if __name__ == "__main__":
    train(parse())
