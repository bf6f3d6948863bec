"""The RL row: whole GRPO steps on one GPU that engine and trainer share, ours against a stock pair.

`python -m benchmarks.rl_step --model tests/data/configs/qwen3-1.7b` takes the parts of
`examples/grpo/grpo.py` at real sizes: random weights, random prompts, answers of full length. Ours
is vLLM with our module and Megatron's provider, every ratio asserted to be 1 by bits; stock is vLLM
with its own model and defaults, `benchmarks.rl_stock`, and vLLM's own weight transfer by CUDA IPC.

Each pair is a process (and its engine another). All engines start side by side, with one process
more for each trainer, which compiles its kernels on a smaller model. The engines generate in turn,
then one pair after the other makes its trainer, warms up and is timed.
"""

import argparse
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import asdict
from functools import cached_property
from multiprocessing.connection import Connection, Listener
from pathlib import Path
from typing import Any

from benchmarks.engine import ROOT, scratch
from benchmarks.harness import Timing, summary
from benchmarks.rl_pairs import PARTS, WARM, Work, serve
from isomodels.config import read_config

MOST = 1.05  # of stock's time for a whole step
SAME = ("max_num_seqs", "max_num_batched_tokens", "async_scheduling")


class Remote:
    """A pair in another process, whose log goes to a file."""

    def __init__(self, label: str, name: str, checkpoint: Path, work: Work, out: Path):
        self.label, self.name = label, name
        address = tempfile.mktemp(prefix="isomodels-rl-")
        self.listener = Listener(address, "AF_UNIX")
        command = [sys.executable, "-m", "benchmarks.rl_step", "--serve", name]
        command += ["--checkpoint", str(checkpoint), "--work", json.dumps(asdict(work))]
        command += ["--address", address]
        paths = [str(ROOT), os.environ.get("PYTHONPATH", "")]
        environment = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, paths))}
        environment |= {"VLLM_WORKER_MULTIPROC_METHOD": "spawn"}
        if name == "stock":  # vLLM's IPC sends handles through pickle
            environment |= {"VLLM_ALLOW_INSECURE_SERIALIZATION": "1"}
        self.log = out / f"rl_{label}.log"
        with self.log.open("w") as file:
            self.process = subprocess.Popen(
                command,
                env=environment,
                stdout=file,
                stderr=subprocess.STDOUT,
                start_new_session=True,  # so that its engine ends with it
            )
        self.listener._listener._socket.settimeout(90)  # type: ignore[attr-defined]

    @cached_property
    def connection(self) -> Connection:
        """To the process, once it has started."""
        return self.listener.accept()

    def ask(self, *request: Any) -> None:
        """Send a request."""
        self.connection.send(request)

    def answer(self, seconds: float = 240) -> tuple[Any, float, dict[str, float]]:
        """Result, seconds it took, memory.

        Raises:
            RuntimeError: it failed, ended, or gave no answer in time.
        """
        try:
            if not self.connection.poll(seconds):
                raise RuntimeError(f"{self.label} gave no answer within {seconds:.0f} s")
            good, result, took, used = self.connection.recv()
        except (EOFError, ConnectionError):
            raise RuntimeError(f"{self.label} ended: {self.tail()}") from None
        if not good:
            raise RuntimeError(f"{self.label}: {result}")
        return result, took, used

    def tail(self) -> str:
        """The end of its log."""
        return self.log.read_text()[-1500:]

    def close(self) -> None:
        """End it and its engine at once: all that they had to say was said."""
        if "connection" in vars(self):
            self.connection.close()
        self.listener.close()
        if self.process.poll() is None:
            os.killpg(self.process.pid, signal.SIGKILL)
            self.process.wait()


# The driver


