"""A parity report as a table for people and as JSON for machines."""

import math
from dataclasses import asdict
from typing import Any

from rich.console import Console
from rich.table import Table

from isomodels.parity.cases import Tally
from isomodels.parity.run import Report


def as_json(report: Report) -> dict[str, Any]:
    """Plain data; `cases` sums both phases."""
    return {
        "arch": report.architecture,
        "checkpoint": report.checkpoint,
        "num_layers": report.num_layers,
        "dtype": report.dtype,
        "device": report.device,
        "device_name": report.device_name,
        "vllm_model_runner": report.model_runner,
        "trainer_layout": report.trainer_layout,
        "engine_layout": report.engine_layout,
        "forward_only": report.forward_only,
        "seed": report.seed,
        "workload": {k: v for k, v in asdict(report.workload).items() if isinstance(v, int)},
        "versions": report.versions,
        "cases": {case: asdict(report.total(case)) for case in report.cases},
        "phases": {
            phase: {
                "cases": {
                    case: asdict(report.phases[phase].tallies[case]) for case in report.cases
                },
                "routes": asdict(report.phases[phase].routes),
                "engine_counters": report.counters[phase],
            }
            for phase in report.phases
        },
        "update": {
            "losses": [loss if math.isfinite(loss) else str(loss) for loss in report.losses],
            "logprobs_changed": report.changed_by_update,
        },
        "operations_served": report.served,
        "first_difference": _place(report),
        "stock": asdict(report.stock) if report.stock else None,
        "stock_needs": report.stock_needs,
        "faults": report.faults(),
    }


def _place(report: Report) -> dict[str, Any] | None:
    if report.place is None:
        return None
    place = asdict(report.place)
    for side in ("ours", "reference"):  # JSON has no NaN
        value = place["difference"][side]
        place["difference"][side] = value if math.isfinite(value) else str(value)
    return place


def print_report(report: Report, console: Console) -> None:
    """Table, the engine's counters, what stock gives, and the verdict."""
    console.print(_table(report))
    for phase in report.phases:
        counted = report.counters[phase]
        parts = ", ".join(f"{n} {name.replace('_', ' ')}" for name, n in counted.items())
        console.print(f"The engine counted {phase.replace('_', ' ')}: {parts}.", highlight=False)
    if not report.forward_only:
        console.print(
            f"{len(report.losses)} optimizer steps changed {report.changed_by_update:,} logprobs.",
            highlight=False,
        )
    if report.has_experts:
        routes = [phase.routes for phase in report.phases.values()]
        console.print(
            f"Routes, engine against trainer as integers: {sum(r.compared for r in routes):,} "
            f"compared (a token in a layer), {_count(sum(r.differ for r in routes))} differ.",
            highlight=False,
        )
    if report.stock:
        stock = report.stock
        console.print(
            f"Without isomodels (stock vLLM against stock transformers, {stock.compared:,} of "
            f"these tokens): [bold]{stock.differ / stock.compared:.1%} differ[/bold], on average "
            f"by {stock.mean_abs:.1e}, at most by {stock.max_abs:.1e}.",
            highlight=False,
        )
    if report.stock_needs:
        console.print(
            f"Not compared with stock: vLLM's own class needs {report.stock_needs}.",
            highlight=False,
        )
    _print_verdict(report, console)


def _table(report: Report) -> Table:
    ran = "before and after a weight update"
    if report.forward_only:
        ran = "forward passes of drawn weights, one side after the other"
    table = Table(
        title=f"{report.architecture}, {report.num_layers} layers, {report.dtype}, "
        f"{report.device}: logprobs of vLLM ({report.model_runner} runner{_layout(report, True)}) "
        f"and Megatron{_layout(report, False)} by bit pattern, {ran}",
        title_justify="left",
    )
    table.add_column("case", no_wrap=True)
    for phase in report.phases:
        when = "" if report.forward_only else f"{phase.removesuffix('_update')}:"
        table.add_column(f"{when}\ncompared", justify="right")
        table.add_column("\ndiffer", justify="right")
    table.add_column("\nmax_abs", justify="right")
    total = Tally()
    for case in report.cases:
        table.add_row(*_row(case, [phase.tallies[case] for phase in report.phases.values()]))
        total.merge(report.total(case))
    table.add_section()
    table.add_row(
        "both phases, all" if len(report.phases) > 1 else "all",
        *["", ""] * (len(report.phases) - 1),
        f"{total.compared:,}",
        _count(total.differ),
        f"{total.max_abs:g}",
    )
    return table


def _layout(report: Report, engine: bool) -> str:
    """Of either side, where there is any parallelism."""
    if report.trainer_layout == report.engine_layout == "tp1":
        return ""
    return f", {report.engine_layout}" if engine else f" ({report.trainer_layout})"


def _row(case: str, tallies: list[Tally]) -> list[str]:
    cells = [case]
    for tally in tallies:
        cells += [f"{tally.compared:,}", _count(tally.differ)]
    return [*cells, f"{max(tally.max_abs for tally in tallies):g}"]


def _count(differ: int) -> str:
    return f"[red]{differ:,}[/red]" if differ else "[green]0[/green]"


def _print_verdict(report: Report, console: Console) -> None:
    faults = report.faults()
    if not faults:
        console.print("[green]Equal bits in every case.[/green]")
        return
    if report.place:
        first = report.place.difference
        console.print(
            f"[red]First difference[/red]: {first.case}, {report.place.phase.replace('_', ' ')}, "
            f"token {first.position} (id {first.token_ids[first.position]}) of a sequence of "
            f"{len(first.token_ids)}: {first.ours!r} against {first.reference!r}.",
            highlight=False,
        )
        console.print(
            f"First operation that differs: [bold]{report.place.operation}[/bold] "
            f"({report.place.traced[0]})."
            if report.place.operation
            else "Its operation is told only where both sides live at once, in no parallel layout."
            if not report.place.traced
            else f"The same tokens traced by {' and '.join(report.place.traced)} agree with the "
            "trainer in every operation.",
            highlight=False,
        )
    for fault in faults:
        console.print(f"[red]✗[/red] {fault}", highlight=False)
