"""The engine row: vLLM with our module against vLLM with its own, on one checkpoint.

`python -m benchmarks.engine` does what `python -m benchmarks.run --rows engine` does and takes
options. Each contestant runs in a process of its own, one after the other: a warm-up run, then
timed ones, each of fresh prompts (nothing hits the prefix cache). Both return the logprob of every
sampled token. Everything that is not listed in `ENGINE` is vLLM's default for both.
"""

import argparse
import itertools
import json
import os
import random
import re
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch

from benchmarks.harness import Timing, row, summary
from benchmarks.served import MODELS, Served

TEST = "tests/parity/test_parity.py"
ROOT = Path(__file__).parent.parent
ENGINE = {
    "dtype": "bfloat16",
    "max_num_seqs": 256,
    "max_model_len": 1024,
    "skip_tokenizer_init": True,
    "seed": 0,
    "worker_extension_cls": "benchmarks.engine_worker.StepWatch",
}
# Arguments of vLLM (none: its own class) and environment of each contestant.
CONTESTANTS: dict[str, tuple[dict[str, Any], dict[str, str]]] = {
    "stock": ({}, {}),
    # with configurations for the experts, where vLLM ships none for the device: see `tuned_experts`
    "stock-tuned": ({}, {}),
    "ours": ({"model_impl": "isomodels"}, {}),
    "stock-v1": ({}, {"VLLM_USE_V2_MODEL_RUNNER": "0"}),
    "ours-v1": ({"model_impl": "isomodels"}, {"VLLM_USE_V2_MODEL_RUNNER": "0"}),
}
# Settings of the scheduler that must be the same on both sides.
SAME = ("max_num_seqs", "max_num_batched_tokens", "prefix_caching", "gpu_memory_utilization",
        "async_scheduling")  # fmt: skip
_TOLD = re.compile(r"backend|FlashAttention|runner|[Aa]sync|compil|captur|KV cache size|sampl")


@dataclass(frozen=True)
class Load:
    """What is served.

    Attributes:
        profile: also list the kernels of one prefill and one decode step.
        stock: arguments of vLLM that its own class alone gets.
    """

    requests: int = 256
    tokens_in: int = 512
    tokens_out: int = 256
    runs: int = 3
    profile: bool = False
    vocab_size: int = 151936
    stock: dict[str, Any] = field(default_factory=dict)


def serve(contestant: str, checkpoint: Path, load: Load) -> dict[str, Any]:
    """Run one contestant, in a process that ends afterwards.

    Returns:
        `chosen` (see `StepWatch.chosen`), `seconds` of each timed run, `prefill_seconds` of runs
        with one output token, `decode_step_ms` at all requests, `compiled`: kernels that Triton
        compiled in the timed runs and how often, and `profiles`.
    """
    arguments, environment = CONTESTANTS[contestant]
    os.environ.update(environment)
    if contestant == "stock-tuned":
        os.environ["VLLM_TUNED_CONFIG_FOLDER"] = str(tuned_experts(Path(tempfile.mkdtemp())))
    from vllm import LLM

    arguments = arguments or load.stock
    llm = LLM(str(checkpoint), **{**ENGINE, **arguments, "max_num_seqs": load.requests})
    (chosen,) = llm.collective_rpc("chosen")
    llm.collective_rpc("watch_steps")
    result: dict[str, Any] = {"chosen": json.loads(chosen), "profiles": {}}
    generate(llm, load, seed=0)
    for name in ("take_steps", "take_compilations"):
        llm.collective_rpc(name)
    result["seconds"] = [generate(llm, load, seed) for seed in range(1, load.runs + 1)]
    (steps,) = llm.collective_rpc("take_steps")
    result["decode_step_ms"] = decode_step_ms(json.loads(steps), load.requests)
    (compiled,) = llm.collective_rpc("take_compilations")
    result["compiled"] = dict(Counter(json.loads(compiled)))
    one = replace(load, tokens_out=1)
    result["prefill_seconds"] = [generate(llm, one, seed) for seed in range(100, 103)]
    if load.profile:
        budget = result["chosen"]["max_num_batched_tokens"]
        short = replace(load, tokens_out=min(32, load.tokens_out))
        whole = min(budget, load.requests * load.tokens_in)
        plans = {
            "prefill": (whole, 0, 1, 1),
            "decode": (load.requests, load.requests, 8, 2),
        }
        for seed, (name, plan) in enumerate(plans.items(), 200):
            llm.collective_rpc("profile_steps", args=plan)
            generate(llm, short, seed)
            (profile,) = llm.collective_rpc("take_profile")
            result["profiles"][name] = json.loads(profile)
    return result


