"""GRPO in one file: vLLM samples, Megatron trains, and every importance ratio is exactly 1.

The task is bracket matching. A prompt is a run of opening brackets, the right answer closes them in
order and stops; the reward is 1 for it and 0 for anything else. Each step

1. samples a group of answers to each prompt with the running vLLM engine,
2. computes their logprobs again in Megatron's forward pass, for the clipped GRPO objective
   (DeepSeekMath, 2024, equation 3, without the KL term), and asserts that they have the engine's
   bits: the ratio of the two policies is exactly 1.0,
3. takes one optimizer step,
4. sends the new weights into the engine, in place, under a name that comes back with every answer.

With `--behind` an answer is trained on later, when the weights have moved on. Then 2 is done while
the trainer has the weights that the answer names: what its ratio is off by is staleness alone.

    python examples/grpo/grpo.py OUT                  isomodels on both sides
    python examples/grpo/grpo.py OUT --engine vllm    vLLM's own model: stops at the first step
    python examples/grpo/grpo.py OUT --resume         goes on where a killed run stopped
    python examples/grpo/grpo.py OUT --behind 1       trains on rollouts of the weights before
"""

import argparse
import gc
import hashlib
import json
import os
import random
import time
from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import torch
from command_line import cut_log, die_with_parent, run
from rich import print
from rich.progress import track
from torch import Tensor

from isomodels.errors import IsoError

# Token ids: 0 ends an answer, 1 begins a prompt, 2 to 4 open a bracket, 5 to 7 close it.
END, BEGIN, OPEN, KINDS = 0, 1, 2, 3
MOST = 6  # brackets
CLIP = 0.2  # a ratio counts up to 1 + CLIP and down to 1 - CLIP
SIZES = {"vocab_size": 512, "intermediate_size": 256, "num_hidden_layers": 2}
SIZES |= {"rope_theta": 10000.0, "max_position_embeddings": 256}  # the rest as parity's tiny model


class RatioError(IsoError):
    """The trainer's logprobs are not those that the engine sampled with."""


def make_prompt(source: random.Random) -> list[int]:
    """BEGIN and two to MOST opening brackets."""
    return [BEGIN, *(OPEN + source.randrange(KINDS) for _ in range(source.randint(2, MOST)))]


def solve(prompt: Sequence[int]) -> list[int]:
    """The right answer: every bracket closed in order, then END."""
    return [*(token + KINDS for token in reversed(prompt[1:])), END]


def reward(prompt: Sequence[int], answer: Sequence[int]) -> float:
    """1 for the right answer."""
    return float(list(answer) == solve(prompt))


@dataclass
class Sample:
    """One answer."""

    prompt: list[int]
    answer: list[int]
    logprobs: np.ndarray  # [len(answer)] fp32, as the engine sampled
    version: str  # of the weights that the engine sampled with
    reward: float = 0.0
    advantage: float = 0.0  # the reward's distance from its group's mean, in standard deviations


class Rollouts:
    """A vLLM engine in a process of its own.

    Args:
        checkpoint: the weights that it starts with.
        engine: the model that computes: "isomodels", or "vllm" for vLLM's own.
        options, sampling: further arguments of `vllm.LLM` and `vllm.SamplingParams`.
    """

    def __init__(self, checkpoint: Path, engine: str, options: dict, sampling: dict):
        from vllm import LLM

        if engine == "isomodels":
            options = {"weight_transfer_config": {"backend": "isomodels"}, **options}
        self.sampling = {"detokenize": False, **sampling}
        self.llm = LLM(str(checkpoint), model_impl=engine, skip_tokenizer_init=True, **options)

    def sample(self, prompts: Sequence[list[int]], seed: int) -> list[Sample]:
        """One answer to each prompt; the same seed and weights give the same answers."""
        from vllm import SamplingParams

        given = {"temperature": 1.0, "logprobs": 0, **self.sampling}  # of the sampled token alone
        seeds = range(seed * len(prompts), (seed + 1) * len(prompts))
        params = [SamplingParams(seed=one, **given) for one in seeds]
        inputs = [{"prompt_token_ids": prompt} for prompt in prompts]
        outputs = self.llm.generate(inputs, params, use_tqdm=False)
        samples = []
        for prompt, output in zip(prompts, outputs, strict=True):
            answer = output.outputs[0]
            rows = zip(answer.logprobs, answer.token_ids, strict=True)
            logprobs = np.asarray([row[token].logprob for row, token in rows], np.float32)
            (span,) = answer.weight_versions  # no sync while an answer grows
            samples.append(Sample(prompt, list(answer.token_ids), logprobs, span.version))
        return samples


