"""Rows of several GPUs: `python -m benchmarks.parallel [--rows a,b] [--out DIR]`.

* parallel linear: a row-parallel linear, its fp32 partial sums exchanged and folded in one order,
  against cuBLAS and NCCL's all-reduce of bfloat16. Both as CUDA graphs, in turns, on every rank.
* exchange: the two ways of `layers.collectives.combine`, by which its threshold is set.
* parallel engine: vLLM with our module against vLLM with its own, both over all GPUs; the two
  serve in turns.

Writes h200_xN.json and h200_xN.md for N GPUs.
"""

import argparse
import json
import math
import os
import random
import sys
import tempfile
import threading
import time
import traceback
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor

from benchmarks.harness import Timing, summary
from isomodels.layers import collectives
from isomodels.layers.parallel import TensorParallel
from isomodels.parity.ranks import Ranks
from isomodels.parity.remote import Remote

HERE = Path(__file__).parent
REPLAYS = 15
TOKENS = (1, 64, 1024, 8192)
SHAPES = ((4096, 4096), (4096, 12288))  # (N, K of all ranks): o and down of Qwen3-8B
MESSAGES = tuple(2**n for n in range(14, 25))  # bytes a rank
LAYERS = 8
LOAD = {"requests": 256, "tokens_in": 256, "tokens_out": 128}
RUNS = 3
ROWS = ("linear", "exchange", "engine")
CACHE_BYTES = 6 * 2**30
VOCAB_SIZE = 151936