def tuned_experts(folder: Path) -> Path:
    """vLLM's configurations of fused experts for an H100, under the names of the device at hand.

    An H200 has the same multiprocessors, and vLLM's default for a shape it has no file of is far
    from them. What vLLM ships for the device itself stays out.
    """
    from vllm.model_executor.layers.fused_moe import fused_moe

    shipped = Path(fused_moe.__file__).parent / "configs"
    device = fused_moe.get_config_file_name(0, 0, None).partition("device_name=")[2]
    for source in shipped.glob("E=*,device_name=NVIDIA_H100_80GB_HBM3.json"):
        name = source.name.partition("device_name=")[0] + f"device_name={device}"
        if not (shipped / name).exists():
            shutil.copy(source, folder / name)
    return folder


def generate(llm: Any, load: Load, seed: int) -> float:
    """Seconds to serve fresh random prompts; checks that every token and logprob came back."""
    from vllm import SamplingParams

    generator = random.Random(seed)
    prompts = [
        {"prompt_token_ids": generator.choices(range(load.vocab_size), k=load.tokens_in)}
        for _ in range(load.requests)
    ]
    params = SamplingParams(
        temperature=1.0, max_tokens=load.tokens_out, ignore_eos=True, logprobs=0, detokenize=False
    )
    begin = time.perf_counter()
    outputs = llm.generate(prompts, params, use_tqdm=False)
    seconds = time.perf_counter() - begin
    for output in outputs:
        (sample,) = output.outputs
        logprobs = [entry[token].logprob for token, entry in
                    zip(sample.token_ids, sample.logprobs, strict=True)]  # fmt: skip
        if len(logprobs) != load.tokens_out or not all(-1e3 < x < 1e-3 for x in logprobs):
            raise RuntimeError("a request came back without a token or its logprob")
    return seconds


def decode_step_ms(steps: Sequence[tuple[int, int, float]], requests: int) -> float:
    """Median milliseconds from one step that decodes all requests to the next such step."""
    pairs = itertools.pairwise(steps)
    gaps = [b[2] - a[2] for a, b in pairs if {*a[:2], *b[:2]} == {requests}]
    return 1e3 * statistics.median(gaps) if gaps else float("nan")


def in_own_process(contestant: str, checkpoint: Path, load: Load, out: Path) -> dict[str, Any]:
    """`serve` in a new process; its log goes to a file, the lines that tell its choices to ours."""
    result, log = out / f"engine_{contestant}.json", out / f"engine_{contestant}.log"
    given = {name: getattr(load, name) for name in Load.__dataclass_fields__}
    command = [sys.executable, "-m", "benchmarks.engine", "--serve", contestant]
    command += ["--checkpoint", str(checkpoint), "--load", json.dumps(given)]
    command += ["--result", str(result)]
    paths = [str(ROOT), os.environ.get("PYTHONPATH", "")]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, paths))}
    with log.open("w") as file:
        subprocess.run(
            command, env=environment, stdout=file, stderr=subprocess.STDOUT, timeout=400, check=True
        )
    told = [line for line in log.read_text().splitlines() if "INFO" in line and _TOLD.search(line)]
    print(f"-- {contestant}", *dict.fromkeys(line[-200:] for line in told), sep="\n")
    return json.loads(result.read_text())


def compare(
    ours: dict, stock: dict, load: Load, served: Served, layers: int, baseline: str
) -> list[Timing]:
    """The lines of the table."""
    for name in SAME:
        if ours["chosen"][name] != stock["chosen"][name]:
            raise RuntimeError(
                f"not the same scheduler: {name} is {ours['chosen'][name]} for isomodels, "
                f"{stock['chosen'][name]} for stock vLLM"
            )
    shape = f"{served.shape(layers)}, {load.requests} requests of {load.tokens_in}"
    batched = f"{ours['chosen']['max_num_batched_tokens']} tokens a step at most"
    chose = ", ".join(stock["chosen"][key] for key in ("attention", "compilation", "cudagraphs"))
    tokens = load.requests * load.tokens_out

    def line(what: str, name: str, floor: float, per_run: int = 0) -> Timing:
        (mine, spread), (theirs, their_spread) = summary(ours[name]), summary(stock[name])
        rate = f"{per_run / mine:,.0f} against {per_run / theirs:,.0f} tokens/s out, "
        runs = "; ".join(
            f"{who} " + ", ".join(f"{s:.2f}" for s in one[name]) + " s"
            for who, one in (("ours", ours), ("stock", stock))
        )
        note = f"{rate}{batched}, stock: {chose}; {runs}" if per_run else f"{batched}; {runs}"
        spread = max(spread, their_spread)
        return Timing(
            served.row, shape + what, baseline, 1e3 * mine, 1e3 * theirs, floor, spread, note
        )

    decode = f", one decode step of all {load.requests}"
    return [
        line(f" in and {load.tokens_out} out", "seconds", 0.95, tokens),
        line(" in and 1 out", "prefill_seconds", 0.0),
        Timing(served.row, shape + decode, baseline, ours["decode_step_ms"],
               stock["decode_step_ms"], 0.0, note="median of the timed runs"),
    ]  # fmt: skip


