"""Routes, compared as integers: another expert is seen, and so is another order of the same."""

import numpy as np
import pytest

from isomodels.parity.cases import MIN_COMPARED, RouteTally
from isomodels.vllm.results import Result
from tests.parity.test_cases import _clean_report

ROUTES = np.arange(5 * 2 * 3, dtype=np.int32).reshape(5, 2, 3) % 8  # 5 tokens, 2 layers, 3 experts


def _result(*spans: tuple[int, int], routes: np.ndarray = ROUTES) -> Result:
    """Of a sequence of 5 tokens, some computed more than once and some not."""
    return Result(0, 0, (1, 2), routes=[(start, routes[start:end]) for start, end in spans])


def test_every_computed_token_counts_in_every_layer() -> None:
    tally = RouteTally()
    tally.add([_result((0, 2), (2, 3), (0, 3)), _result((4, 5))], [ROUTES, ROUTES])
    assert (tally.compared, tally.differ) == (2 * 7, 0)


@pytest.mark.parametrize(("token", "layer"), [(0, 0), (2, 1), (4, 1)])
def test_one_expert_is_seen(token: int, layer: int) -> None:
    other = ROUTES.copy()
    other[token, layer, 1] += 1
    tally = RouteTally()
    tally.add([_result((0, 5), routes=other)], [ROUTES])
    assert (tally.compared, tally.differ) == (10, 1)


def test_the_same_experts_in_other_slots_are_seen() -> None:
    tally = RouteTally()
    tally.add([_result((0, 5), routes=ROUTES[..., ::-1].copy())], [ROUTES])
    assert tally.differ == 10


def test_a_difference_and_too_few_routes_are_faults() -> None:
    report = _clean_report()
    assert report.faults() == []  # of a model without experts
    report.has_experts = True
    for phase, comparison in report.phases.items():
        comparison.routes = RouteTally(MIN_COMPARED, 0)
        assert comparison.routes.differ == 0, phase
    assert report.faults() == []
    report.phases["before_update"].routes = RouteTally(MIN_COMPARED, 2)
    report.phases["after_update"].routes = RouteTally(MIN_COMPARED - 1, 0)
    assert report.faults() == [
        "before_update: 2 of 200 routes differ",
        "after_update: 199 routes, 200 are needed",
    ]