@dataclass
class Update:
    """What one optimizer step saw."""

    loss: float
    grad_norm: float
    new: np.ndarray  # [answered tokens] fp32 logprobs: the trainer's before the step
    old: np.ndarray  # the same: the engine's


def clipped_loss(new: Tensor, old: Tensor, advantage: Tensor) -> Tensor:
    """The objective, negated and summed over tokens; all arguments [n]."""
    ratio = torch.exp(new - old)
    clipped = ratio.clamp(1 - CLIP, 1 + CLIP)
    return -torch.minimum(ratio * advantage, clipped * advantage).sum()


@dataclass
class Policy:
    """A Megatron model with DDP and distributed optimizer, and what sends its weights."""

    trainer: Any
    sender: Any = None
    behind: int = 0  # steps between rollout and update

    @property
    def version(self) -> str:
        """Name of the weights."""
        return f"step {self.trainer.steps}"

    def send(self) -> None:
        """Take the weights into the engine."""
        if self.sender is not None:
            self.sender.send(self.trainer.weights(), self.version)

    def save(self, folder: Path) -> None:
        """Write what a later run goes on from."""
        self.trainer.save(folder)

    def verify(self, samples: Sequence[Sample]) -> None:
        """Raise `RatioError` unless the samples have our logprobs by the weights that they name."""
        if names := {sample.version for sample in samples} - {self.version}:
            raise RatioError(f"rollouts of {names.pop()!r}, but the trainer is at {self.version!r}")
        rows = self.trainer.score([[*s.prompt, *s.answer] for s in samples])
        answers = [row[len(s.prompt) - 1 :] for s, row in zip(samples, rows, strict=True)]
        old = np.concatenate([sample.logprobs for sample in samples])
        assert_ratio_one(torch.cat(answers).cpu().numpy(), old, self.version)

    def update(self, samples: Sequence[Sample]) -> Update:
        """One step on the clipped objective, averaged over all answered tokens."""
        from megatron.core.pipeline_parallel import get_forward_backward_func

        from isomodels.megatron.packing import pack

        trainer = self.trainer
        device = next(trainer.core.parameters()).device
        packs = pack([[*s.prompt, *s.answer] for s in samples], trainer.max_tokens, device)
        batches = list(zip(packs, targets_of(samples, packs), strict=True))
        seen: list[tuple[Tensor, ...]] = []

        def forward_step(data: Iterator[Any], model: Any) -> tuple[Tensor, Any]:
            one, (old, advantage, answered) = next(data)

            def objective(loss: Tensor) -> tuple[Tensor, Tensor, dict[str, Any]]:
                new = -loss.view(-1)[answered]  # the model gives -logprob of each target, [1, T]
                total = clipped_loss(new, old[answered], advantage[answered])
                seen.append((total.detach()[None], new.detach(), old[answered]))
                return total, answered.sum(dtype=torch.int), {}

            kwargs = {"labels": one.targets, "packed_seq_params": one.params}
            return model(one.input_ids, None, None, **kwargs), objective

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
        losses, new, old = (torch.cat(parts).cpu().numpy() for parts in zip(*seen, strict=True))
        if not self.behind:
            assert_ratio_one(new, old, self.version)
        updated, grad_norm, _ = trainer.optimizer.step()
        if not updated:
            raise RuntimeError("a gradient is not finite")
        trainer.steps += 1
        return Update(losses.sum(dtype=np.float64) / len(new), float(grad_norm), new, old)


