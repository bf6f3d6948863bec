"""The training row: forward, backward and optimizer step of our module against plain torch.

`python -m benchmarks.train_step` does what `python -m benchmarks.run --rows "training step"` does
and takes options. Every contestant trains the same weights on the same packed tokens with the same
optimizer (fused AdamW on bf16 parameters), in a process of its own; the first step's loss must
agree. Ours and the baseline of the floor run twice, in turns:

* ours: the module that both hosts run, its layers called as they are.
* ours-compiled: the same, each layer under `torch.compile`.
* torch: `benchmarks.plain_model`, compiled. torch-eager: the same, not compiled.
* megatron: megatron-core's GPTModel from its local spec (without Transformer Engine; its attention
  stores the scores).
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
import zlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from benchmarks.harness import Timing, kernel_times, row, summary
from benchmarks.qwen3_8b import config, draw
from isomodels.batch import Batch
from isomodels.config import read_config
from isomodels.registry import load_object

TEST = "tests/dense/test_compile.py"
ROOT = Path(__file__).parent.parent
LAYERS = 16
WARM_UP = 4
GIB = 2**30
Parameters = Iterable[tuple[str, nn.Parameter]]


@dataclass(frozen=True)
class Work:
    """What is trained: `lengths` are the packed sequences of a step."""

    layers: int = LAYERS
    lengths: tuple[int, ...] = (2048, 2048, 2048, 2048)
    steps: int = 12
    profile: bool = False
    device: str = "cuda"
    overrides: tuple[tuple[str, Any], ...] = ()  # of config.json; tests take a small model

    @property
    def parsed(self) -> tuple[Any, Any]:
        """Architecture and config."""
        return read_config(config(self.layers, **dict(self.overrides)))


@dataclass(frozen=True)
class Data:
    """Packed tokens: ids, positions and targets [T] int64, bounds [num_seqs + 1] int32."""

    ids: Tensor
    positions: Tensor
    targets: Tensor
    bounds: Tensor

    @staticmethod
    def of(work: Work) -> "Data":
        """Random tokens."""
        generator = torch.Generator().manual_seed(0)
        vocab_size = work.parsed[1].vocab_size
        ids, targets = torch.randint(0, vocab_size, (2, sum(work.lengths)), generator=generator)
        bounds = torch.tensor([0, *work.lengths]).cumsum(0).int()
        positions = Batch.positions(bounds)
        return Data(*(x.to(work.device) for x in (ids, positions, targets, bounds)))


def fill(parameters: Parameters) -> None:
    """Draws every parameter; the values depend on its name alone."""
    with torch.no_grad():
        for name, parameter in parameters:
            generator = torch.Generator(parameter.device).manual_seed(zlib.crc32(name.encode()))
            parameter.copy_(draw(name, tuple(parameter.shape), generator))


Contestant = tuple[nn.Module, Callable[[], Tensor]]  # a model and its loss


def ours(work: Work, data: Data, compiled: bool = False) -> Contestant:
    """The module that both hosts run."""
    spec, parsed = work.parsed
    model = load_object(spec.model)(parsed, dtype=torch.bfloat16, device=torch.device(work.device))
    fill(model.named_parameters())
    if compiled:
        for layer in model.model.layers:
            layer.compile()
    batch = Batch.packed(data.bounds)

    def loss() -> Tensor:
        return -model.token_logprobs(model(data.ids, data.positions, batch), data.targets).mean()

    return model, loss


def plain(work: Work, data: Data, compiled: bool = True) -> Contestant:
    """`benchmarks.plain_model`."""
    from benchmarks.plain_model import PlainModel

    _, parsed = work.parsed
    model = PlainModel(parsed, compiled=compiled, dtype=torch.bfloat16, device=work.device)
    fill(model.named_parameters())
    longest = max(work.lengths)
    return model, lambda: model(data.ids, data.positions, data.bounds, longest, data.targets)


def megatron(work: Work, data: Data) -> Contestant:
    """megatron-core's GPTModel; all sequences must be of one length."""
    from benchmarks.megatron_model import gpt_model, load

    spec, parsed = work.parsed
    model = gpt_model(parsed, longest=max(work.lengths), device=work.device)
    source = load_object(spec.model)(parsed, dtype=torch.bfloat16, device=torch.device(work.device))
    fill(source.named_parameters())
    load(model, source.state_dict(), parsed)
    shape = (len(work.lengths), work.lengths[0])
    ids, positions, targets = (x.view(shape) for x in (data.ids, data.positions, data.targets))
    return model, lambda: model(ids, positions, None, labels=targets).mean()


