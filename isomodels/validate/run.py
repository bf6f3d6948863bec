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
from concurrent.futures import (
    Executor,
    Future,
    ProcessPoolExecutor,
    ThreadPoolExecutor,
    as_completed,
)
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch

from isomodels.errors import IsoError, UnsupportedError
from isomodels.validate.battery import GRAPH, Operation, Place, load_operations, missing_checks
from isomodels.validate.bits import Fault, digest

_DIGEST = "digest"
_THREADS = 16
_PROCESSES = 8


class Ended(NamedTuple):
    """How one check ended: the fault, or None; what it gave, if it was the digest."""

    seconds: float
    fault: str | None = None
    digest: str = ""
    no_memory: bool = False


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

    def note(self, check: str, ended: Ended) -> None:
        """Add the end of one check."""
        self.seconds += ended.seconds
        if check == _DIGEST and ended.fault is None:
            self.digest = ended.digest
        else:
            self.checks[check] = ended.fault


Tell = Callable[[str, int, int], None]


def run_in_processes(
    place: Place, names: Sequence[str] | None = None, tell: Tell | None = None
) -> dict[str, Outcome]:
    """`run_battery` in several processes, for all that a GPU has to compile.

    Half of the time of a compilation is Python's, which threads of one process cannot share. And
    where a kernel breaks a process, the others still get their verdict.

    Args:
        place, names, tell, and what is returned and raised: see `run_battery`.
    """
    chosen = _chosen(place, names)
    processes = max(1, min(_PROCESSES, (os.cpu_count() or 1) // 2))
    found: dict[str, Outcome] = {}
    with ProcessPoolExecutor(processes, multiprocessing.get_context("spawn")) as pool:
        ordered = sorted(chosen, key=_longest_first)
        futures = {pool.submit(run_battery, place, [op.name]): op.name for op in ordered}
        for done, future in enumerate(as_completed(futures), 1):
            name = futures[future]
            try:
                found |= future.result()
            except IsoError:
                raise
            except Exception as error:  # the process, or its device's context, is broken
                found[name] = Outcome({"process": f"ended: {error!r}"})
            if tell is not None:
                tell(name, done, len(futures))
    outcomes = {op.name: found[op.name] for op in chosen}
    return {**outcomes, **_gaps(place)} if names is None else outcomes


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

    Raises:
        UnsupportedError: too little free memory on a GPU.
    """
    chosen = _chosen(place, names)
    outcomes = {op.name: Outcome() for op in chosen}
    jobs = [(op, check) for op in chosen for check in (*op.names(place), _DIGEST)]
    done = 0
    try:
        with _undisturbed(place):
            for op, check, ended in _run_jobs(place, jobs):
                outcomes[op.name].note(check, ended)
                done += 1
                if tell is not None:
                    tell(f"{op.name}: {check}", done, len(jobs))
    except torch.AcceleratorError:
        # A kernel broke the device's context, so that nothing can be restored: its faults stand.
        if all(outcome.passed for outcome in outcomes.values()):
            raise
    return {**outcomes, **_gaps(place)} if names is None else outcomes


def _chosen(place: Place, names: Sequence[str] | None) -> list[Operation]:
    return [
        op
        for name, op in load_operations().items()
        if op.runs_on(place) and (names is None or name in names)
    ]


def _longest_first(op: Operation) -> tuple[bool, int]:
    return not op.long, -len(op.checks)


def _gaps(place: Place) -> dict[str, Outcome]:
    missing = missing_checks() if place.depth == "full" else []
    return {"battery": Outcome(dict.fromkeys(missing, "missing"))} if missing else {}


Job = tuple[Operation, str]


def _run_jobs(place: Place, jobs: list[Job]) -> Iterator[tuple[Operation, str, Ended]]:
    threads = min(_THREADS, os.cpu_count() or 1) if place.on_gpu else 1
    # Other threads may not allocate while a graph is captured.
    alone = [job for job in jobs if job[1] == GRAPH]
    for op, check, ended in _in_threads(place, [j for j in jobs if j[1] != GRAPH], threads):
        if ended.no_memory:
            alone.append((op, check))
        else:
            yield op, check, ended
    if alone and place.on_gpu:
        torch.cuda.empty_cache()
    for op, check, ended in _in_threads(place, alone, 1):
        if ended.no_memory:
            free = torch.cuda.mem_get_info(place.device)[0] / 2**30
            raise UnsupportedError(
                f"isomodels: {free:.1f} GiB of free memory on {place.device} are too few to check "
                f"{op.name}: free some, and start again"
            )
        yield op, check, ended


def _in_threads(
    place: Place, jobs: list[Job], threads: int
) -> Iterator[tuple[Operation, str, Ended]]:
    if not jobs:
        return
    jobs = sorted(jobs, key=lambda job: _longest_first(job[0]))
    with (
        ThreadPoolExecutor(threads, "isomodels-compile") as compilers,
        ThreadPoolExecutor(
            threads, "isomodels-validate", initializer=_compiling_once(place, compilers)
        ) as pool,
    ):
        futures: dict[Future, Job] = {pool.submit(run_check, place, *job): job for job in jobs}
        try:
            for future in as_completed(futures):
                yield *futures[future], future.result()
        finally:
            pool.shutdown(cancel_futures=True)


def _compiling_once(place: Place, compilers: Executor) -> Callable[[], object] | None:
    """What lets threads share a compilation: of 101 that 16 threads began, 54 were different."""
    if not place.on_gpu:
        return None
    from triton import AsyncCompileMode

    # Entered in each thread and never left: leaving waits for the kernels of all of them.
    return AsyncCompileMode(compilers).__enter__


def run_check(place: Place, op: Operation, check: str) -> Ended:
    """One check, or the digest, in this thread."""
    start = time.perf_counter()

    def ended(fault: str | None = None, **more: Any) -> Ended:
        return Ended(time.perf_counter() - start, fault, **more)

    try:
        with torch.cuda.device(place.device) if place.on_gpu else nullcontext():
            if check == _DIGEST:
                return ended(digest=digest(op.outputs(place)) if op.outputs else "")
            op.checks[check](place)
            if place.on_gpu:
                torch.cuda.synchronize()
            return ended()
    except Fault as fault:
        return ended(str(fault))
    except torch.OutOfMemoryError:
        return ended(no_memory=True)
    except Exception as error:  # a kernel that cannot run has failed its check
        at = traceback.extract_tb(error.__traceback__)[-1]
        text = str(error).strip().splitlines() or [""]
        where = f"{os.path.basename(at.filename)}:{at.lineno}"
        return ended(f"{type(error).__name__}: {text[0]} ({where})")


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
