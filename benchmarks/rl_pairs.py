"""What the RL row compares: an engine and a trainer that share a GPU, ours and a stock pair.

Each runs in a process of its own, which does what `benchmarks.rl_step` asks for.
"""

import gc
import json
import os
import random
import sys
import tempfile
import time
import traceback
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from multiprocessing.connection import Client
from pathlib import Path
from typing import Any

import torch

from benchmarks.engine import ROOT, decode_step_ms, scratch
from benchmarks.served import STOCK_HYBRID
from benchmarks.sync import TimedClient
from isomodels.config import load_config_dict, read_config

sys.path.insert(0, str(ROOT / "examples" / "grpo"))
import grpo

PARTS = ("generation", "training", "sync", "step")
WARM = 1_000_000  # seeds of samples that are not timed


@dataclass(frozen=True)
class Work:
    """What is trained and how.

    Attributes:
        model: folder of a config.json.
        overrides: of it.
        prompts, group: prompts of a step, and answers to each.
        tokens_in, tokens_out: lengths of both.
        max_tokens: of a microbatch.
        rounds: generations of each engine alone.
        warm_up, steps: steps before the timed ones, and timed.
        cache_gib: memory of the engine's cache.
        profile: say which kernels a decode step runs.
    """

    model: str
    overrides: tuple[tuple[str, Any], ...] = ()
    prompts: int = 32
    group: int = 8
    tokens_in: int = 256
    tokens_out: int = 256
    max_tokens: int = 8192
    rounds: int = 5
    warm_up: int = 2
    steps: int = 5
    cache_gib: float = 12.0
    profile: bool = False
    device: str = "cuda"

    @property
    def raw(self) -> dict[str, Any]:
        """Content of config.json."""
        return load_config_dict(Path(self.model)) | dict(self.overrides)

    @property
    def smaller(self) -> "Work":
        """One microbatch of a model with the same kernels and less memory."""
        fewer = {name: 32 for name in ("num_experts",) if name in self.raw}
        layers = min(4, self.raw["num_hidden_layers"])
        overrides = dict(self.overrides) | fewer | {"num_hidden_layers": layers}
        length = self.tokens_in + self.tokens_out
        return replace(
            self,
            overrides=tuple(overrides.items()),
            prompts=max(1, self.max_tokens // length),
            group=1,
        )


class Pair:
    """An engine and a trainer."""

    name = ""
    sync_failed = ""

    def __init__(self, checkpoint: Path, work: Work):
        self.checkpoint, self.work = checkpoint, work
        self.sync_calls: dict[str, float] = {}

    def start_engine(self) -> dict[str, Any]:
        """Start the engine and sample once; what it chose."""
        work = self.work
        options: dict[str, Any] = {
            "dtype": "bfloat16",
            "max_model_len": work.tokens_in + work.tokens_out,
            "max_num_seqs": work.prompts * work.group,
            "seed": 0,
            "worker_extension_cls": "benchmarks.engine_worker.StepWatch",
            **self.engine_options(),
        }
        if work.device == "cuda":
            options["gpu_memory_utilization"] = 0.02  # only asked to be free at the start
            options["kv_cache_memory_bytes"] = int(work.cache_gib * 2**30)
        else:  # a rehearsal; seeds as in grpo.start_engine, and a hybrid's cache needs chunks
            options |= {"enforce_eager": True, "enable_chunked_prefill": False}
            options["enable_prefix_caching"] = False
        sampling = {"max_tokens": work.tokens_out, "ignore_eos": True}
        engine = "isomodels" if self.name == "ours" else "vllm"
        self.rollouts = grpo.Rollouts(self.checkpoint, engine, options, sampling)
        (chosen,) = self.rollouts.llm.collective_rpc("chosen")
        self.rollouts.llm.collective_rpc("watch_steps")
        self.samples(WARM)
        return json.loads(chosen)

    def engine_options(self) -> dict[str, Any]:
        """Arguments of `vllm.LLM` for this pair."""
        return {}

    def start_trainer(self) -> str:
        """Make the trainer; its name."""
        raise NotImplementedError

    def update(self, samples: Sequence[grpo.Sample]) -> grpo.Update:
        """One optimizer step."""
        raise NotImplementedError

    def send(self) -> None:
        """Weights into the engine."""
        raise NotImplementedError

    def samples(self, seed: int) -> list[grpo.Sample]:
        """Rollouts of random prompts; reward: the last token's id is even."""
        work, source = self.work, random.Random(seed)
        vocabulary = range(work.raw["vocab_size"])
        drawn = [source.choices(vocabulary, k=work.tokens_in) for _ in range(work.prompts)]
        prompts = [prompt for prompt in drawn for _ in range(work.group)]
        return self.rollouts.sample(prompts, seed)

    def step(self, seed: int) -> dict[str, Any]:
        """One step of the loop: seconds of its parts, and what it compared."""
        leave_heap_alone()
        llm = self.rollouts.llm
        llm.collective_rpc("take_steps")
        times = [time.perf_counter()]
        samples = self.samples(seed)
        for sample in samples:
            sample.reward = float(sample.answer[-1] % 2 == 0)
        grpo.advantages(samples, self.work.group)
        times.append(time.perf_counter())
        update = self.update(samples)
        synchronize(self.work)
        times.append(time.perf_counter())
        self.send()
        synchronize(self.work)
        times.append(time.perf_counter())
        (steps,) = llm.collective_rpc("take_steps")
        decode = decode_step_ms(json.loads(steps), self.work.prompts * self.work.group)
        differ, distances = grpo.differing(update.new, update.old)
        if self.name == "ours":
            grpo.assert_ratio_one(update.new, update.old, seed)
        seconds = [b - a for a, b in zip(times, [*times[1:], times[0]], strict=True)]
        return {
            **dict(zip(PARTS, [*seconds[:3], -seconds[3]], strict=True)),
            "compared": len(update.new),
            "differ": differ,
            "mean_difference": float(distances.mean()),
            "max_difference": float(distances.max()),
            "loss": update.loss,
            "grad_norm": update.grad_norm,
            "decode_step_ms": decode,
            "sync_calls": self.sync_calls,
            **({"sync_failed": self.sync_failed} if self.sync_failed else {}),
        }

    def generate(self, seed: int) -> dict[str, float]:
        """Rollouts alone: seconds, and milliseconds of a decode step of all answers."""
        leave_heap_alone()
        llm = self.rollouts.llm
        llm.collective_rpc("take_steps")
        begin = time.perf_counter()
        self.samples(seed)
        seconds = time.perf_counter() - begin
        (steps,) = llm.collective_rpc("take_steps")
        decode = decode_step_ms(json.loads(steps), self.work.prompts * self.work.group)
        return {"generation": seconds, "decode_step_ms": decode}

    def profile(self) -> dict[str, Any]:
        """Kernels of a decode step of all answers at once (`harness.kernels_of`)."""
        llm, requests = self.rollouts.llm, self.work.prompts * self.work.group
        llm.collective_rpc("profile_steps", args=(requests, requests, 8, 8))
        self.samples(WARM + 1)
        (profile,) = llm.collective_rpc("take_profile")
        return json.loads(profile)

    def warm(self) -> str:
        """Compile the trainer's kernels: one update on made-up answers, without an engine."""
        work, source = self.work, random.Random(0)
        name = self.start_trainer()
        vocabulary = range(work.raw["vocab_size"])
        logprobs = torch.zeros(work.tokens_out).numpy()
        samples = []
        for number in range(work.prompts):
            prompt, answer = (
                source.choices(vocabulary, k=k) for k in (work.tokens_in, work.tokens_out)
            )
            samples.append(grpo.Sample(prompt, answer, logprobs, "", advantage=(-1.0) ** number))
        self.update_on_made_up(samples)
        return name

    def update_on_made_up(self, samples: Sequence[grpo.Sample]) -> None:
        """One optimizer step on answers that are no engine's."""
        self.update(samples)


class Ours(Pair):
    name = "ours"

    def start_trainer(self) -> str:
        from isomodels.megatron import Trainer, check_megatron

        self.trainer = Trainer(
            self.checkpoint, dtype=torch.bfloat16, lr=1e-6, max_tokens=self.work.max_tokens
        )
        for group in self.trainer.optimizer.param_groups:
            group.update(fused=True, foreach=False)  # Megatron leaves the choice to torch
        self.policy = grpo.Policy(self.trainer)
        return f"megatron-core {check_megatron()}"

    def connect(self) -> None:
        from isomodels.contract import contract_of
        from isomodels.sync import WeightSender
        from isomodels.vllm import LLMSyncClient

        contract = contract_of(self.checkpoint, self.work.device, dtype=torch.bfloat16)
        self.client = TimedClient(LLMSyncClient(self.rollouts.llm))
        self.policy.sender = WeightSender(self.client, contract)

    def update(self, samples: Sequence[grpo.Sample]) -> grpo.Update:
        return self.policy.update(samples)

    def update_on_made_up(self, samples: Sequence[grpo.Sample]) -> None:
        self.policy.behind = 1  # there is no ratio to assert
        self.update(samples)

    def send(self) -> None:
        if self.policy.sender is None:
            self.connect()
        self.client.seconds.clear()
        begin = time.perf_counter()
        self.policy.send()
        rest = time.perf_counter() - begin - sum(self.client.seconds.values())
        self.sync_calls = {**self.client.seconds, "digests and handles": rest}


class Stock(Pair):
    name = "stock"
    transfer: Any = None

    def engine_options(self) -> dict[str, Any]:
        if self.work.device != "cuda":
            return {}
        hybrid = read_config(self.checkpoint)[0].family == "hybrid"
        return {"weight_transfer_config": {"backend": "ipc"}, **(STOCK_HYBRID if hybrid else {})}

    def start_trainer(self) -> str:
        from benchmarks.rl_stock import StockTrainer

        self.trainer = StockTrainer(self.checkpoint, 1e-6, self.work.max_tokens, self.work.device)
        return self.trainer.name

    def update(self, samples: Sequence[grpo.Sample]) -> grpo.Update:
        return grpo.Update(*self.trainer.update(samples, grpo.clipped_loss))

    def send(self) -> None:
        llm = self.rollouts.llm
        if self.work.device != "cuda":  # a rehearsal
            with tempfile.TemporaryDirectory(dir=scratch()) as folder:
                path = Path(folder) / "weights"
                self.write(path)
                llm.collective_rpc("reload_weights", kwargs={"weights_path": str(path)})
        elif not self.sync_failed:
            try:
                self.transfer = self.transfer or self.connect()
                self.transfer.send_weights()
            except Exception:  # the rest of a step can still be compared
                self.sync_failed = traceback.format_exc()[-600:]
                print(self.sync_failed, flush=True)
        llm.reset_prefix_cache()

    def connect(self) -> Any:
        from vllm.distributed.weight_transfer.ipc_engine import (
            IPCTrainerInitInfo,
            IPCTrainerWeightTransferEngine,
        )

        return IPCTrainerWeightTransferEngine.trainer_init(
            IPCTrainerInitInfo(rank=0),
            client=stock_client(self.rollouts.llm),
            source=_Source(self.trainer),
        )

    def write(self, folder: Path) -> None:
        from isomodels.weights_conv.write import write_checkpoint

        tensors = {name: tensor.contiguous() for name, tensor in self.trainer.weights()}
        write_checkpoint(folder, tensors, small_files=self.checkpoint)


def stock_client(llm: Any) -> Any:
    """vLLM's calls, as our client has them, without the comparison of contracts."""
    from isomodels.vllm import LLMSyncClient

    class StockClient(LLMSyncClient):
        def init_weight_transfer_engine(self, init_info: dict[str, Any]) -> None:
            self.llm.init_weight_transfer_engine({"init_info": init_info})

    return StockClient(llm)


class _Source:
    """The stock trainer's weights, as vLLM's transfer iterates them."""

    def __init__(self, trainer: Any):
        self.trainer = trainer

    def __iter__(self) -> Iterator[tuple[str, torch.Tensor]]:
        return self.trainer.weights()


PAIRS: dict[str, type[Pair]] = {"ours": Ours, "stock": Stock}


def leave_heap_alone() -> None:
    """Collect garbage now, and nothing that exists by now ever again.

    Some 600,000 objects of torch and vLLM live in a process that samples, and the answers of one
    or two steps are enough for Python to walk them all, which takes some tenths of a second, in
    some steps and not in others. vLLM's engine and server do the same at their start.
    """
    gc.collect()
    gc.freeze()


def synchronize(work: Work) -> None:
    if work.device == "cuda":
        torch.cuda.synchronize()


def memory() -> dict[str, float]:
    """GiB of the trainer's process at its highest."""
    if not torch.cuda.is_available():
        return {}
    return {"allocated": torch.cuda.max_memory_allocated() / 2**30}


def serve(name: str, checkpoint: Path, work: Work, address: str) -> None:
    """Do what the driver asks: the name of a method and its arguments, then its result.

    `RL_STOCK_TRITON` may name a folder with the Triton that flash-linear-attention needs.
    """
    own = os.environ.get(f"RL_{name.upper()}_TRITON")
    if own:  # of this process alone: vLLM's keeps the usual one
        sys.path.insert(0, own)
        import triton  # noqa: F401

        sys.path.remove(own)
    pair = PAIRS[name](checkpoint, work)
    with Client(address, "AF_UNIX") as connection:
        while True:
            try:
                method, *arguments = connection.recv()
            except EOFError:
                return
            begin = time.perf_counter()
            try:
                result = getattr(pair, method)(*arguments)
                connection.send((True, result, time.perf_counter() - begin, memory()))
            except Exception:  # the driver tells it, and the others go on
                connection.send((False, traceback.format_exc(), 0.0, {}))