CONTESTANTS: dict[str, Callable[[Work, Data], Contestant]] = {
    "ours": ours,
    "ours-compiled": lambda work, data: ours(work, data, compiled=True),
    "torch": plain,
    "torch-eager": lambda work, data: plain(work, data, compiled=False),
    "megatron": megatron,
}
BASELINES = {
    "torch": "plain torch, compiled: cuBLAS, varlen flash attention",
    "torch-eager": "plain torch, not compiled",
    "megatron": "Megatron's GPTModel, local spec",
}


def train(name: str, work: Work) -> dict[str, Any]:
    """Run one contestant on the GPU, in a process that ends afterwards.

    Returns:
        `loss` and `grad_norm` of the first step, `step_ms` of each timed step and its parts,
        `peak_bytes` of the allocator over the timed steps, `profile`.
    """
    model, loss_of = CONTESTANTS[name](work, Data.of(work))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-6, fused=True)

    def step(marks: Sequence[torch.cuda.Event] = ()) -> Tensor:
        loss = loss_of()
        record(marks, 1)
        loss.backward()
        record(marks, 2)
        optimizer.step()
        optimizer.zero_grad()
        record(marks, 3)
        return loss.detach()

    loss = loss_of()
    loss.backward()
    gradients = [p.grad for p in model.parameters() if p.grad is not None]
    result: dict[str, Any] = {
        "loss": loss.item(),
        "grad_norm": torch.nn.utils.get_total_norm(gradients).item(),
    }
    del loss, gradients
    optimizer.step()
    optimizer.zero_grad()
    for _ in range(WARM_UP):
        step()
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    marks = [[torch.cuda.Event(enable_timing=True) for _ in range(4)] for _ in range(work.steps)]
    for events in marks:
        record(events, 0)
        step(events)
    torch.cuda.synchronize()
    result["peak_bytes"] = torch.cuda.max_memory_allocated()
    result["step_ms"] = [events[0].elapsed_time(events[3]) for events in marks]
    for part, name_ in enumerate(("forward_ms", "backward_ms", "optimizer_ms")):
        result[name_] = [events[part].elapsed_time(events[part + 1]) for events in marks]
    if work.profile:
        result["profile"] = kernel_times(step)
    return result


def record(marks: Sequence[torch.cuda.Event], index: int) -> None:
    """Marks a point of a timed step."""
    if marks:
        marks[index].record()


def in_own_process(name: str, work: Work, out: Path) -> dict[str, Any]:
    """`train` in a new process; its log goes to a file."""
    result, log = out / f"train_{name}.json", out / f"train_{name}.log"
    command = [sys.executable, "-m", "benchmarks.train_step", "--train", name]
    command += ["--work", json.dumps(asdict(work)), "--result", str(result)]
    paths = [str(ROOT), os.environ.get("PYTHONPATH", "")]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, paths))}
    with log.open("w") as file:
        subprocess.run(
            command, env=environment, stdout=file, stderr=subprocess.STDOUT, timeout=240, check=True
        )
    return json.loads(result.read_text())


def show(name: str, result: dict[str, Any]) -> None:
    """What a contestant took."""
    parts = ", ".join(
        f"{key.removesuffix('_ms')} {summary(result[key])[0]:.2f}"
        for key in ("step_ms", "forward_ms", "backward_ms", "optimizer_ms")
    )
    print(
        f"== {name}: ms: {parts}; spread {summary(result['step_ms'])[1]:.1%}; peak "
        f"{result['peak_bytes'] / GIB:.2f} GiB; loss {result['loss']:.5f}, "
        f"grad norm {result['grad_norm']:.5f}"
    )
    if profile := result.get("profile"):
        print(f"   {profile['busy_us']:,.0f} us in {profile['launches']:.0f} kernels")
        for us, count, kernel in profile["kernels"][:16]:
            print(f"  {us:9,.1f} us {count:6.0f} x {kernel[:90]}")


