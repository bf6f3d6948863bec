"""Counting, for each case, how many logprobs were compared and how many differ in a bit."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from isomodels.vllm.results import Result, Step

Logprobs = npt.NDArray[np.float32]

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


def different_bits(ours: Logprobs, reference: Logprobs) -> npt.NDArray[np.bool_]:
    """Where two fp32 arrays of one shape have other bit patterns."""
    different: npt.NDArray[np.bool_] = ours.view(np.int32) != reference.view(np.int32)
    return different


@dataclass
class Tally:
    """One case: logprobs compared, those with other bits, the largest difference.

    `not_finite` counts logprobs that are NaN or infinite on either side: equal ones prove nothing.
    """

    compared: int = 0
    differ: int = 0
    max_abs: float = 0.0
    not_finite: int = 0

    def add(self, ours: Logprobs, reference: Logprobs) -> npt.NDArray[np.bool_]:
        """Compare two fp32 arrays [n] by bit pattern -> [n], where they differ."""
        different = different_bits(ours, reference)
        finite = np.isfinite(ours) & np.isfinite(reference)
        self.compared += len(ours)
        self.differ += int(different.sum())
        self.not_finite += int((~finite).sum())
        distance = np.abs(ours[finite].astype(np.float64) - reference[finite])
        self.max_abs = max(self.max_abs, float(distance.max(initial=0.0)))
        return different

    def merge(self, other: "Tally") -> None:
        """Add another tally of the same case."""
        self.compared += other.compared
        self.differ += other.differ
        self.max_abs = max(self.max_abs, other.max_abs)
        self.not_finite += other.not_finite


@dataclass
class RouteTally:
    """Choices of experts (a token in a layer) by the engine, and those that differ."""

    compared: int = 0
    differ: int = 0

    def add(self, results: Iterable[Result], reference: Sequence[npt.NDArray[np.int32]]) -> None:
        """Compare every token that the engine computed with the trainer's [n, layers, k] ids.

        All k ids in their order: a slot's weight belongs to its place.
        """
        for result, expected in zip(results, reference, strict=True):
            for first, ids in result.routes:
                other = (ids != expected[first : first + len(ids)]).any(-1)
                self.compared += other.size
                self.differ += int(other.sum())


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
        self.routes = RouteTally()
        self.first: Difference | None = None

    def _add(
        self,
        token_ids: tuple[int, ...],
        cases: npt.NDArray[np.str_],
        first: int,
        ours: Logprobs,
        reference: Logprobs,
    ) -> None:
        """Tokens first, first + 1, ... of one sequence: case, logprob and reference of each."""
        if len(ours) != len(reference):
            raise ValueError(f"{len(ours)} logprobs and {len(reference)} references")
        differs = np.zeros(len(ours), dtype=bool)
        for case in np.unique(cases):
            chosen = cases == case
            differs[chosen] = self.tallies[str(case)].add(ours[chosen], reference[chosen])
        if self.first is None and differs.any():
            i = int(differs.argmax())
            values = float(ours[i]), float(reference[i])
            self.first = Difference(str(cases[i]), token_ids, first + i, *values)

    def add_engine(self, results: Iterable[Result], reference: Sequence[Logprobs]) -> None:
        """Engine results against the trainer's logprobs of the same sequences.

        `reference[i][p - 1]` is the trainer's logprob of token p of sequence i.
        """
        for result, expected in zip(results, reference, strict=True):
            token_ids = sequence(result)
            prompt = result.prompt_logprobs or []
            sampled = [token.logprob for token in result.tokens]
            cases = [result.prompt_case()] * len(prompt)
            cases += [result.case(i) for i in range(len(sampled))]
            # The prompt's logprobs, if any, end where those of the samples begin.
            first = len(result.prompt) - len(prompt)
            ours = np.array([*prompt, *sampled], np.float32)
            self._add(token_ids, np.array(cases), first, ours, expected[first - 1 :])

    def add_trainer(
        self,
        case: str,
        sequences: Iterable[tuple[int, ...]],
        ours: Sequence[Logprobs],
        reference: Sequence[Logprobs],
    ) -> None:
        """Another way of the trainer against its forward pass."""
        for token_ids, row, expected in zip(sequences, ours, reference, strict=True):
            self._add(token_ids, np.full(len(row), case), 1, row, expected)


def sequence(result: Result) -> tuple[int, ...]:
    """Prompt and sampled tokens."""
    return (*result.prompt, *(token.id for token in result.tokens))


def counters(results: Sequence[Result], steps: Sequence[Step], device: str) -> dict[str, int]:
    """What the engine's scheduler did, as proof that the cases were entered."""
    counted = {
        "steps": len(steps),
        "rows_in_the_largest_decode": max(step.decode_rows for step in steps),
        "tokens_in_the_longest_sequence": max(len(sequence(r)) for r in results),
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
