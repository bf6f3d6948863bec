"""Runs the battery.

Checks run in threads of their own, so that nothing of the caller's state that torch keeps for each
thread (grad mode, default device, autocast) reaches them. On a GPU there are many: most of the time
goes into compiling, which threads share.
"""

import multiprocessing
import os
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ProcessPoolExecutor, ThreadPoolExecutor, as_completed
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field
from itertools import chain

import torch

from isomodels.validate.battery import GRAPH, Operation, Place, load_operations, missing_checks
from isomodels.validate.bits import Fault, digest

_DIGEST, _SHA = "digest", "sha256:"
_THREADS = 16
_PROCESSES = 8


@dataclass
class Outcome:
    """Of one operation.

    Attributes:
        checks: {name: None where it passed, else the fault}.
        seconds: of all its checks, of every thread.
        digest: SHA-256 of its outputs on fixed inputs; "" where there are none.
    """

    checks: dict[str, str | None] = field(default_factory=dict)
    seconds: float = 0.0
    digest: str = ""

    @property
    def passed(self) -> bool:
        """Whether every check passed."""
        return not any(self.checks.values())


Tell = Callable[[str, int, int], None]


def run_in_processes(place: Place, tell: Tell | None = None) -> dict[str, Outcome]:
    """`run_battery` of all operations on a GPU, in several processes.

    Half of the time of a compilation is Python's, which threads of one process cannot share. And
    where a kernel breaks a process, the others still get their verdict.

    Args:
        place: where, and how deep.
        tell: see `run_battery`.
    """
    names = [name for name, op in load_operations().items() if op.runs_on(place)]
    processes = max(1, min(_PROCESSES, (os.cpu_count() or 1) // 2))
    found: dict[str, Outcome] = {}
    with ProcessPoolExecutor(processes, multiprocessing.get_context("spawn")) as pool:
        order = sorted(names, key=lambda name: -len(load_operations()[name].checks))
        futures = {pool.submit(run_battery, place, [name]): name for name in order}
        for done, future in enumerate(as_completed(futures), 1):
            name = futures[future]
            error = future.exception()
            if error is None:
                found |= future.result()
            else:
                found[name] = Outcome({"process": f"ended: {error!r}"})
            if tell is not None:
                tell(name, done, len(futures))
    outcomes = {name: found[name] for name in names}
    return {**outcomes, **_gaps(place)}


def run_battery(
    place: Place, names: Sequence[str] | None = None, tell: Tell | None = None
) -> dict[str, Outcome]:
    """Run the checks of all operations, or of some.

    Leaves torch's random state as it is and gives unused memory of a GPU back.

    Args:
        place: where, and how deep.
        names: operations to run; None for all.
        tell: called as tell(what, done, total) when a check has ended.

    Returns:
        {operation: outcome}. In the full battery a gap is a fault of an operation "battery".
    """
    chosen = [
        op
        for name, op in load_operations().items()
        if op.runs_on(place) and (names is None or name in names)
    ]
    outcomes = {op.name: Outcome() for op in chosen}
    jobs = [(op, check) for op in chosen for check in (*op.names(place), _DIGEST)]
    # Other threads may not allocate while a graph is captured.
    together = [job for job in jobs if job[1] != GRAPH]
    alone = [job for job in jobs if job[1] == GRAPH]
    threads = min(_THREADS, os.cpu_count() or 1) if place.on_gpu else 1
    with _undisturbed(place):
        ended = chain(_in_threads(place, together, threads), _in_threads(place, alone, 1))
        for done, (op, check, seconds, result) in enumerate(ended, 1):
            outcome = outcomes[op.name]
            outcome.seconds += seconds
            if result and result.startswith(_SHA):
                outcome.digest = result.removeprefix(_SHA)
            else:
                outcome.checks[check] = result
            if tell is not None:
                tell(f"{op.name}: {check}", done, len(jobs))
    return {**outcomes, **_gaps(place)} if names is None else outcomes


def _gaps(place: Place) -> dict[str, Outcome]:
    missing = missing_checks() if place.depth == "full" else []
    return {"battery": Outcome(dict.fromkeys(missing, "missing"))} if missing else {}


Job = tuple[Operation, str]


def _in_threads(
    place: Place, jobs: list[Job], threads: int
) -> Iterator[tuple[Operation, str, float, str | None]]:
    if not jobs:
        return
    jobs = sorted(jobs, key=lambda job: -len(job[0].checks))  # the longest first
    with ThreadPoolExecutor(threads, "isomodels-validate") as pool:
        futures: dict[Future, Job] = {pool.submit(run_check, place, *job): job for job in jobs}
        try:
            for future in as_completed(futures):
                yield (*futures[future], *future.result())
        finally:
            pool.shutdown(cancel_futures=True)


def run_check(place: Place, op: Operation, check: str) -> tuple[float, str | None]:
    """One check in this thread: (seconds, None where it passed, a fault, or the digest)."""
    start = time.perf_counter()
    result: str | None = None
    try:
        with torch.cuda.device(place.device) if place.on_gpu else nullcontext():
            if check == _DIGEST:
                result = f"{_SHA}{digest(op.outputs(place))}" if op.outputs else None
            else:
                op.checks[check](place)
            if place.on_gpu:
                torch.cuda.synchronize()
    except Fault as fault:
        result = str(fault)
    except Exception as error:  # a kernel that cannot run has failed its check
        at = traceback.extract_tb(error.__traceback__)[-1]
        text = str(error).strip().splitlines() or [""]
        result = f"{type(error).__name__}: {text[0]} ({os.path.basename(at.filename)}:{at.lineno})"
    return time.perf_counter() - start, result


@contextmanager
def _undisturbed(place: Place) -> Iterator[None]:
    """Random state and default dtype as before, memory given back."""
    dtype = torch.get_default_dtype()
    index = place.device.index or 0
    with torch.random.fork_rng([index] if place.on_gpu else []):
        torch.set_default_dtype(torch.float32)
        try:
            if place.on_gpu:
                _start_triton(place.device)
            yield
        finally:
            torch.set_default_dtype(dtype)
            if place.on_gpu:
                torch.cuda.synchronize(place.device)
                torch.cuda.empty_cache()


def _start_triton(device: torch.device) -> None:
    """Once and before the threads, which would wait for it one and all."""
    import torch._dynamo  # torch imports it with the first call of an operator
    from triton.runtime import driver  # compiles an extension of its own

    with torch.cuda.device(device):
        torch.zeros(1, device=device)
        driver.active.get_current_device()