def merged(one: dict[str, Any], other: dict[str, Any]) -> dict[str, Any]:
    """Two runs of one contestant: the times of both, the larger peak."""
    times = {key: one[key] + other[key] for key in one if key.endswith("_ms")}
    peak = max(one["peak_bytes"], other["peak_bytes"])
    return {**one, **times, "peak_bytes": peak}


def compare(mine: dict, theirs: dict, shape: str, baseline: str, floor: float) -> list[Timing]:
    """The lines of the table: time, and peak memory."""
    if abs(mine["loss"] - theirs["loss"]) > 0.01 * abs(theirs["loss"]):
        raise RuntimeError(f"not the same function: loss {mine['loss']} against {theirs['loss']}")
    (ms, spread), (other, other_spread) = summary(mine["step_ms"]), summary(theirs["step_ms"])
    peak, other_peak = mine["peak_bytes"] / GIB, theirs["peak_bytes"] / GIB
    memory = f"{peak:.2f} against {other_peak:.2f} GiB"
    return [
        Timing("training step", shape, baseline, ms, other, floor, max(spread, other_spread)),
        Timing("training step", f"{shape}: peak memory", baseline, peak, other_peak, floor,
               note=memory, mean=True),
    ]  # fmt: skip


@row("training step", TEST)
def training_step() -> Iterator[Timing]:
    """Time and peak memory."""
    names = ["torch", "ours", "torch", "ours", "megatron", "ours-compiled"]
    yield from _training_step(names, Work(), Path(tempfile.mkdtemp()))


def _training_step(names: Sequence[str], work: Work, out: Path) -> Iterator[Timing]:
    results: dict[str, dict[str, Any]] = {}
    failures: dict[str, str] = {}
    for name in names:
        try:
            result = in_own_process(name, work, out)
            show(name, result)
            results[name] = merged(results[name], result) if name in results else result
        except (subprocess.SubprocessError, OSError) as error:
            log = (out / f"train_{name}.log").read_text().splitlines()
            failures[name] = "\n".join([str(error), *log[-25:]])
            print(f"{name} failed: {failures[name]}")
    lengths = work.lengths
    shape = f"Qwen3-8B, {work.layers} layers, {len(lengths)} x {lengths[0]} tokens packed"
    for name in (n for n in results if n.startswith("ours")):
        for other in (n for n in results if n in BASELINES):
            floor = 1.0 if other != "torch-eager" else 0.0
            which = "" if name == "ours" else ", our layers under torch.compile"
            yield from compare(
                results[name], results[other], shape + which, BASELINES[other], floor
            )


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument(
        "--contestants",
        default="torch,ours,torch,ours,megatron,ours-compiled",
        help="in this order; one that is named again runs again, so that a drift of clocks shows",
    )
    parser.add_argument("--layers", type=int, default=LAYERS)
    parser.add_argument("--profile", action="store_true", help="list the kernels of a step")
    parser.add_argument("--logs", type=Path, default=None, help="folder for logs and results")
    parser.add_argument("--out", type=Path, default=None, help="folder of the table to update")
    parser.add_argument("--train", help=argparse.SUPPRESS)
    parser.add_argument("--work", help=argparse.SUPPRESS)
    parser.add_argument("--result", type=Path, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.train:
        given = json.loads(options.work)
        options.result.write_text(json.dumps(train(options.train, Work(**given))))
        return 0
    from benchmarks.table import missed, update

    logs = options.logs or Path(tempfile.mkdtemp())
    logs.mkdir(parents=True, exist_ok=True)
    work = Work(layers=options.layers, profile=options.profile)
    lines = update(options.out or logs, _training_step(options.contestants.split(","), work, logs))
    for line in lines:
        print({key: value for key, value in line.items() if key != "run"})
    return int(any(missed(line) for line in lines))


if __name__ == "__main__":
    sys.exit(main())