def measure(
    names: Sequence[str], work: Work, out: Path, seconds: float, results: dict[str, dict[str, Any]]
) -> None:
    """Put into `results` what each pair did, as it comes; failures are printed.

    Each pair may take its share of what is left of `seconds`, and makes at least one timed step.
    """
    from isomodels.parity.checkpoints import random_checkpoint

    with tempfile.TemporaryDirectory(dir=scratch()) as folder, ExitStack() as closing:
        begin = time.perf_counter()
        whole, small = Path(folder) / "whole", Path(folder) / "small"
        pairs = {name: Remote(name, name, whole, work, out) for name in names}
        warmers = {}
        if work.device == "cuda":
            warmers = {n: Remote(f"{n}_warm", n, small, work.smaller, out) for n in names}
        for remote in (*pairs.values(), *warmers.values()):
            closing.callback(remote.close)
        for path, one in ((small, work.smaller), (whole, work)):  # while the processes import
            random_checkpoint(path, one.raw, "bfloat16", 0, work.device)
        say(begin, "checkpoints written")
        for remotes, method in ((pairs, "start_engine"), (warmers, "warm")):
            for name, remote in remotes.items():
                with told(name):
                    remote.ask(method)
        for name, remote in warmers.items():
            with told(name):
                say(begin, f"{name}: kernels compiled in {remote.answer()[1]:.0f} s")
            remote.close()
        for name, remote in pairs.items():
            with told(name):
                chosen, took, _ = remote.answer()
                results[name] = {"chosen": chosen, "engine_start": took, "alone": []}
                say(begin, f"{name}: engine started in {took:.0f} s")
        in_turn(pairs, work, results)
        say(begin, "generation alone: done")
        for number, (name, remote) in enumerate(pairs.items()):
            now = time.perf_counter()
            until = now + (begin + seconds - now) / (len(pairs) - number)
            if name in results:
                with told(name):
                    remote.ask("start_trainer")
                    try:
                        timed(remote, work, until, results[name])
                    except RuntimeError:
                        results[name].clear()  # no line of a pair that failed, whenever it did
                        raise
                    say(begin, f"{name}: done")
                if work.profile and "steps" in results[name]:
                    with told(name):
                        profiled(remote, results[name])
            remote.close()


def in_turn(pairs: dict[str, Remote], work: Work, results: dict[str, dict[str, Any]]) -> None:
    """Generation alone, one engine after the other in each round.

    A host's speed drifts by more than two engines differ: this way they share the drift.
    """
    for seed in range(WARM + 2, WARM + 2 + work.rounds):
        for name, remote in pairs.items():
            if name in results:
                with told(name):
                    remote.ask("generate", seed)
                    try:
                        one = remote.answer()[0]
                    except RuntimeError:
                        del results[name]
                        raise
                    results[name]["alone"].append(one)
                    print(name, "alone", rounded(one), flush=True)


def timed(remote: Remote, work: Work, until: float, result: dict[str, Any]) -> None:
    """Wait for the trainer, then make steps."""
    result["trainer"], result["trainer_start"], _ = remote.answer()
    result |= {"warm_up": [], "steps": []}
    for seed in range(work.warm_up + work.steps):
        if result["steps"] and time.perf_counter() > until:
            break
        remote.ask("step", seed)
        step, _, result["peak_gib"] = remote.answer()
        result["warm_up" if seed < work.warm_up else "steps"].append(step)
        print(remote.name, seed, rounded(step), flush=True)


def profiled(remote: Remote, result: dict[str, Any]) -> None:
    """What a decode step keeps the GPU busy with."""
    remote.ask("profile")
    profile = result["decode_profile"] = remote.answer()[0]
    if not profile:
        raise RuntimeError("no decode step was profiled")
    print(
        f"{remote.name}: a decode step keeps the GPU busy for {profile['busy_us'] / 1e3:.2f} ms in "
        f"{profile['launches']:.0f} launches",
        flush=True,
    )
    for us, count, kernel in profile["kernels"][:12]:
        print(f"  {us:8.0f} us {count:5.0f}  {kernel[:90]}", flush=True)


def rounded(value: Any) -> Any:
    """For a print: floats with six digits after the point."""
    if isinstance(value, dict):
        return {key: rounded(one) for key, one in value.items()}
    return round(value, 6) if isinstance(value, float) else value


@contextmanager
def told(name: str) -> Iterator[None]:
    """Print a failure of one pair and go on."""
    try:
        yield
    except (RuntimeError, OSError) as error:
        print(f"{name} failed: {str(error)[-3000:]}", flush=True)


def say(begin: float, what: str) -> None:
    print(f"{time.perf_counter() - begin:4.0f} s  {what}", flush=True)