def show(name: str, result: dict[str, Any]) -> None:
    """What a contestant chose and took, in a few lines."""
    print(f"== {name}: " + ", ".join(f"{k}={v}" for k, v in result["chosen"].items()))
    for key in ("seconds", "prefill_seconds"):
        print(f"{name} {key}: " + ", ".join(f"{x:.3f}" for x in result[key]))
    print(f"{name} decode step: {result['decode_step_ms']:.3f} ms")
    print(f"{name} kernels compiled during the timed runs: {result['compiled'] or 'none'}")
    for step, profile in result["profiles"].items():
        if not profile:
            print(f"{name} {step}: no such step")
            continue
        print(f"{name} {step}: {profile['busy_us']:,.0f} us in {profile['launches']:.0f} kernels")
        for us, count, kernel in profile["kernels"][:14]:
            print(f"  {us:9,.1f} us {count:6.0f} x {kernel[:90]}")


def scratch() -> str | None:
    """A folder in memory if it has room for the weights, else the usual one."""
    memory = Path("/dev/shm")
    return str(memory) if memory.is_dir() and shutil.disk_usage(memory).free > 2e10 else None


def measure(
    contestants: Sequence[str], served: Served, layers: int, load: Load, out: Path
) -> tuple[dict[str, dict], dict[str, str]]:
    """Results and failures by contestant."""
    results: dict[str, dict] = {}
    failures: dict[str, str] = {}
    with tempfile.TemporaryDirectory(dir=scratch()) as folder:
        begin = time.perf_counter()
        checkpoint = Path(folder, "checkpoint")
        raw = served.config(layers)
        served.write(checkpoint, raw)
        load = replace(load, vocab_size=raw["vocab_size"], stock=served.stock)
        torch.cuda.empty_cache()
        print(f"checkpoint of {layers} layers in {time.perf_counter() - begin:.0f} s")
        for name in contestants:
            begin = time.perf_counter()
            try:
                results[name] = in_own_process(name, checkpoint, load, out)
                show(name, results[name])
            except (subprocess.SubprocessError, OSError) as error:
                log = (out / f"engine_{name}.log").read_text().splitlines()
                failures[name] = "\n".join([str(error), *log[-40:]])
                print(f"{name} failed: {failures[name]}")
            print(f"{name} took {time.perf_counter() - begin:.0f} s in all")
    return results, failures


@row("engine", TEST)
def engine() -> Iterator[Timing]:
    """Whole runs, prefill alone, and the cadence of decode steps."""
    yield from _engine(MODELS["qwen3-8b"])


@row("engine moe", TEST)
def engine_moe() -> Iterator[Timing]:
    """The same of experts and latent attention."""
    yield from _engine(MODELS["glm-4.7-flash"])


@row("engine hybrid", TEST)
def engine_hybrid() -> Iterator[Timing]:
    """The same of the gated delta rule, gated attention and experts."""
    yield from _engine(MODELS["qwen3.5-35b-a3b"])


def _engine(
    served: Served,
    names: Sequence[str] = ("stock", "ours"),
    layers: int | None = None,
    profile: bool = False,
    out: Path | None = None,
) -> Iterator[Timing]:
    import vllm

    layers = layers or served.layers
    load = Load(requests=served.requests, profile=profile)
    results, failures = measure(names, served, layers, load, out or Path(tempfile.mkdtemp()))
    if failures:
        raise RuntimeError("\n".join(f"{name}: {text}" for name, text in failures.items()))
    stock, *others = names
    version = f"vLLM {vllm.__version__}"
    if stock == "stock-tuned":
        version += ", experts as tuned for an H100"
    for name in others:
        runner = "" if name == "ours" else f" ({name})"
        baseline = f"{version}{runner}"
        yield from compare(results[name], results[stock], load, served, layers, baseline)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--contestants", default="stock,ours", help="the baseline first")
    parser.add_argument("--model", choices=MODELS, default="qwen3-8b")
    parser.add_argument("--layers", type=int, default=None, help="default: as in the table")
    parser.add_argument("--profile", action="store_true", help="list the kernels of a step")
    parser.add_argument("--logs", type=Path, default=None, help="folder for logs and results")
    parser.add_argument("--out", type=Path, default=None, help="folder of the table to update")
    parser.add_argument("--serve", help=argparse.SUPPRESS)
    parser.add_argument("--checkpoint", type=Path, help=argparse.SUPPRESS)
    parser.add_argument("--load", help=argparse.SUPPRESS)
    parser.add_argument("--result", type=Path, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.serve:
        load = Load(**json.loads(options.load))
        result = serve(options.serve, options.checkpoint, load)
        options.result.write_text(json.dumps(result))
        return 0
    from benchmarks.table import missed, update

    logs = options.logs or Path(tempfile.mkdtemp())
    logs.mkdir(parents=True, exist_ok=True)
    names = options.contestants.split(",")
    served = MODELS[options.model]
    timings = list(_engine(served, names, options.layers, options.profile, logs))
    lines = update(options.out or logs, timings)
    for line in lines:
        print({key: value for key, value in line.items() if key != "run"})
    return int(any(missed(line) for line in lines))


if __name__ == "__main__":
    sys.exit(main())
