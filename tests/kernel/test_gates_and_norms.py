"""What surrounds the gated delta rule and gated attention: gated norm, sigmoid gate, 1 + w."""

import pytest
import torch
import torch.nn.functional as F

from isomodels.kernels.gated_norm import gated_rms_norm
from isomodels.kernels.one_plus import one_plus
from isomodels.kernels.rms_norm import rms_norm
from isomodels.kernels.sigmoid_gate import sigmoid_gate
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

EPS = 1e-6


def exact_norm(x, gate, weight):
    return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + EPS) * weight * F.silu(gate)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("kind", KINDS)
def test_rows_of_the_gated_norm_stand_alone(kind, dtype):
    weight = hard(20, kind="normal", seed=1)

    def op(both):
        x, gate = both.view(-1, 2, 3, 20).unbind(1)
        return gated_rms_norm(x, gate, weight, EPS)

    assert_row_invariant(op, hard(ROWS, 120, kind=kind, dtype=dtype))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("kind", KINDS)
def test_rows_of_the_sigmoid_gate_stand_alone(kind, dtype):
    def op(both):
        return sigmoid_gate(*both.view(-1, 2, 3, 7).unbind(1))

    assert_row_invariant(op, hard(ROWS, 42, kind=kind, dtype=dtype))


@pytest.mark.parametrize("dtype", DTYPES)
def test_accuracy(dtype):
    x, gate = (hard(ROWS, 3, 128, kind="normal", seed=i, dtype=dtype) for i in range(2))
    weight = hard(128, kind="normal", seed=2, dtype=dtype)
    right = exact_norm(x.double(), gate.double(), weight.double())
    assert relative_rms(gated_rms_norm(x, gate, weight, EPS), right) < unit_error(dtype)
    right = x.double() * gate.double().sigmoid()
    assert relative_rms(sigmoid_gate(x, gate), right) < unit_error(dtype)
    ends = torch.tensor([-1e30, -200.0, 0.0, 200.0, 1e30]).view(1, 1, 5)
    assert sigmoid_gate(torch.ones(1, 1, 5), ends).flatten().tolist() == [0.0, 0.0, 0.5, 1.0, 1.0]


def test_row_57_of_the_field_reports_a_zero_gate_halves():
    x = hard(ROWS, 3, 20)
    assert_same_bits(sigmoid_gate(x, torch.zeros_like(x)), x / 2)


@pytest.mark.parametrize("dtype", DTYPES)
def test_gradients(dtype):
    x, gate = (hard(ROWS, 3, 20, kind="normal", seed=i, dtype=dtype) for i in range(2))
    weight = hard(20, kind="normal", seed=2, dtype=dtype)
    bound = unit_error(dtype, 3 * ROWS)
    ours = lambda *args: gated_rms_norm(*args, EPS)  # noqa: E731
    assert_gradients(ours, exact_norm, x, gate, weight, bound=bound)
    assert_gradients(sigmoid_gate, lambda a, b: a * b.sigmoid(), x, gate, bound=bound)
    assert_gradients(one_plus, lambda w: 1 + w, weight, bound=bound)


def test_row_50_of_the_field_reports_a_small_zero_centred_weight_counts_in_bf16():
    x, weight = hard(ROWS, 64, kind="normal", dtype=torch.bfloat16), torch.full((64,), 1e-3)
    weight = weight.bfloat16()
    right = rms_norm(x.float(), 1.0 + weight.float(), EPS).bfloat16()
    assert_same_bits(rms_norm(x, one_plus(weight), EPS), right)
    # added in bf16, it is lost
    assert (1 + weight == 1).all()
    with pytest.raises(AssertionError):
        assert_same_bits(rms_norm(x, 1 + weight, EPS), right)


def test_registration():
    x, gate = (hard(5, 3, 20, kind="normal", seed=i).requires_grad_() for i in range(2))
    weight = hard(20, kind="normal", seed=2).requires_grad_()
    assert_registered(gated_rms_norm, (x, gate, weight, EPS))
    assert_registered(sigmoid_gate, (x, gate))
    assert_registered(one_plus, (weight,))


def test_wrong_shapes_are_named():
    x = hard(5, 3, 20)
    with pytest.raises(ValueError, match=r"gated_rms_norm needs x and gate \[T, heads, N\]"):
        gated_rms_norm(x, x[:4], torch.ones(20), EPS)
    with pytest.raises(ValueError, match="sigmoid_gate needs two tensors of one shape"):
        sigmoid_gate(x, x[:, :1])
