"""A report of the battery: as data, as JSON on disk, and as a table."""

import datetime
import hashlib
import json
import os
import tempfile
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from isomodels.errors import CheckpointError
from isomodels.validate.run import Outcome

if TYPE_CHECKING:
    from rich.console import Console

FORMAT = 1
KINDS = ("quick", "full")


@dataclass
class Report:
    """What the battery found.

    Attributes:
        kind: "quick" or "full"; "interpreted" and partial reports are not stored.
        facts: `device.facts` of the machine: where the report is valid.
        outcomes: by operation.
        seconds: from start to end.
        date: UTC, ISO 8601.
    """

    kind: str
    facts: dict[str, Any]
    outcomes: dict[str, Outcome]
    seconds: float
    date: str = ""

    def __post_init__(self) -> None:
        if not self.date:
            now = datetime.datetime.now(datetime.UTC)
            self.date = now.isoformat(timespec="seconds")

    @property
    def passed(self) -> bool:
        """Whether there were operations, and every check of each passed."""
        return bool(self.outcomes) and all(o.passed and o.checks for o in self.outcomes.values())

    def failed(self) -> list[str]:
        """Operations with a fault."""
        return [name for name, outcome in self.outcomes.items() if not outcome.passed]

    def as_json(self) -> dict[str, Any]:
        """Plain data."""
        operations = {
            name: {"passed": outcome.passed, **asdict(outcome)}
            for name, outcome in self.outcomes.items()
        }
        for operation in operations.values():
            operation["seconds"] = round(operation["seconds"], 3)
        return {
            "format": FORMAT,
            "kind": self.kind,
            "passed": self.passed,
            "date": self.date,
            "seconds": round(self.seconds, 3),
            "facts": self.facts,
            "operations": operations,
        }


def read_json(data: Any) -> Report:
    """The report that `as_json` gave.

    Raises:
        ValueError: it is none, or does not agree with itself.
    """
    try:
        if data["format"] != FORMAT or data["kind"] not in (*KINDS, "interpreted"):
            raise ValueError(f"format {data['format']}, kind {data['kind']}")
        outcomes = {}
        for name, value in data["operations"].items():
            checks = {str(k): v if v is None else str(v) for k, v in value["checks"].items()}
            outcomes[name] = Outcome(checks, float(value["seconds"]), str(value["digest"]))
            if outcomes[name].passed is not value["passed"]:
                raise ValueError(f"{name} does not agree with its checks")
        report = Report(
            data["kind"], dict(data["facts"]), outcomes, float(data["seconds"]), str(data["date"])
        )
        if not outcomes or report.passed is not data["passed"]:
            raise ValueError("the verdict does not agree with the checks")
    except (KeyError, TypeError, AttributeError) as error:
        raise ValueError(f"no report of isomodels validate ({error!r})") from None
    return report


# The user's cache


def cache_file(facts: dict[str, Any]) -> Path:
    """Where the report of a machine lies."""
    import platformdirs

    name = hashlib.sha256(json.dumps(facts, sort_keys=True).encode()).hexdigest()[:32]
    return platformdirs.user_cache_path("isomodels") / "validate" / f"{name}.json"


def load(facts: dict[str, Any]) -> tuple[Report | None, str]:
    """The stored report of a machine.

    Returns:
        (report, ""), or (None, a sentence that says why there is none). A report that is damaged or
        of another machine counts as none.
    """
    file = cache_file(facts)
    try:
        report = read_json(json.loads(file.read_text()))
    except FileNotFoundError:
        return None, "this device and these versions were not validated yet"
    except (OSError, ValueError) as error:
        return None, f"{file} is damaged ({error})"
    if report.facts != facts or report.kind not in KINDS:
        return None, f"{file} is the report of another machine or version"
    return report, ""


def store(report: Report) -> Path:
    """Put a report into the cache at once or not at all; several processes may.

    Raises:
        CheckpointError: the folder cannot be written.
    """
    file = cache_file(report.facts)
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
        handle, name = tempfile.mkstemp(dir=file.parent, prefix=f".{file.stem}.", suffix=".tmp")
        try:
            with os.fdopen(handle, "w") as temporary:
                json.dump(report.as_json(), temporary, indent=1)
            os.replace(name, file)
        except BaseException:
            Path(name).unlink(missing_ok=True)
            raise
    except OSError as error:
        raise CheckpointError(f"{file.parent}: cannot be written ({error.strerror})") from None
    return file


# For people


def print_report(report: Report, console: "Console") -> None:
    """The table, every fault, and the verdict."""
    from rich.markup import escape
    from rich.table import Table

    facts = report.facts
    of = ", ".join(
        f"{label} {facts[key]}"
        for key, label in (
            ("compute_capability", "compute capability"),
            ("isa", "instructions"),
            ("driver", "driver"),
            ("torch", "torch"),
            ("triton", "Triton"),
            ("cuda", "CUDA"),
        )
        if facts.get(key)
    )
    title = f"{facts['device']}: {report.kind} battery, {facts['backend']} backend\n{of}"
    table = Table(title=title, title_justify="left")
    table.add_column("operation", no_wrap=True)
    table.add_column("checks", justify="right")
    table.add_column("verdict")
    table.add_column("seconds", justify="right")
    table.add_column("digest of outputs", no_wrap=True)
    for name, outcome in report.outcomes.items():
        bad = sum(fault is not None for fault in outcome.checks.values())
        verdict = f"[red]{bad} failed[/red]" if bad else "[green]pass[/green]"
        digest = outcome.digest[:16]
        table.add_row(name, str(len(outcome.checks)), verdict, f"{outcome.seconds:.1f}", digest)
    console.print(table)
    for name, outcome in report.outcomes.items():
        for check, fault in outcome.checks.items():
            if fault is not None:
                console.print(f"[red]✗[/red] {name}, {check}: {escape(fault)}", highlight=False)
    checks = sum(len(outcome.checks) for outcome in report.outcomes.values())
    if report.passed:
        console.print(f"[green]All {checks} checks passed[/green] in {report.seconds:.1f} s.")
    else:
        failed = ", ".join(report.failed())
        console.print(
            f"[red]Failed: {failed}[/red]. No model that runs them starts on this device until "
            "they pass."
        )
