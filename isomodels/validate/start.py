"""What a host asks before it runs a kernel: was this device proved?"""

import logging
import time
import warnings
from collections.abc import Collection, Mapping

import torch

from isomodels.errors import CheckpointError, UnsupportedError
from isomodels.validate.battery import Depth, Operation, Place, load_operations
from isomodels.validate.device import (
    facts,
    refuse_device,
    refuse_model,
    triton_version,
    with_index,
)
from isomodels.validate.interpret import use_interpreter
from isomodels.validate.report import Report, load, store
from isomodels.validate.run import Outcome, Tell, run_battery, run_in_processes

log = logging.getLogger(__name__)


def validate(
    device: torch.device,
    depth: Depth = "full",
    names: list[str] | None = None,
    tell: Tell | None = None,
) -> Report:
    """Run the battery on a device.

    Args:
        device: a CPU, or a GPU of this process.
        depth: "quick" or "full".
        names: some operations only; such a report is not to be stored.
        tell: see `run_battery`.

    Raises:
        UnsupportedError: the device or its Triton is refused.
    """
    refuse_device(device)
    start = time.perf_counter()
    device = with_index(device)
    place = Place(device, depth)
    run = run_in_processes if place.on_gpu and depth == "full" else run_battery
    outcomes = run(place, names, tell)
    return Report(depth, facts(device), outcomes, time.perf_counter() - start)


def interpreted(names: list[str] | None = None, tell: Tell | None = None) -> Report:
    """Run the Triton kernels in Triton's interpreter, in fp32 at tiny sizes.

    For a process of its own: afterwards its operators run on the CPU what they run on a GPU.

    Raises:
        UnsupportedError: Triton is missing, or TRITON_INTERPRET was not set in time.
    """
    use_interpreter()
    cpu = torch.device("cpu")
    start = time.perf_counter()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", RuntimeWarning)  # numpy's, of the NaN that is meant
        outcomes = run_battery(Place(cpu, interpreted=True), names, tell)
    where = {**facts(cpu), "backend": "triton, interpreted", "triton": triton_version()}
    return Report("interpreted", where, outcomes, time.perf_counter() - start)


def require_validated(
    device: torch.device,
    *,
    dtype: torch.dtype,
    head_dim: int | None,
    operators: Collection[str] | None = None,
    trains: bool = True,
) -> None:
    """Go on only on a device whose kernels passed the battery; for the start of a host.

    A stored report decides at once. What it lacks of this model's operations, the quick battery
    proves here and now, and the report is stored. Workers that start together may all run it; the
    last one's report stays. Random state, default dtype and free memory are afterwards what they
    were. There is no way around it.

    Args:
        device: on which the model will run.
        dtype: of the model.
        head_dim: of the model's attention; see `refuse_model`.
        operators: those that the model runs, under `isomodels::`; None for all there are.
        trains: whether their gradients are needed.

    Raises:
        UnsupportedError: a device, Triton, dtype or head size that is refused, or kernels that do
            not pass.
    """
    refuse_device(device)
    device = with_index(device)
    refuse_model(device, dtype=dtype, head_dim=head_dim)
    here = facts(device)
    place = Place(device, "quick", trains=trains)
    needed = [
        op
        for op in load_operations().values()
        if op.runs_on(place) and (operators is None or not op.covers.isdisjoint(operators))
    ]
    report, reason = load(here)
    known = report.outcomes if report else {}
    if not _failed(needed, known) and not (report and report.kind == "full"):
        missing = [op.name for op in needed if not _proved(op, place, known)]
        if missing:
            log.warning("isomodels: %s; running the quick battery", reason or "not all is proved")
            report = _prove(place, missing, known)
            log.warning("isomodels: the quick battery took %.1f s", report.seconds)
            known = report.outcomes
    if failed := _failed(needed, known):
        raise UnsupportedError(
            f"isomodels: kernels failed their checks on {here['device']} "
            f"({', '.join(failed)}): run `isomodels validate --device {device}` to see why"
        )


def _failed(needed: list[Operation], known: Mapping[str, Outcome]) -> list[str]:
    return [op.name for op in needed if op.name in known and not known[op.name].passed]


def _proved(op: Operation, place: Place, known: Mapping[str, Outcome]) -> bool:
    return op.name in known and known[op.name].checks.keys() >= set(op.names(place))


def _prove(place: Place, missing: list[str], known: Mapping[str, Outcome]) -> Report:
    start = time.perf_counter()
    found = run_battery(place, missing)
    seconds = time.perf_counter() - start
    report = Report("quick", facts(place.device), {**known, **found}, seconds)
    try:
        store(report)
    except CheckpointError as error:
        log.warning("isomodels: the report is not kept, each start will run it: %s", error)
    return report
