from itertools import pairwise

import pytest
import torch

from isomodels.kernels.moe_sort import moe_sort
from tests.kernel.battery import assert_registered

EXPERTS = 8


def draw(tokens, top_k, experts=EXPERTS, seed=0):
    """Distinct ids a token, some experts much more often than others."""
    generator = torch.Generator().manual_seed(seed)
    popular = torch.arange(experts, 0, -1).float().square().expand(max(tokens, 1), -1)
    return torch.multinomial(popular, top_k, generator=generator)[:tokens].int()


def assert_sorted(ids, experts):
    """The definition, slot by slot in plain Python."""
    offsets, order, places = moe_sort(ids, experts)
    assert {t.dtype for t in (offsets, order, places)} == {torch.int32}
    flat = ids.flatten().tolist()
    expected = sorted(range(len(flat)), key=lambda slot: (flat[slot], slot))
    assert order.tolist() == expected
    assert offsets.tolist() == [sum(e < expert for e in flat) for expert in range(experts + 1)]
    assert places.shape == ids.shape
    assert places.flatten()[order.long()].tolist() == list(range(len(flat)))


@pytest.mark.parametrize(("tokens", "top_k"), [(1, 1), (1, 8), (2, 3), (37, 2), (300, 8), (0, 3)])
def test_slots_are_sorted_by_expert_and_then_by_number(tokens, top_k):
    assert_sorted(draw(tokens, top_k), EXPERTS)


def test_hazards():
    assert_sorted(torch.full((50, 1), 3, dtype=torch.int32), EXPERTS)  # all tokens on one expert
    assert_sorted(torch.full((50, 1), 0, dtype=torch.int32), 1)
    assert_sorted(draw(3, 2, experts=200), 200)  # most experts have no token
    assert_sorted(draw(40, 4)[:, ::2], EXPERTS)  # columns of a wider matrix
    assert_sorted(draw(40, 4)[::2], EXPERTS)


def test_order_of_tokens_within_an_expert_follows_the_batch():
    ids = draw(64, 2)
    offsets, order, _ = moe_sort(ids, EXPERTS)
    for start, end in pairwise(offsets):
        tokens = (order[start:end] // 2).tolist()
        assert tokens == sorted(tokens)


def test_opcheck():
    assert_registered(moe_sort, (draw(5, 3), EXPERTS), trainable=False)


@pytest.mark.parametrize("wrong", [-1, EXPERTS, 2**30])
def test_an_id_out_of_range(wrong):
    ids = draw(5, 3)
    ids[2, 1] = wrong
    with pytest.raises(ValueError, match="outside the 8 experts"):
        moe_sort(ids, EXPERTS)


def test_bad_operands():
    with pytest.raises(TypeError, match=r"ids \[T, k\] in int32, got \[5, 3\] in torch.int64"):
        moe_sort(draw(5, 3).long(), EXPERTS)
    with pytest.raises(TypeError, match=r"got \[15\]"):
        moe_sort(draw(5, 3).flatten(), EXPERTS)