def compare(ours: dict[str, Any], stock: dict[str, Any], work: Work) -> list[Timing]:
    """The lines of the table: the whole step, then its parts."""
    for name in SAME:
        if ours["chosen"][name] != stock["chosen"][name]:
            raise RuntimeError(f"not the same scheduler: {name}")
    _, config = read_config(work.raw)
    shape = (
        f"{Path(work.model).name}, {config.num_hidden_layers} layers, {work.prompts} x {work.group}"
        f" answers, {work.tokens_in} in and {work.tokens_out} out"
    )
    chose = ", ".join(stock["chosen"][key] for key in ("attention", "compilation", "cudagraphs"))
    baseline = f"vLLM ({chose}), {stock['trainer']}"
    compared = sum(step["compared"] for step in ours["warm_up"] + ours["steps"])
    note = (
        f"{compared:,} ratios of ours asserted to be 1 by bits; stock: "
        f"{stock['steps'][-1]['differ'] / stock['steps'][-1]['compared']:.1%} of logprobs differ, "
        f"on average by {stock['steps'][-1]['mean_difference']:.1e}; {len(ours['steps'])} and "
        f"{len(stock['steps'])} steps after {work.warm_up}"
    )
    if "sync_failed" in stock["steps"][-1]:
        note += "; stock without its sync, which failed"
    lines = []
    for part in ("step", *PARTS[:3]):
        (mine, spread), (theirs, other) = (
            summary([step[part] for step in one["steps"]]) for one in (ours, stock)
        )
        whole = part == "step"
        name = shape if whole else f"{shape}: {part}"
        floor = 1 / MOST if whole else 0.0
        lines.append(
            Timing("RL step", name, baseline, 1e3 * mine, 1e3 * theirs, floor,
                   max(spread, other), note if whole else "")
        )  # fmt: skip
    for key, what, unit in (
        ("generation", "generation alone, the engines in turn", 1e3),
        ("decode_step_ms", "a decode step of it", 1.0),
    ):
        (mine, spread), (theirs, other) = (
            summary([one[key] for one in side["alone"]]) for side in (ours, stock)
        )
        name, spread = f"{shape}: {what}", max(spread, other)
        note = f"{len(ours['alone'])} rounds"
        lines.append(
            Timing("RL step", name, baseline, unit * mine, unit * theirs, 0.0, spread, note)
        )
    return lines


def show(results: dict[str, dict[str, Any]]) -> None:
    """A table of medians."""
    print(f"{'':8}" + "".join(f"{part:>12}" for part in PARTS) + "   seconds, medians")
    for name, result in results.items():
        medians = {p: summary([s[p] for s in result["steps"]])[0] for p in PARTS}
        print(f"{name:8}" + "".join(f"{medians[part]:12.3f}" for part in PARTS)
              + f"   of {len(result['steps'])}; {result['trainer']}")  # fmt: skip


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", default=str(ROOT / "tests/data/configs/qwen3-1.7b"))
    parser.add_argument("--set", action="append", default=[], help="NAME=JSON of config.json")
    parser.add_argument("--contestants", default="ours,stock")
    sizes = ("prompts", "group", "tokens-in", "tokens-out", "max-tokens")
    for name in (*sizes, "rounds", "warm-up", "steps"):
        parser.add_argument(f"--{name}", type=int)
    parser.add_argument("--cache-gib", type=float)
    parser.add_argument(
        "--seconds", type=float, default=600.0, help="fewer steps where it takes more"
    )
    parser.add_argument("--profile", action="store_true", help="the engines' decode steps too")
    parser.add_argument("--device")
    parser.add_argument("--logs", type=Path, default=None, help="folder for logs and results")
    parser.add_argument("--out", type=Path, default=None, help="folder of the table to update")
    parser.add_argument("--serve", help=argparse.SUPPRESS)
    parser.add_argument("--checkpoint", type=Path, help=argparse.SUPPRESS)
    parser.add_argument("--work", help=argparse.SUPPRESS)
    parser.add_argument("--address", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.serve:
        serve(options.serve, options.checkpoint, Work(**json.loads(options.work)), options.address)
        return 0
    from benchmarks.table import missed, update

    given = {k: v for k, v in vars(options).items() if k in Work.__dataclass_fields__}
    pairs = (item.partition("=") for item in options.set)
    overrides = tuple((name, json.loads(value)) for name, _, value in pairs)
    kept = {k: v for k, v in given.items() if v is not None}
    work = Work(**{**kept, "model": options.model, "overrides": overrides})
    logs = options.logs or Path(tempfile.mkdtemp())
    logs.mkdir(parents=True, exist_ok=True)
    results: dict[str, dict[str, Any]] = {}
    file = logs / f"rl_{Path(work.model).name}.json"
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    try:
        measure(options.contestants.split(","), work, logs, options.seconds, results)
    except KeyboardInterrupt:
        print("ended before its time: the table is of the steps that were made")
    results = {name: result for name, result in results.items() if result.get("steps")}
    file.write_text(json.dumps({"work": asdict(work), "results": results}, indent=1))
    show(results)
    if not {"ours", "stock"} <= results.keys():
        return 1
    if work.device != "cuda":  # a rehearsal: no line of the table
        return 0
    lines = update(options.out or logs, compare(results["ours"], results["stock"], work))
    for line in lines:
        print({key: value for key, value in line.items() if key != "run"})
    return int(any(missed(line) for line in lines))


if __name__ == "__main__":
    sys.exit(main())
