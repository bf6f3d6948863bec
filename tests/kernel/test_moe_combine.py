import pytest
import torch

from isomodels.kernels.moe_combine import moe_combine
from isomodels.kernels.moe_sort import moe_sort
from tests.kernel.battery import (
    DTYPES,
    KINDS,
    ROWS,
    assert_gradients,
    assert_registered,
    assert_row_invariant,
    assert_same_bits,
    hard,
    relative_rms,
    unit_error,
)
from tests.kernel.test_moe_sort import EXPERTS, draw

HIDDEN, TOP_K = 40, 3
IDS = draw(ROWS, TOP_K)
PLACES = moe_sort(IDS, EXPERTS)[2]
SHARED = {"routed": (False, False), "shared": (True, False), "gated": (True, True)}
kinds = pytest.mark.parametrize("parts", SHARED)


def inputs(parts, kind="normal", dtype=torch.float32, rows=ROWS):
    shared, gated = SHARED[parts]
    return (
        hard(rows * TOP_K, HIDDEN, kind=kind, dtype=dtype),
        hard(rows, TOP_K, kind="normal", seed=1).abs(),
        PLACES if rows == ROWS else moe_sort(IDS[:rows], EXPERTS)[2],
        hard(rows, HIDDEN, kind=kind, seed=2, dtype=dtype) if shared else None,
        hard(rows, 1, kind="normal", seed=3) if gated else None,
    )


def floating(tensors, change):
    """`change` of the floating tensors among them."""
    return [change(t) if t is not None and t.is_floating_point() else t for t in tensors]


def reference(y, weights, places, shared=None, gate=None):
    total = (weights.unsqueeze(2) * y[places.long()]).sum(1)
    if shared is None:
        return total
    return total + (shared if gate is None else torch.sigmoid(gate) * shared)


@kinds
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("dtype", DTYPES)
def test_slots_in_their_order_then_shared_then_one_rounding(parts, kind, dtype):
    y, weights, places, shared, gate = inputs(parts, kind, dtype)
    rows = []
    for t in range(ROWS):
        total = weights[t, 0] * y[places[t, 0].long()].float()
        for slot in range(1, TOP_K):
            total = total + weights[t, slot] * y[places[t, slot].long()].float()
        if shared is not None:
            factor = 1.0 if gate is None else 1.0 / (1.0 + torch.exp(-gate[t]))
            total = total + factor * shared[t].float()
        rows.append(total.to(dtype))
    assert_same_bits(moe_combine(y, weights, places, shared, gate), torch.stack(rows))


@kinds
@pytest.mark.parametrize("dtype", DTYPES)
def test_tokens_stand_alone(parts, dtype):
    """A token's row of the battery: its outputs, weights, shared row and gate side by side."""
    y, weights, places, shared, gate = inputs(parts, "wide", dtype)
    columns = [y[places.long()].flatten(1).float(), weights]
    columns += [shared.float()] if shared is not None else []
    columns += [gate] if gate is not None else []
    sizes = [c.shape[1] for c in columns]

    def op(x):
        outputs, weights, *rest = x.split(sizes, 1)
        order, places = moe_sort(IDS[:1].expand(len(x), -1).contiguous(), EXPERTS)[1:]
        y = outputs.reshape(-1, HIDDEN).to(dtype)[order.long()]
        rest = [rest[0].to(dtype), *rest[1:]] if rest else []
        return moe_combine(y, weights.contiguous(), places, *rest)

    assert_row_invariant(op, torch.cat(columns, 1))


@kinds
@pytest.mark.parametrize("dtype", DTYPES)
def test_accuracy(parts, dtype):
    tensors = inputs(parts, dtype=dtype)
    exact = reference(
        *(t.double() if t is not None and t.is_floating_point() else t for t in tensors)
    )
    assert relative_rms(moe_combine(*tensors), exact) < unit_error(dtype, TOP_K)


@kinds
@pytest.mark.parametrize("dtype", DTYPES)
def test_gradients(parts, dtype):
    y, weights, places, *rest = inputs(parts, dtype=dtype)
    rest = [t for t in rest if t is not None]

    def with_places(function):
        return lambda y, weights, *rest: function(y, weights, places, *rest)

    bound = unit_error(dtype, HIDDEN)
    assert_gradients(
        with_places(moe_combine), with_places(reference), y, weights, *rest, bound=bound
    )


def test_signs_of_zero_are_kept():
    y = torch.full((2, 4), -0.0)
    places = torch.tensor([[0, 1]], dtype=torch.int32)
    assert_same_bits(moe_combine(y, torch.ones(1, 2), places), torch.full((1, 4), -0.0))


def test_extreme_gates():
    y, weights, places, shared, _ = inputs("gated")
    gate = torch.full((ROWS, 1), -200.0)
    assert_same_bits(moe_combine(y, weights, places, shared, gate), moe_combine(y, weights, places))
    gate = torch.full((ROWS, 1), 200.0, requires_grad=True)
    assert_same_bits(
        moe_combine(y, weights, places, shared, gate), moe_combine(y, weights, places, shared)
    )
    moe_combine(y, weights, places, shared, gate).sum().backward()
    assert gate.grad.isfinite().all()


@kinds
def test_opcheck(parts):
    tensors = inputs(parts, rows=4)
    tensors = [
        t.requires_grad_() if t is not None and t.is_floating_point() else t for t in tensors
    ]
    assert_registered(moe_combine, tuple(tensors))


def test_no_tokens():
    y, weights, places, shared, gate = inputs("gated", rows=0)
    assert moe_combine(y, weights, places, shared, gate).shape == (0, HIDDEN)


def test_bad_operands():
    y, weights, places, shared, gate = inputs("gated")
    for arguments, message in (
        ((y[:-1], weights, places), r"got \[37, 3\], \[37, 3\] and \[110, 40\]"),
        ((y, weights[:, :2], places), r"got \[37, 2\], \[37, 3\]"),
        (
            (y, weights, places, shared[:1]),
            r"shared output \[37, 40\] in torch.float32, got",
        ),
        ((y, weights, places, shared.bfloat16()), "in torch.bfloat16"),
        ((y, weights, places, shared, gate[:, 0]), r"gate \[37, 1\] in float32, got \[37\]"),
        ((y, weights, places, shared, gate.bfloat16()), "in torch.bfloat16"),
        ((y, weights, places, None, gate), "a shared output for its gate"),
    ):
        with pytest.raises(ValueError, match=message):
            moe_combine(*arguments)
    with pytest.raises(TypeError, match="weights in float32"):
        moe_combine(y, weights.bfloat16(), places)
    with pytest.raises(TypeError, match="float32 or bfloat16"):
        moe_combine(y.half(), weights, places)


def test_the_check_can_fail():
    # adding the slots in another order is enough to be seen
    y, weights, places, *_ = inputs("routed", "wide")
    with pytest.raises(AssertionError):
        assert_same_bits(
            moe_combine(y, weights.flip(1), places.flip(1)), moe_combine(y, weights, places)
        )
