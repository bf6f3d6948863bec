"""Counting, for each case, how many logprobs were compared and how many differ in a bit."""

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np

from isomodels.vllm.engine import Result, Step

ENGINE_CASES = (
    "engine_prefill",
    "engine_chunked_prefill",
    "engine_prefix_hit",
    "engine_decode",
    "engine_resume",
)
GRAPH_CASES = ("engine_decode_graph",)
TRAINER_CASES = ("trainer_forward", "trainer_score", "trainer_recompute")
MIN_COMPARED = 200


def cases_of(device: str) -> tuple[str, ...]:
    """The cases that exist on "cpu" or "cuda"."""
    graphs = GRAPH_CASES if device == "cuda" else ()
    return (*ENGINE_CASES, *graphs, *TRAINER_CASES)


def same_bits(a: float, b: float) -> bool:
    """Whether two fp32 values have one bit pattern."""
    return np.float32(a).view(np.int32) == np.float32(b).view(np.int32)


@dataclass
class Tally:
    """One case: logprobs compared, those with other bits, the largest difference.

    `not_finite` counts logprobs that are NaN or infinite on either side: equal ones prove nothing.
    """

    compared: int = 0
    differ: int = 0
    max_abs: float = 0.0
    not_finite: int = 0

    def add(self, ours: float, reference: float) -> bool:
        """Compare two fp32 values by bit pattern; True if they differ."""
        self.compared += 1
        finite = math.isfinite(ours) and math.isfinite(reference)
        self.not_finite += not finite
        if same_bits(ours, reference):
            return False
        self.differ += 1
        if finite:
            self.max_abs = max(self.max_abs, abs(ours - reference))
        return True

    def merge(self, other: "Tally") -> None:
        """Add another tally of the same case."""
        self.compared += other.compared
        self.differ += other.differ
        self.max_abs = max(self.max_abs, other.max_abs)
        self.not_finite += other.not_finite


@dataclass(frozen=True)
class Difference:
    """The first logprob that differs: of token `position` of `token_ids`."""

    case: str
    token_ids: tuple[int, ...]
    position: int
    ours: float
    reference: float


class Comparison:
    """Tallies of all cases, and the first difference."""

    def __init__(self, cases: Sequence[str]) -> None:
        self.tallies = {case: Tally() for case in cases}
        self.first: Difference | None = None

    def _add(
        self, case: str, token_ids: tuple[int, ...], position: int, ours: float, reference: float
    ) -> None:
        if self.tallies[case].add(ours, reference) and self.first is None:
            self.first = Difference(case, token_ids, position, ours, reference)

    def add_engine(self, results: Iterable[Result], reference: Sequence[Sequence[float]]) -> None:
        """Engine results against the trainer's logprobs of the same sequences.

        `reference[i][p - 1]` is the trainer's logprob of token p of sequence i.
        """
        for result, expected in zip(results, reference, strict=True):
            token_ids = sequence(result)
            for p, logprob in enumerate(result.prompt_logprobs or (), start=1):
                self._add(result.prompt_case(), token_ids, p, logprob, expected[p - 1])
            for i, token in enumerate(result.tokens):
                p = len(result.prompt) + i
                self._add(result.case(i), token_ids, p, token.logprob, expected[p - 1])

    def add_trainer(
        self,
        case: str,
        sequences: Iterable[tuple[int, ...]],
        ours: Sequence[Sequence[float]],
        reference: Sequence[Sequence[float]],
    ) -> None:
        """Another way of the trainer against its forward pass."""
        for token_ids, row, expected in zip(sequences, ours, reference, strict=True):
            for p, (a, b) in enumerate(zip(row, expected, strict=True), start=1):
                self._add(case, token_ids, p, a, b)


def sequence(result: Result) -> tuple[int, ...]:
    """Prompt and sampled tokens."""
    return (*result.prompt, *(token.id for token in result.tokens))


def counters(results: Sequence[Result], steps: Sequence[Step], device: str) -> dict[str, int]:
    """What the engine's scheduler did, as proof that the cases were entered."""
    counted = {
        "steps": len(steps),
        "steps_mixing_prefill_and_decode": sum(
            bool(step.prefill_rows and step.decode_rows) for step in steps
        ),
        "prefill_chunks": sum(len(r.chunks) for r in results if len(r.chunks) > 1),
        "cached_tokens": sum(r.num_cached_tokens for r in results),
        "preemptions": sum(r.preemptions for r in results),
    }
    if device == "cuda":
        counted["graph_replays"] = sum(step.replayed for step in steps)
    return counted
