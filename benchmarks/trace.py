"""What recording costs (`isomodels.trace`): an engine and a training pass with it and without.

`PYTHONPATH=. python -m benchmarks.trace --config tests/data/configs/qwen3-8b --layers 8` prints one
JSON line a row. Each engine is a process of its own. The recordings of the engine, whose decodes
replay CUDA graphs, and of the bare module are compared too, sound and with one wrong bit.
"""

import argparse
import json
import random
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import torch

from isomodels.batch import Batch
from isomodels.checkpoint import load_checkpoint
from isomodels.config import load_config_dict, read_config
from isomodels.parity.checkpoints import random_checkpoint
from isomodels.trace import Choice, Recording, compare, record
from isomodels.vllm import Engine

REPEATS = 5
FAULT = "model.layers.1.mlp.down_proj"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--config", type=Path, required=True)
    parser.add_argument("--layers", type=int, default=8)
    parser.add_argument("--requests", type=int, default=64)
    parser.add_argument("--prompt", type=int, default=512)
    parser.add_argument("--tokens", type=int, default=128)
    parser.add_argument("--packed", type=int, default=8192, help="tokens of the training pass")
    parser.add_argument("--rows", default="plain,traced,trainer")
    parser.add_argument("--only", choices=["plain", "traced", "trainer"], help=argparse.SUPPRESS)
    parser.add_argument("--checkpoint", type=Path, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.only:
        rows = {"plain": engine_rows, "traced": engine_rows, "trainer": trainer_rows}[args.only]
        rows(args, args.checkpoint)
        return
    device = "cuda" if torch.cuda.is_available() else "cpu"
    with tempfile.TemporaryDirectory() as folder:
        raw = load_config_dict(args.config) | {"num_hidden_layers": args.layers}
        checkpoint = random_checkpoint(Path(folder) / "drawn", raw, "bfloat16", 0, device)
        for only in args.rows.split(","):
            again = [*sys.argv[1:], "--only", only, "--checkpoint", str(checkpoint)]
            done = subprocess.run([sys.executable, "-m", "benchmarks.trace", *again], check=False)
            if done.returncode:
                say(only, failed=done.returncode)


def say(row: str, **values: Any) -> None:
    print(json.dumps({"row": row, **values}), flush=True)


def median(times: list[float]) -> float:
    return sorted(times)[len(times) // 2]


def engine_rows(args: argparse.Namespace, checkpoint: Path) -> None:
    _, config = read_config(checkpoint)
    limits: dict[str, Any] = {
        "max_model_len": args.prompt + args.tokens + 16,
        "max_num_seqs": max(args.requests, 8),
        "max_num_batched_tokens": 8192,
        "enable_prefix_caching": False,
        "skip_tokenizer_init": True,
        "async_scheduling": True,
    }
    if torch.cuda.is_available():
        limits |= {"enforce_eager": False, "gpu_memory_utilization": 0.5}
    traced = args.only == "traced"
    if traced:
        limits["additional_config"] = {"isomodels_trace": True}
    with Engine(checkpoint, dtype="bfloat16", **limits) as engine:
        generate(engine, args, config)
        if not traced:
            seconds = timed(engine, args, config)
            say("engine, plain", seconds=seconds, runner=engine.model_runner)
            return
        say("engine, digests in its graphs, nothing recorded", seconds=timed(engine, args, config))
        for name, positions in (
            ("16 tokens a sequence", f"{args.prompt - 12}:{args.prompt + 4}"),
            ("every token", None),
        ):
            say(f"engine, {name}", **recorded(engine, args, config, positions))
        check(engine, args, config, checkpoint)


def generate(engine: Engine, args: argparse.Namespace, config: Any, count: int = 0) -> list[Any]:
    from vllm import SamplingParams

    source = random.Random(1)
    prompts = [
        {"prompt_token_ids": [source.randrange(config.vocab_size) for _ in range(args.prompt)]}
        for _ in range(count or args.requests)
    ]
    params = SamplingParams(
        max_tokens=args.tokens, ignore_eos=True, logprobs=0, detokenize=False, temperature=1.0
    )
    return engine.llm.generate(prompts, params, use_tqdm=False)


def timed(engine: Engine, args: argparse.Namespace, config: Any) -> float:
    times = []
    for _ in range(REPEATS):
        begin = time.perf_counter()
        generate(engine, args, config)
        times.append(time.perf_counter() - begin)
    return median(times)


def recorded(
    engine: Engine, args: argparse.Namespace, config: Any, positions: str | None
) -> dict[str, Any]:
    times, stops, found = [], [], {}
    with tempfile.TemporaryDirectory() as folder:
        for _ in range(REPEATS):
            engine.llm.collective_rpc("isomodels_trace_start", kwargs={"positions": positions})
            begin = time.perf_counter()
            generate(engine, args, config)
            times.append(time.perf_counter() - begin)
            begin = time.perf_counter()
            found = engine.llm.collective_rpc(
                "isomodels_trace_stop", kwargs={"path": f"{folder}/engine.trace"}
            )[0]
            stops.append(time.perf_counter() - begin)
    return {"seconds": median(times), "seconds_to_write": median(stops), **found}


def check(engine: Engine, args: argparse.Namespace, config: Any, checkpoint: Path) -> None:
    """The engine's recording against the module's: sound, and with a bit of one weight wrong."""
    with tempfile.TemporaryDirectory() as folder:
        paths = [Path(folder) / name for name in ("engine", "sound", "wrong")]
        calls: list[None] = []
        hook = engine._model.register_forward_pre_hook(lambda *_: calls.append(None))
        before = len(engine.steps)
        engine.llm.collective_rpc("isomodels_trace_start")
        made = generate(engine, args, config, count=5)
        steps = len(engine.steps) - before
        hook.remove()
        engine.llm.collective_rpc("isomodels_trace_stop", kwargs={"path": str(paths[0])})
        sequences = [[*one.prompt_token_ids, *one.outputs[0].token_ids] for one in made]
        core = core_on_device(checkpoint)
        run = Run(core, sequences)
        with record(core, paths[1]), torch.no_grad():
            run.forward()
        with torch.no_grad():
            core.get_submodule(FAULT).weight.view(torch.int16)[3, 5] ^= 1
        with record(core, paths[2]), torch.no_grad():
            run.forward()
        left, sound, wrong = map(Recording.load, paths)
    found, faulty = compare(left, sound), compare(left, wrong)
    say("engine against module", tokens=found.tokens, operations=found.operations,
        differing=found.differing, steps=steps, replayed=steps - len(calls))  # fmt: skip
    first = faulty.first
    say("one bit of a weight wrong", differing=faulty.differing, weights=faulty.weights,
        named=first and first.module, operator=first and first.left_operator,
        position=first and first.position)  # fmt: skip


def core_on_device(checkpoint: Path) -> Any:
    return load_checkpoint(checkpoint).to("cuda" if torch.cuda.is_available() else "cpu")


class Run:
    """A module on packed sequences."""

    def __init__(self, core: Any, sequences: list[list[int]]):
        device = core.head_weight.device
        self.core = core
        self.ids = torch.tensor([i for s in sequences for i in s], device=device)
        bounds = torch.tensor([0, *map(len, sequences)], device=device).cumsum(0).int()
        self.positions, self.batch = Batch.positions(bounds), Batch.packed(bounds)

    def forward(self) -> torch.Tensor:
        return self.core(self.ids, self.positions, self.batch)

    def step(self) -> None:
        targets = self.ids.roll(-1)
        self.core.token_logprobs(self.forward(), targets).sum().backward()
        if torch.cuda.is_available():
            torch.cuda.synchronize()


def trainer_rows(args: argparse.Namespace, checkpoint: Path) -> None:
    source = random.Random(2)
    core = core_on_device(checkpoint)
    length = args.packed // 4
    vocab = core.config.vocab_size
    run = Run(core, [[source.randrange(vocab) for _ in range(length)] for _ in range(4)])

    def times() -> float:
        found = []
        for _ in range(REPEATS):
            begin = time.perf_counter()
            run.step()
            found.append(time.perf_counter() - begin)
        return median(found)

    run.step()
    say("forward and backward, plain", seconds=times(), tokens=len(run.ids))
    with tempfile.TemporaryDirectory() as folder:
        for name, text in (("16 tokens a sequence", f"{length - 16}:"), ("every token", None)):
            with record(core, f"{folder}/a", choice=Choice.parse(None, text), logprobs=False):
                run.step()
                seconds = times()
            say(f"forward and backward, {name}", seconds=seconds)


if __name__ == "__main__":
    main()
