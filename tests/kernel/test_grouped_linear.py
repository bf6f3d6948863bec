from itertools import pairwise

import pytest
import torch

from isomodels.kernels.grouped_linear import grouped_linear
from isomodels.kernels.linear import linear
from isomodels.kernels.moe_sort import moe_sort
from tests.kernel.battery import (
    DTYPES,
    KINDS,
    ROWS,
    THREADS,
    assert_gradients,
    assert_registered,
    assert_row_invariant,
    assert_same_bits,
    hard,
    layouts,
    odd_storage,
    relative_rms,
    threads,
    unit_error,
)
from tests.kernel.test_moe_sort import EXPERTS, draw

TOP_K = 3
IDS = draw(ROWS, TOP_K)
# (K, N): no multiple of a tile, odd, and an expert's two projections; 2 * I == H and I == H too
SIZES = [(64, 96), (65, 3), (100, 130), (127, 64), (64, 64), (1000, 40)]


def weights(n, k, kind="wide", dtype=torch.float32):
    return hard(EXPERTS, n, k, kind=kind, seed=1, dtype=dtype)


def by_slot(x, weight, ids=IDS):
    """[T, K] -> [T, k, N] through sort, product and the way back."""
    offsets, order, places = moe_sort(ids, len(weight))
    return grouped_linear(x, weight, offsets, order, places)[places.long()]


def expert_by_expert(x, weight, ids=IDS):
    """The same from `linear`, each slot alone."""
    rows = [
        torch.cat([linear(x[t : t + 1], weight[e]) for e in chosen])
        for t, chosen in enumerate(ids.tolist())
    ]
    return torch.stack(rows)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("k", "n"), SIZES)
