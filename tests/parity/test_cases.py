"""The comparison itself: a wrong bit is seen, an unproven case is a fault."""

import math

import numpy as np
import pytest

from isomodels.parity.cases import MIN_COMPARED, Comparison, Logprobs, Tally, cases_of
from isomodels.parity.run import PHASES, Report
from isomodels.parity.workload import WORKLOADS
from isomodels.vllm.results import Result, Token

CASES = cases_of("cpu")


def _array(*values: float) -> Logprobs:
    return np.array(values, np.float32)


@pytest.mark.parametrize(
    ("ours", "reference", "differ"),
    [
        (-1.5, -1.5, False),
        (-0.0, 0.0, True),  # equal as numbers, not as bits
        (-1.0, math.nextafter(-1.0, 0.0), False),  # the same fp32 value
        (-1.0, -1.0 + 2**-24, True),  # one unit in the last place of fp32
        (math.nan, math.nan, False),  # counted as not finite
        (-math.inf, -1.0, True),
    ],
)
def test_tally_compares_bit_patterns(ours: float, reference: float, differ: bool) -> None:
    tally = Tally()
    assert tally.add(_array(ours), _array(reference)).tolist() == [differ]
    assert (tally.compared, tally.differ) == (1, int(differ))


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_equal_logprobs_that_are_not_finite_prove_nothing(value: float) -> None:
    report = _clean_report()
    report.phases["before_update"].tallies["engine_decode"].add(_array(value), _array(value))
    assert report.faults() == ["engine_decode before_update: 1 logprobs are not finite"]


def test_losses_that_are_not_finite_are_a_fault() -> None:
    report = _clean_report()
    report.losses = [1.0, math.nan]
    assert report.faults() == ["the losses are not finite: [1.0, nan]"]


def test_tally_keeps_the_largest_difference() -> None:
    tally = Tally()
    differ = tally.add(_array(-1.0, -1.25, -1.125, -math.inf), _array(-1.0, -1.0, -1.0, -math.inf))
    assert differ.tolist() == [False, True, True, False]
    assert (tally.differ, tally.max_abs) == (2, 0.25)


def _result(**changes: object) -> Result:
    tokens = [Token(5, -2.0, 0, 3, 0, 0), Token(6, -3.0, 1, 1, 3, 0), Token(7, -4.0, 2, 1, 4, 1)]
    fields = {"prompt_logprobs": [-0.5, -1.0], "chunks": [(0, 3)], **changes}
    return Result(0, 0, (1, 2, 3), tokens, **fields)  # type: ignore[arg-type]


def test_each_token_counts_for_the_case_it_was_computed_in() -> None:
    comparison = Comparison(CASES)
    comparison.add_engine([_result()], [_array(-0.5, -1.0, -2.0, -3.0, -4.0)])
    counted = {case: tally.compared for case, tally in comparison.tallies.items() if tally.compared}
    assert counted == {"engine_prefill": 3, "engine_decode": 1, "engine_resume": 1}
    assert comparison.first is None


def test_chunks_and_cached_tokens_name_the_case() -> None:
    comparison = Comparison(CASES)
    comparison.add_engine(
        [_result(chunks=[(0, 2), (2, 3)])], [_array(-0.5, -1.0, -2.0, -3.0, -4.0)]
    )
    assert comparison.tallies["engine_chunked_prefill"].compared == 3
    hit = _result(prompt_logprobs=None, num_cached_tokens=2)
    comparison = Comparison(CASES)
    comparison.add_engine([hit], [_array(-0.5, -1.0, -2.0, -3.0, -4.0)])
    assert comparison.tallies["engine_prefix_hit"].compared == 2


def test_the_first_difference_is_kept_with_its_place() -> None:
    comparison = Comparison(CASES)
    comparison.add_engine([_result()], [_array(-0.5, -1.5, -2.0, -3.5, -4.0)])
    assert comparison.first is not None
    assert (comparison.first.case, comparison.first.position) == ("engine_prefill", 2)
    assert (comparison.first.ours, comparison.first.reference) == (-1.0, -1.5)
    assert comparison.tallies["engine_prefill"].differ == 1
    assert comparison.tallies["engine_decode"].differ == 1


def test_without_prompt_logprobs_the_samples_meet_their_own_references() -> None:
    comparison = Comparison(CASES)
    comparison.add_engine([_result(prompt_logprobs=None)], [_array(9, 9, -2.0, -3.0, -4.0)])
    assert comparison.first is None
    assert sum(tally.compared for tally in comparison.tallies.values()) == 3


def test_a_missing_logprob_is_no_silent_match() -> None:
    with pytest.raises(ValueError, match="references"):
        Comparison(CASES).add_engine([_result()], [_array(-0.5, -1.0, -2.0, -3.0)])
    with pytest.raises(ValueError, match="references"):
        Comparison(CASES).add_trainer("trainer_score", [(1, 2)], [_array(0.0)], [_array(0.0, 1.0)])


def _clean_report() -> Report:
    quick = WORKLOADS["quick"]
    report = Report("A", "path", 1, "float32", "cpu", 0, quick, {}, changed_by_update=1)
    for phase in PHASES:
        report.phases[phase] = Comparison(CASES)
        for case in CASES:
            report.phases[phase].tallies[case].compared = MIN_COMPARED
        report.counters[phase] = {"preemptions": 1, "cached_tokens": 1}
    return report


def test_a_complete_report_has_no_fault() -> None:
    assert _clean_report().faults() == []


@pytest.mark.parametrize("case", CASES)
def test_a_case_that_was_hardly_entered_is_a_fault(case: str) -> None:
    report = _clean_report()
    report.phases["after_update"].tallies[case].compared = MIN_COMPARED - 1
    assert report.faults() == [f"{case} after_update: 199 compared, 200 are needed"]


def test_a_counter_at_zero_and_an_update_without_effect_are_faults() -> None:
    report = _clean_report()
    report.counters["before_update"]["preemptions"] = 0
    report.changed_by_update = 0
    assert report.faults() == [
        "before_update: the engine counted no preemptions",
        "the optimizer steps changed no logprob",
    ]
