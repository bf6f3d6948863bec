"""Rows of the benchmark table and how they are timed.

A row is a function that yields `Timing`s, registered with `@row`. Ours and the baseline run in
turns in one process, each as a CUDA graph over rotated inputs (so that launch gaps and a warm
cache do not flatter either), and the medians of many replays are compared. What does not fit one
process beside its baseline (an engine, a training step) runs in processes of its own.
"""

import statistics
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch

REPLAYS = 25
COLD_BYTES = 160 * 2**20  # several times the L2: what a rotation must touch before it repeats
TARGET_MS = 2.0  # how long one replay lasts at least


@dataclass(frozen=True)
class Timing:
    """One line of the table; times in milliseconds for one call.

    A `mean` sums up other lines: its ratio counts, its times mean nothing. A floor of 0: none is
    asked for.
    """

    row: str
    shape: str
    baseline: str
    ours_ms: float
    baseline_ms: float
    floor: float
    spread: float = 0.0
    note: str = ""
    mean: bool = False

    @property
    def ratio(self) -> float:
        """The baseline's time over ours: above 1 is faster than the baseline."""
        return self.baseline_ms / self.ours_ms


Row = Callable[[], Iterator[Timing]]
ROWS: dict[str, tuple[Row, str]] = {}


def row(name: str, test: str) -> Callable[[Row], Row]:
    """Register a row; `test` is the pytest file (marker gpu) that must pass before it is timed."""

    def register(function: Row) -> Row:
        ROWS[name] = (function, test)
        return function

    return register


def copies(bytes_per_call: int, most: int = 64) -> int:
    """How many sets of inputs to rotate so that each call finds its inputs outside the cache."""
    return max(1, min(most, -(-COLD_BYTES // max(bytes_per_call, 1))))


Calls = Sequence[Callable[[], object]]


def time_ms(*contestants: Calls, replays: int = REPLAYS) -> list[tuple[float, float]]:
    """Median milliseconds of one call and relative spread (p80 - p20), for each contestant.

    A contestant is a list of calls that do the same work on different inputs.
    """
    graphs = [_capture(calls) for calls in contestants]
    samples: list[list[float]] = [[] for _ in graphs]
    for _ in range(replays):
        for (graph, count), times in zip(graphs, samples, strict=True):
            begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            begin.record()
            graph.replay()
            end.record()
            end.synchronize()
            times.append(begin.elapsed_time(end) / count)
    return [summary(times) for times in samples]


def _capture(calls: Calls) -> tuple[torch.cuda.CUDAGraph, int]:
    for call in calls:
        call()
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    begin.record()
    for call in calls:
        call()
    end.record()
    end.synchronize()
    rounds = max(1, min(50, round(TARGET_MS / max(begin.elapsed_time(end), 1e-3))))
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for _ in range(rounds):
            for call in calls:
                call()
    graph.replay()
    torch.cuda.synchronize()
    return graph, rounds * len(calls)


def in_turns(
    *contestants: Callable[[], object], samples: int = 15, calls: int = 4
) -> list[tuple[float, float]]:
    """Like `time_ms`, without graphs, for calls of milliseconds that cannot be captured.

    torch's backward cannot be captured on another stream than its forward ran on.
    """
    times: list[list[float]] = [[] for _ in contestants]
    for sample in range(samples + 2):
        for call, collected in zip(contestants, times, strict=True):
            begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            torch.cuda.synchronize()
            begin.record()
            for _ in range(calls):
                call()
            end.record()
            end.synchronize()
            if sample >= 2:
                collected.append(begin.elapsed_time(end) / calls)
    return [summary(collected) for collected in times]


def kernel_times(call: Callable[[], object]) -> dict[str, Any]:
    """Kernels of one call and their time; see `kernels_of`."""
    torch.cuda.synchronize()
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profiler:
        call()
        torch.cuda.synchronize()
    return kernels_of(profiler)


def kernels_of(profiler: Any, steps: int = 1) -> dict[str, Any]:
    """What a profiler saw of `steps` steps, for one of them.

    Returns:
        `busy_us` and `launches` of all kernels, and `kernels`, the longest of them: microseconds,
        launches, name.
    """
    kernels = [
        (event.self_device_time_total / steps, event.count / steps, event.key)
        for event in profiler.key_averages()
        if event.device_type == torch.autograd.DeviceType.CUDA
    ]
    kernels.sort(reverse=True)
    return {
        "busy_us": sum(us for us, _, _ in kernels),
        "launches": sum(count for _, count, _ in kernels),
        "kernels": kernels[:40],
    }


def summary(times: Sequence[float]) -> tuple[float, float]:
    """Median and relative spread (p80 - p20)."""
    times = sorted(times)
    median = statistics.median(times)
    return median, (times[len(times) * 4 // 5] - times[len(times) // 5]) / median


_bandwidth: list[float] = []


def bandwidth() -> float:
    """Bytes per millisecond of a large copy, read plus written, measured once in this process."""
    if not _bandwidth:
        source = torch.randn(2**29, device="cuda")
        target = torch.empty_like(source)
        times = []
        for _ in range(REPLAYS):
            # Not in a graph: there a copy goes to the copy engine, which is slower.
            begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            begin.record()
            target.copy_(source)
            end.record()
            end.synchronize()
            times.append(begin.elapsed_time(end))
        _bandwidth.append(2 * source.nbytes / summary(times)[0])
    return _bandwidth[0]


def against_bandwidth(name: str, shape: str, calls: Calls, moved: int, floor: float) -> Timing:
    """A memory-bound row: the baseline is the time a copy would take for the same bytes."""
    rate = bandwidth()
    ((ms, spread),) = time_ms(calls)
    note = f"a large copy moved {rate / 1e9:.2f} TB/s"
    return Timing(name, shape, "measured memory bandwidth", ms, moved / rate, floor, spread, note)


def against(
    name: str, shape: str, baseline: str, ours: Calls, theirs: Calls, floor: float
) -> Timing:
    """A row against another implementation, timed in turns."""
    (ms, spread), (other, other_spread) = time_ms(ours, theirs)
    return Timing(name, shape, baseline, ms, other, floor, max(spread, other_spread))