class Rank:
    """One of the processes that time together; all call the same methods."""

    def __init__(self) -> None:
        self.on_gpu = torch.cuda.is_available()
        self.device = torch.device("cpu")
        if self.on_gpu:
            self.device = torch.device("cuda", int(os.environ["LOCAL_RANK"]))
            torch.cuda.set_device(self.device)
        dist.init_process_group("nccl" if self.on_gpu else "gloo")
        self.parallel = TensorParallel(dist.get_rank(), dist.get_world_size(), dist.group.WORLD)

    def linear(self, tokens: int, n: int, k: int) -> dict[str, Any]:
        """A row-parallel linear [tokens, k] -> [tokens, n]: times in ms, bytes received."""
        own = k // self.parallel.size
        generator = torch.Generator(self.device).manual_seed(self.parallel.rank)
        draw = {"generator": generator, "device": self.device, "dtype": torch.bfloat16}
        sets = [
            (torch.randn(tokens, own, **draw), torch.randn(n, own, **draw) / math.sqrt(k))
            for _ in range(4)
        ]
        calls = [
            [lambda x=x, w=w: collectives.row_parallel(x, w, self.parallel) for x, w in sets],
            [lambda x=x, w=w: reduced(F.linear(x, w)) for x, w in sets],
            [lambda x=x, w=w: F.linear(x, w) for x, w in sets],
        ]
        received = self.received(calls[0][0])
        ring = 2 * (self.parallel.size - 1) * tokens * n * 2 // self.parallel.size
        names = ("ours", "baseline", "cublas")
        times = dict(zip(names, self.times(calls, 1e-8 * tokens * n * own / 500), strict=True))
        return {**times, "received": received, "ring": ring}

    def exchange(self, nbytes: int) -> dict[str, Any]:
        """fp32 partial sums of so many bytes: gathered whole, or exchanged in slices."""
        x = torch.randn(max(1, nbytes // (4 * 4096)), 4096, device=self.device)
        calls = []
        for small in (1 << 62, -1):

            def call(small: int = small) -> Tensor:
                kept, collectives.SMALL_MESSAGE = collectives.SMALL_MESSAGE, small
                try:
                    fold = collectives.tree
                    return collectives.combine(x, self.parallel, fold, torch.bfloat16)
                finally:
                    collectives.SMALL_MESSAGE = kept

            calls.append([call])
        return dict(zip(("whole", "slices"), self.times(calls, 1e-9 * nbytes), strict=True))

    def times(
        self, contestants: list[list[Callable[[], object]]], about_ms: float
    ) -> list[tuple[float, float]]:
        """Median ms of a call and its spread: graphs of the same number of calls on all ranks."""
        rounds = max(1, min(20, int(2.0 / max(about_ms, 0.02) / len(contestants[0]))))
        if not self.on_gpu:
            rounds = 1  # to see that it runs
        replays = [self.replay(calls, rounds) for calls in contestants]
        samples: list[list[float]] = [[] for _ in contestants]
        for _ in range(REPLAYS if self.on_gpu else 2):
            for replay, times, calls in zip(replays, samples, contestants, strict=True):
                dist.barrier()
                times.append(self.elapsed_ms(replay) / (rounds * len(calls)))
        return [summary(times) for times in samples]

    def replay(self, calls: list[Callable[[], object]], rounds: int) -> Callable[[], object]:
        def run() -> None:
            for _ in range(rounds):
                for call in calls:
                    call()

        run()
        if not self.on_gpu:
            return run
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            run()
        graph.replay()
        torch.cuda.synchronize()
        return graph.replay

    def elapsed_ms(self, run: Callable[[], object]) -> float:
        if not self.on_gpu:
            begin_s = time.perf_counter()
            run()
            return 1e3 * (time.perf_counter() - begin_s)
        torch.cuda.synchronize()
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        run()
        end.record()
        end.synchronize()
        return begin.elapsed_time(end)

    def received(self, call: Callable[[], object]) -> int:
        """Bytes that this rank receives from the others in one call."""
        total, moves = [0], (collectives.all_gather, collectives.all_to_all)

        def gather(x: Tensor, parallel: Any) -> Tensor:
            total[0] += (parallel.size - 1) * x.nbytes
            return moves[0](x, parallel)

        def exchange(x: Tensor, parallel: Any) -> Tensor:
            total[0] += x.nbytes - x[0].nbytes
            return moves[1](x, parallel)

        collectives.all_gather, collectives.all_to_all = gather, exchange  # type: ignore
        try:
            call()
        finally:
            collectives.all_gather, collectives.all_to_all = moves
        return total[0]

    def close(self) -> None:
        dist.destroy_process_group()


def reduced(x: Tensor) -> Tensor:
    """Added over the ranks in place, in the order of the network."""
    dist.all_reduce(x)
    return x


class Served:
    """A vLLM engine over several GPUs, which serves when it is told to."""

    def __init__(self, ours: bool, checkpoint: str, gpus: int):
        from vllm import LLM

        from benchmarks.engine import ENGINE

        arguments: dict[str, Any] = {"model_impl": "isomodels"} if ours else {}
        self.llm = LLM(
            checkpoint,
            **ENGINE,
            **arguments,
            tensor_parallel_size=gpus,
            # the other engine is on the same GPUs
            gpu_memory_utilization=0.1,
            kv_cache_memory_bytes=CACHE_BYTES,
        )
        self.chosen: dict[str, Any] = json.loads(self.llm.collective_rpc("chosen")[0])
        self.llm.collective_rpc("watch_steps")

    def told(self) -> dict[str, Any]:
        """What vLLM chose."""
        return self.chosen

    def generate(self, seed: int, tokens_out: int) -> dict[str, Any]:
        """Seconds to serve fresh prompts, and milliseconds of a decode step of all requests."""
        from vllm import SamplingParams

        from benchmarks.engine import decode_step_ms

        generator = random.Random(seed)
        prompts = [
            {"prompt_token_ids": generator.choices(range(VOCAB_SIZE), k=LOAD["tokens_in"])}
            for _ in range(LOAD["requests"])
        ]
        params = SamplingParams(
            temperature=1.0, max_tokens=tokens_out, ignore_eos=True, logprobs=0, detokenize=False
        )
        self.llm.collective_rpc("take_steps")
        begin = time.perf_counter()
        outputs = self.llm.generate(prompts, params, use_tqdm=False)
        seconds = time.perf_counter() - begin
        if any(len(one.outputs[0].logprobs) != tokens_out for one in outputs):
            raise RuntimeError("a request came back without a token or its logprob")
        steps = json.loads(self.llm.collective_rpc("take_steps")[0])
        return {"seconds": seconds, "step_ms": decode_step_ms(steps, LOAD["requests"])}


def linear_rows(ranks: Ranks, gpus: int) -> Iterator[Timing]:
    for n, k in SHAPES:
        for tokens in TOKENS:
            found = ranks.call("linear", tokens, n, k)
            (ours, spread), (theirs, other) = found["ours"], found["baseline"]
            note = (
                f"received by a rank: {found['received']:,} bytes, {found['ring']:,} in a ring "
                f"of bfloat16 ({found['received'] / found['ring']:.2f}); cuBLAS alone "
                f"{1e3 * found['cublas'][0]:.1f} us"
            )
            shape = f"M={tokens} N={n} K={k}/{gpus}"
            yield Timing(
                "parallel linear", shape, "cuBLAS, then NCCL's all-reduce", ours, theirs, 0.0,
                max(spread, other), note,
            )  # fmt: skip


def exchange_rows(ranks: Ranks, gpus: int) -> Iterator[Timing]:
    for nbytes in MESSAGES:
        found = ranks.call("exchange", nbytes)
        (slices, spread), (whole, other) = found["slices"], found["whole"]
        yield Timing(
            "exchange", f"{nbytes // 1024:,} KiB of fp32 a rank, in slices", "gathered whole",
            slices, whole, 0.0, max(spread, other),
        )  # fmt: skip


def start_engines(folder: Path, gpus: int) -> dict[str, Remote]:
    """Both, without waiting for them."""
    return {
        name: Remote(
            f"engine-{name}",
            "benchmarks.parallel:Served",
            ours=name == "ours",
            checkpoint=str(folder),
            gpus=gpus,
        )
        for name in ("ours", "stock")
    }


def engine_rows(engines: dict[str, Remote], gpus: int) -> Iterator[Timing]:
    import vllm

    found: dict[str, list[dict[str, Any]]] = {name: [] for name in engines}
    for engine in engines.values():
        engine.result()
    for name, engine in engines.items():
        print(name, engine.call("told"))
        engine.call("generate", 0, 16)
    for seed in range(1, RUNS + 1):
        for name, engine in engines.items():
            found[name].append(engine.call("generate", seed, LOAD["tokens_out"]))
    stock = engines["stock"].call("told")
    chose = ", ".join(stock[key] for key in ("attention", "compilation", "cudagraphs"))
    shape = f"Qwen3-8B, {LAYERS} layers, TP {gpus}, {LOAD['requests']} requests of " \
        f"{LOAD['tokens_in']} in and {LOAD['tokens_out']} out"  # fmt: skip
    (ours, spread), (theirs, other) = (
        summary([one["seconds"] for one in found[name]]) for name in ("ours", "stock")
    )
    tokens = LOAD["requests"] * LOAD["tokens_out"]
    note = f"{tokens / ours:,.0f} against {tokens / theirs:,.0f} tokens/s out; stock: {chose}"
    baseline = f"vLLM {vllm.__version__}"
    yield Timing("parallel engine", shape, baseline, 1e3 * ours, 1e3 * theirs, 0.0,
                 max(spread, other), note)  # fmt: skip
    steps = [summary([one["step_ms"] for one in found[name]])[0] for name in ("ours", "stock")]
    yield Timing("parallel engine", shape + ", one decode step of all", baseline, *steps, 0.0)


def report(timings: list[Timing], gpus: int, out: Path) -> str:
    """Puts the rows into the table of `out`; its text."""
    from benchmarks.table import merge, record, render, this_run

    file = out / f"h200_x{gpus}.json"
    old = json.loads(file.read_text()) if file.exists() else []
    run = {**this_run(), "gpus": str(gpus), "nccl": ".".join(map(str, torch.cuda.nccl.version()))}
    lines = merge(old, [record(timing, run) for timing in timings])
    body = ",\n".join(json.dumps(line) for line in lines)
    file.write_text(f"[\n{body}\n]\n")
    text = render(lines).replace("# NVIDIA", f"# {gpus} x NVIDIA", 1)
    file.with_suffix(".md").write_text(text)
    return text


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rows", default=",".join(ROWS), help="default: %(default)s")
    parser.add_argument("--out", type=Path, default=HERE)
    parser.add_argument("--gpus", type=int, default=torch.cuda.device_count())
    parser.add_argument("--wait", type=Path, help="start the engines, and time when this exists")
    parser.add_argument("--limit", type=float, default=600.0, help="seconds, after the wait")
    options = parser.parse_args()
    names, failed, text = options.rows.split(","), [], ""
    if unknown := sorted({*names} - {*ROWS}):
        parser.error(f"there is no row {unknown[0]!r}, only {', '.join(ROWS)}")
    if options.gpus < 2:
        parser.error(f"these rows need two GPUs, there are {options.gpus}")
    options.out.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir="/dev/shm") as folder:
        engines: dict[str, Remote] = {}
        if "engine" in names:
            from benchmarks.qwen3_8b import config, write_checkpoint

            write_checkpoint(Path(folder), config(LAYERS), "cuda")
            torch.cuda.empty_cache()
            engines = start_engines(Path(folder), options.gpus)
        ranks = Ranks("bench", "benchmarks.parallel:Rank", options.gpus)
        while options.wait and not options.wait.exists():
            time.sleep(0.1)
        # what hangs is ended: its caller then hears of it
        processes = [*ranks.remotes, *engines.values()]
        timer = threading.Timer(options.limit, lambda: [one.kill() for one in processes])
        timer.start()
        groups = {
            "linear": lambda: linear_rows(ranks, options.gpus),
            "exchange": lambda: exchange_rows(ranks, options.gpus),
            "engine": lambda: engine_rows(engines, options.gpus),
        }
        try:
            ranks.results()
            for name in filter(names.__contains__, groups):
                if name == "engine":
                    ranks.close()
                timings = _caught(groups[name](), failed)
                text = report(timings, options.gpus, options.out) if timings else text
        finally:
            timer.cancel()
            for process in processes:
                process.kill()
    print(text, *failed, sep="\n")
    return int(bool(failed))


def _caught(rows: Iterator[Timing], failed: list[str]) -> list[Timing]:
    """The rows until one fails: others are still worth having."""
    done: list[Timing] = []
    try:
        for timing in rows:
            done.append(timing)
            print(f"{timing.row} {timing.shape}: {1e3 * timing.ours_ms:,.1f} us against "
                  f"{1e3 * timing.baseline_ms:,.1f} {timing.note}", flush=True)  # fmt: skip
    except Exception:
        failed.append(traceback.format_exc())
    return done


if __name__ == "__main__":
    sys.exit(main())