def test_a_slot_has_the_bits_of_its_experts_linear(k, n, dtype):
    x, weight = hard(ROWS, k, dtype=dtype), weights(n, k, dtype=dtype)
    expected = expert_by_expert(x, weight)
    assert_same_bits(by_slot(x, weight), expected)
    # rows that lie sorted already: the second projection
    offsets, order, _ = moe_sort(IDS, EXPERTS)
    rows = x[order.long() // TOP_K]
    placed = grouped_linear(rows, weight, offsets)
    assert_same_bits(placed, expected.flatten(0, 1)[order.long()], "sorted rows")


@pytest.mark.parametrize("kind", KINDS)
def test_hard_values(kind):
    x, weight = hard(ROWS, 96, kind=kind), weights(33, 96, kind=kind)
    assert_same_bits(by_slot(x, weight), expert_by_expert(x, weight))


@pytest.mark.parametrize("dtype", DTYPES)
def test_rows_stand_alone_whoever_shares_the_expert(dtype):
    # All rows go to the same experts, so that the battery's other rows lie beside each row.
    weight = weights(70, 96, dtype=dtype)

    def op(x):
        same = torch.tensor([[2, 5]], dtype=torch.int32).expand(len(x), 2).contiguous()
        return by_slot(x, weight, same)

    assert_row_invariant(op, hard(ROWS, 96, dtype=dtype))


def test_neighbours_and_their_experts_do_not_matter():
    x, weight = hard(ROWS, 96), weights(70, 96)
    whole = by_slot(x, weight)
    for seed in range(1, 9):
        ids = draw(ROWS, TOP_K, seed=seed)
        keep = torch.arange(ROWS) % 3 == seed % 3
        ids[keep] = IDS[keep]
        other = hard(ROWS, 96, seed=seed)
        other[keep] = x[keep]
        other[0 if not keep[0] else 1] = torch.nan  # as rows of padding may be
        assert_same_bits(by_slot(other, weight, ids)[keep], whole[keep], f"others of seed {seed}")
    for row in range(ROWS):
        alone = by_slot(x[row : row + 1], weight, IDS[row : row + 1])
        assert_same_bits(alone, whole[row : row + 1], f"row {row} alone")


def test_hazards():
    x, weight = hard(50, 64), weights(40, 64)
    one = torch.full((50, 1), 3, dtype=torch.int32)  # all tokens on one expert, none on the others
    assert_same_bits(by_slot(x, weight, one)[:, 0], linear(x, weight[3]))
    assert by_slot(x[:0], weight, one[:0]).shape == (0, 1, 40)
    few = torch.tensor([[7, 0]], dtype=torch.int32)
    assert_same_bits(by_slot(x[:1], weight, few)[0, 0], linear(x[:1], weight[7])[0])


@pytest.mark.parametrize("dtype", DTYPES)
def test_threads_and_storage_do_not_matter(dtype):
    x, weight = hard(ROWS, 100, dtype=dtype), weights(72, 100, dtype=dtype)
    whole = by_slot(x, weight)
    for count in THREADS:
        with threads(count):
            assert_same_bits(by_slot(x, weight), whole, f"{count} threads")
    for name, same in layouts(x).items():
        assert_same_bits(by_slot(same, weight), whole, name)
    assert_same_bits(by_slot(x, odd_storage(weight)), whole, "weight at an odd offset")
    turned = weight.transpose(1, 2).contiguous().transpose(1, 2)
    assert_same_bits(by_slot(x, turned), whole, "weight stored transposed")


@pytest.mark.parametrize("dtype", DTYPES)
def test_accuracy(dtype):
    x = hard(ROWS, 1000, kind="normal", dtype=dtype)
    weight = weights(40, 1000, "normal", dtype)
    exact = torch.einsum("tknc,tc->tkn", weight.double()[IDS.long()], x.double())
    assert relative_rms(by_slot(x, weight), exact) < unit_error(dtype, 1000)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("gathered", [True, False])
def test_gradients(dtype, gathered):
    offsets, order, places = moe_sort(IDS, EXPERTS)
    sorted_ids = IDS.flatten()[order.long()].long()
    x = hard(ROWS if gathered else len(order), 48, kind="normal", dtype=dtype)
    sorting = (order, places) if gathered else ()

    def reference(x, weight):
        rows = x[order.long() // TOP_K] if gathered else x
        return torch.einsum("rnc,rc->rn", weight[sorted_ids], rows)

    assert_gradients(
        lambda x, weight: grouped_linear(x, weight, offsets, *sorting),
        reference,
        x,
        weights(30, 48, "normal", dtype),
        bound=unit_error(dtype, 48),
    )


def test_an_expert_without_tokens_has_a_gradient_of_zero():
    x, weight = hard(5, 8, kind="normal"), weights(6, 8, "normal").requires_grad_()
    ids = torch.tensor([[1, 4]] * 5, dtype=torch.int32)
    by_slot(x, weight, ids).sum().backward()
    assert [bool(g.any()) for g in weight.grad] == [e in (1, 4) for e in range(EXPERTS)]
    assert (weight.grad[0].view(torch.int32) == 0).all()


def test_opcheck():
    offsets, order, places = moe_sort(IDS[:5], EXPERTS)
    x, weight = hard(5, 8).requires_grad_(), weights(6, 8).requires_grad_()
    assert_registered(grouped_linear, (x, weight, offsets, order, places))
    rows = hard(15, 8).requires_grad_()
    assert_registered(grouped_linear, (rows, weight, offsets))


def test_bad_operands():
    offsets, order, places = moe_sort(IDS[:5], EXPERTS)
    x, weight = hard(5, 8), weights(6, 8)
    for arguments, message in (
        ((x, weight[0], offsets, order, places), r"\[E, N, K\], got \[5, 8\] and \[6, 8\]"),
        ((x, weights(6, 9), offsets, order, places), r"\[5, 8\] and \[8, 6, 9\]"),
        ((x, weight, offsets[:-1], order, places), r"offsets \[9\] for 8 experts, got \[8\]"),
        ((x, weight, offsets, order), "order and places together"),
        ((x[:4], weight, offsets, order, places), r"got \[15\], \[5, 3\] and \[4, 8\]"),
    ):
        with pytest.raises(ValueError, match=message):
            grouped_linear(*arguments)
    with pytest.raises(TypeError, match=r"float32 and torch\.bfloat16"):
        grouped_linear(x, weight.bfloat16(), offsets, order, places)


def test_offsets_past_the_rows():
    offsets, _, _ = moe_sort(IDS[:5], EXPERTS)
    with pytest.raises(ValueError, match="offsets end at 15, there are 14 rows"):
        grouped_linear(hard(14, 8), weights(6, 8), offsets)


def test_some_of_the_experts():
    """A rank of expert parallelism gives its experts' bounds among all places."""
    x, weight = hard(ROWS, 100), weights(33, 100)
    offsets, order, places = moe_sort(IDS, EXPERTS)
    whole = grouped_linear(x, weight, offsets, order, places)
    for first, end in ((0, 4), (4, 8), (2, 3), (0, 8)):
        some = grouped_linear(x, weight[first:end], offsets[first : end + 1], order, places)
        own = slice(int(offsets[first]), int(offsets[end]))
        assert_same_bits(some[own], whole[own])


def test_the_check_can_fail():
    # torch's own product of a ragged group is enough to be seen.
    x, weight = hard(ROWS, 1000), weights(33, 1000)
    offsets, order, places = moe_sort(IDS, EXPERTS)
    rows = x[order.long() // TOP_K]
    parts = [
        rows[start:end] @ one.t()
        for (start, end), one in zip(pairwise(offsets), weight, strict=True)
    ]
    with pytest.raises(AssertionError):
        assert_same_bits(torch.cat(parts)[places.long()], expert_by_expert(x, weight))
