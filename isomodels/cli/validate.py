"""`isomodels validate`: do the kernels keep their promises on this device?"""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import Console

from isomodels.cli.arguments import JsonFile, check_json_file, device_option, write_report
from isomodels.cli.files import check_written
from isomodels.cli.progress import check_bar
from isomodels.errors import CheckpointError, UnsupportedError

if TYPE_CHECKING:
    from isomodels.validate.report import Report


def validate(
    device: Annotated[
        str | None,
        device_option("Where the kernels run [default: cuda where there is a GPU]."),
    ] = None,
    quick: Annotated[
        bool, typer.Option("--quick", help="What a host runs at its start where no report is.")
    ] = False,
    interpret: Annotated[
        bool,
        typer.Option(
            "--interpret",
            help="Run the GPU's kernels in Triton's interpreter on the CPU, in fp32 at tiny "
            "sizes: errors of indices and masks show, bits do not. Keeps no report.",
        ),
    ] = False,
    operation: Annotated[
        list[str] | None,
        typer.Option(
            metavar="<name>",
            help="Only this operation, such as linear; may be repeated. Keeps no report. A wrong "
            "name lists all.",
        ),
    ] = None,
    compare: Annotated[
        Path | None,
        typer.Option(
            help="Report that --json wrote on another machine: must the outputs' bits agree?",
        ),
    ] = None,
    json_file: JsonFile = None,
) -> None:
    """Prove every kernel on this device.

    For each operation: equal bits for a row whatever its batch, place, padding, pages, cut and
    graph; no rows, one row, odd storage; subnormal numbers, signed zeros, ties, huge and tiny
    exponents, NaN beside it; the error against fp64; gradients. A fault names the operation, the
    check, the first coordinate that differs and both bit patterns.

    The report is kept in the user's cache. vLLM and Megatron start at once where it passed, refuse
    where it failed, and run the quick form where there is none. It counts for this device, these
    versions of driver, torch and Triton, and these kernels. The digests are of outputs on fixed
    inputs: equal digests on two machines mean equal bits there.

    Exit code: 0 every check passed; 1 a check failed, or outputs differ from those of --compare;
    2 bad input, or a device that is refused.

    Example: isomodels validate --json here.json
    """
    check_json_file(json_file)
    if interpret and (quick or device not in (None, "cpu")):
        raise UnsupportedError(
            "--interpret runs on the CPU and has one form: leave out --quick and --device"
        )
    if interpret and compare is not None:
        raise UnsupportedError("--interpret shows no bits that --compare could compare: use one")
    if compare is not None:
        check_written(compare, "report", "isomodels validate --json")
    if interpret and os.environ.get("TRITON_INTERPRET") != "1":
        raise typer.Exit(_in_interpreter(operation or [], json_file))
    from isomodels.validate.report import print_report

    other = _read(compare) if compare is not None else None
    report = _run(device, quick, interpret, operation)
    differ = _differences(report, other) if other is not None else []
    kept = _keep(report, partial=operation is not None)

    def show() -> None:
        console = Console()
        print_report(report, console)
        console.print(kept, highlight=False, soft_wrap=True)
        if compare is not None:
            same = f"[green]The bits of {compare} in every operation.[/green]"
            others = f"[red]Other bits than in {compare}: {', '.join(differ)}[/red]."
            console.print(others if differ else same, highlight=False, soft_wrap=True)

    write_report(json_file, json.dumps(report.as_json(), indent=2), show)
    if differ or not report.passed:
        raise typer.Exit(1)


def _read(file: Path) -> "Report":
    from isomodels.validate.report import read_json

    try:
        return read_json(json.loads(file.read_text()))
    except (OSError, ValueError, RecursionError) as error:
        raise CheckpointError(
            f"--compare {file}: no report of isomodels validate ({error}): give what --json wrote"
        ) from None


def _differences(report: "Report", other: "Report") -> list[str]:
    """Operations of both reports whose outputs differ."""
    mine, theirs = report.facts["backend"], other.facts["backend"]
    if mine != theirs:
        raise UnsupportedError(
            f"--compare: that report is of the {theirs} backend and this run of {mine}, whose bits "
            "need not agree: compare two runs of one backend"
        )
    both = [name for name in report.outcomes if name in other.outcomes]
    return [n for n in both if report.outcomes[n].digest != other.outcomes[n].digest]


def _in_interpreter(operations: list[str], json_file: Path | None) -> int:
    """This command in a process in which Triton, when first imported, interprets."""
    arguments = ["validate", "--interpret"]
    arguments += [part for name in operations for part in ("--operation", name)]
    arguments += ["--json", str(json_file)] if json_file else []
    code = "from isomodels.cli.main import app; app(prog_name='isomodels')"
    environment = {**os.environ, "TRITON_INTERPRET": "1"}
    command = [sys.executable, "-c", code, *arguments]
    return subprocess.run(command, env=environment, check=False).returncode


def _run(
    device: str | None, quick: bool, interpret: bool, operations: list[str] | None
) -> "Report":
    import torch

    from isomodels.validate.battery import Place, load_operations
    from isomodels.validate.start import interpreted, validate

    on_gpu = torch.cuda.is_available() and not interpret
    where = torch.device(device or ("cuda" if on_gpu else "cpu"))
    place = Place(where, "quick" if quick else "full", interpret)
    known = [name for name, op in load_operations().items() if op.runs_on(place)]
    for name in operations or []:
        if name not in known:
            raise UnsupportedError(f"--operation {name}: choose one of {', '.join(known)}")
    with check_bar("Validating") as tell:
        if interpret:
            return interpreted(operations, tell)
        return validate(where, place.depth, operations, tell)


def _keep(report: "Report", partial: bool) -> str:
    """Store a report that hosts may rely on; says what became of it."""
    from isomodels.validate.report import load, store

    if report.kind == "interpreted":
        return "Not kept: the interpreter shows no bits."
    if partial:
        return "Not kept: some operations only."
    old, _ = load(report.facts)
    if report.kind == "quick" and report.passed and old and old.kind == "full":
        verb = "passed" if old.passed else "failed"
        return f"Not kept: the full battery {verb} here before."
    try:
        return f"Kept as {store(report)}"
    except CheckpointError as error:
        return f"Not kept: {error}"