def targets_of(samples: Sequence[Sample], packs: Any) -> Iterator[tuple[Tensor, ...]]:
    """For each microbatch [T]: the engine's logprob, the advantage, whether it was answered."""
    rest = iter(samples)
    for one in packs:
        columns = torch.zeros(3, one.input_ids.numel())
        for start, _ in one.bounds:
            sample = next(rest)
            first = start + len(sample.prompt) - 1  # its target is the first answered token
            place = slice(first, first + len(sample.answer))
            columns[0, place] = torch.from_numpy(sample.logprobs)
            columns[1, place], columns[2, place] = sample.advantage, 1.0
        old, advantage, answered = columns.to(one.input_ids.device)
        yield old, advantage, answered.bool()


def differing(new: np.ndarray, old: np.ndarray) -> tuple[int, np.ndarray]:
    """How many logprobs differ in a bit, and all distances in fp64."""
    return int((new.view(np.int32) != old.view(np.int32)).sum()), abs(new.astype(np.float64) - old)


def assert_ratio_one(new: np.ndarray, old: np.ndarray, version: str) -> None:
    """Raise `RatioError` unless every ratio is 1.0: the two logprobs have the same bits."""
    differ, distances = differing(new, old)
    if differ or (np.exp(new - old) != 1.0).any():
        raise RatioError(
            f"{version}: {differ} of {len(new)} logprobs differ between engine and trainer, "
            f"on average by {distances.mean():.1e}, at most by {distances.max():.1e}"
        )


def advantages(samples: Sequence[Sample], group: int) -> None:
    """Set each sample's advantage within its group of answers to one prompt."""
    for start in range(0, len(samples), group):
        one = samples[start : start + group]
        rewards = np.array([sample.reward for sample in one])
        for sample in one:
            sample.advantage = float((sample.reward - rewards.mean()) / (rewards.std() + 1e-6))


def make_base(folder: Path, dtype: str, steps: int) -> Path:
    """A small model that saw solved examples for so many steps: it answers some prompts rightly."""
    from isomodels.megatron import Trainer
    from isomodels.parity.checkpoints import random_checkpoint, tiny_config

    raw, source = tiny_config("Qwen3ForCausalLM") | SIZES, random.Random(0)
    start = random_checkpoint(folder / "random", raw, dtype, seed=0)
    with Trainer(start, dtype=getattr(torch, dtype), lr=2e-3) as trainer:
        for _ in track(range(steps), "supervised start", transient=True):
            prompts = [make_prompt(source) for _ in range(32)]
            trainer.step([[*prompt, *solve(prompt)] for prompt in prompts])
        trainer.save_hf(folder / "base")
    return folder / "base"


def base_model(args: argparse.Namespace) -> Path:
    """The checkpoint that both sides start from."""
    base = args.checkpoint or args.out / "base"
    if args.checkpoint or (args.resume and base.is_dir()):
        return base
    return make_base(args.out, args.dtype, args.warm_up)


def start_engine(args: argparse.Namespace, checkpoint: Path, engine: str) -> Rollouts:
    """The engine shares the device with the trainer, and answers are short."""
    os.environ.setdefault("VLLM_CPU_KVCACHE_SPACE", "1")  # GiB
    os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")
    os.environ.setdefault("VLLM_WORKER_MULTIPROC_METHOD", "spawn")
    options = {"dtype": args.dtype, "max_model_len": 64, "gpu_memory_utilization": 0.3}
    options["use_tqdm_on_load"] = False  # the stock pair loads anew at each step
    if args.device == "cpu":  # where vLLM's sampler takes no seed of a prompt in chunks
        options |= {"enforce_eager": True, "enable_chunked_prefill": False}
        options["enable_prefix_caching"] = False  # which a hybrid has with chunks alone
    return Rollouts(checkpoint, engine, options, {"max_tokens": MOST + 3, "stop_token_ids": [END]})


def train(args: argparse.Namespace) -> None:
    """Put the two sides together and run the loop."""
    from isomodels.contract import contract_of
    from isomodels.megatron import Trainer
    from isomodels.sync import WeightSender
    from isomodels.vllm import LLMSyncClient

    base, dtype = base_model(args), getattr(torch, args.dtype)
    rollouts = start_engine(args, base, args.engine)
    with Trainer(base, dtype=dtype, lr=args.lr, recompute=True) as trainer:
        if args.resume and (args.out / "state").is_dir():
            trainer.load(args.out / "state")
        policy = Policy(trainer, behind=args.behind)
        if args.engine == "isomodels":
            # Contracts are compared here, before the first weight is sent.
            contract = contract_of(base, args.device, dtype=dtype)
            policy.sender = WeightSender(LLMSyncClient(rollouts.llm), contract)
            policy.send()
        loop(args, trainer.steps, rollouts, policy)


def loop(args: argparse.Namespace, first: int, rollouts: Rollouts, policy: Any) -> None:
    """Rollouts, update, sync; one line of the log a step."""
    waiting: deque[list[Sample]] = deque()
    log = args.out / "log.jsonl"
    cut_log(log, first)
    # A full collection walks every object of torch, vLLM and Megatron, for half a second, and a
    # large rollout makes enough new ones for it: what exists by now is left to no collection.
    gc.collect()
    gc.freeze()
    for step in track(range(first, args.steps), "steps"):
        source = random.Random(f"{args.seed} {step}")
        drawn = [make_prompt(source) for _ in range(args.prompts)]
        prompts = [prompt for prompt in drawn for _ in range(args.group)]
        times = [time.perf_counter()]
        samples = rollouts.sample(prompts, args.seed + step)
        times.append(time.perf_counter())
        for sample in samples:
            sample.reward = reward(sample.prompt, sample.answer)
        advantages(samples, args.group)
        if args.behind:  # while the trainer has the weights that they were sampled with
            policy.verify(samples)
        waiting.append(samples)
        if len(waiting) <= args.behind:
            continue
        samples = waiting.popleft()
        result = policy.update(samples)
        times.append(time.perf_counter())
        policy.send()
        times.append(time.perf_counter())
        line = describe(step, samples, result, times)
        with log.open("a") as file:
            file.write(json.dumps(line) + "\n")
        policy.save(args.out / "state")
        print("step {step}: reward {reward:.2f}, {differ} of {tokens} ratios not 1".format(**line))


def describe(
    step: int, samples: Sequence[Sample], update: Update, times: Sequence[float]
) -> dict[str, Any]:
    """A step's line of the log."""
    generation, training, sync = (end - start for start, end in pairwise(times))
    differ, distances = differing(update.new, update.old)
    bits = b"".join(np.int64(s.answer).tobytes() + s.logprobs.tobytes() for s in samples)
    return {
        "step": step,
        "weights": samples[0].version,
        "rollouts": hashlib.sha256(bits).hexdigest(),
        "reward": float(np.mean([sample.reward for sample in samples])),
        "tokens": len(update.new),
        "differ": differ,
        "mean_difference": float(distances.mean()),
        "max_difference": float(distances.max()),
        "clipped": float((abs(np.exp(update.new - update.old) - 1) > CLIP).mean()),
        "loss": update.loss,
        "grad_norm": update.grad_norm,
        "seconds": {"generation": generation, "training": training, "sync": sync},
    }


if __name__ == "__main__":
    run(train, __doc__)
elif __name__ == "__mp_main__":  # a process of the engine, which imports this file anew
    die_with_parent()
