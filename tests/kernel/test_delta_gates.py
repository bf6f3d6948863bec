"""Decay and writing strength: rows that stand alone, accuracy over the whole range, gradients."""

import pytest
import torch
import torch.nn.functional as F

from isomodels.kernels.delta_gates import DECAY_FLOOR, delta_gates
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
)

HEADS = 21
# a head's A from 0.01 to 16, as the architecture draws it; dt_bias around its start
A_LOG = torch.linspace(0.01, 16.0, HEADS).log()
DT_BIAS = torch.linspace(-6.0, 2.0, HEADS)


def exact(a, b, A_log, dt_bias):
    return -A_log.exp() * F.softplus(a + dt_bias, threshold=1e9), b.sigmoid()


def gates(x):
    """x [T, 2 * heads] -> [T, 2, heads]."""
    return torch.stack(delta_gates(x[:, :HEADS], x[:, HEADS:], A_LOG, DT_BIAS), 1)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("kind", KINDS)
def test_rows_stand_alone(kind, dtype):
    assert_row_invariant(gates, hard(ROWS, 2 * HEADS, kind=kind, dtype=dtype))


@pytest.mark.parametrize("dtype", DTYPES)
def test_accuracy_is_that_of_fp32_in_any_dtype(dtype):
    x = torch.linspace(-30.0, 30.0, 200)[:, None].expand(-1, HEADS).to(dtype)
    ours = delta_gates(x, x, A_LOG, DT_BIAS)
    right = exact(x.double(), x.double(), A_LOG.double(), DT_BIAS.double())
    for one, exactly in zip(ours, (right[0].clamp(min=DECAY_FLOOR), right[1]), strict=True):
        assert one.dtype == torch.float32
        # an exponential turns the last bit of its argument into a relative error
        bound = 2e-7 * (2 + x.float().abs() + DT_BIAS.abs()) * exactly.abs()
        assert ((one - exactly).abs() <= bound).all()


def test_the_ends_of_the_range():
    x = torch.tensor([[-1e30, -200.0, -100.0, 0.0, 100.0, 1e30]])
    g, beta = delta_gates(x, x, torch.zeros(6), torch.zeros(6))
    assert g[0].tolist() == pytest.approx([0.0, 0.0, 0.0, -0.6931472, -100.0, -104.0])
    assert beta[0].tolist() == pytest.approx([0.0, 0.0, 0.0, 0.5, 1.0, 1.0])
    assert (g.exp() == 0.0)[0, -1]  # what is cut off is no decay that fp32 could hold
    g, _ = delta_gates(x, x, torch.full((6,), 80.0), torch.zeros(6))
    assert g.isfinite().all()


@pytest.mark.parametrize("dtype", DTYPES)
def test_gradients(dtype):
    a, b = (3 * hard(ROWS, HEADS, kind="normal", seed=i) for i in range(2))

    def both(*x):
        g, beta = delta_gates(*x)
        return torch.cat((g, beta))

    assert_gradients(
        lambda a, b, A_log, dt: both(a.to(dtype), b.to(dtype), A_log, dt),
        lambda a, b, A_log, dt: torch.cat(
            exact(a.to(dtype).to(a.dtype), b.to(dtype).to(b.dtype), A_log, dt)
        ),
        a,
        b,
        A_LOG - 2.0,  # no decay beyond the floor
        DT_BIAS,
        bound=4 * torch.finfo(dtype).eps + 1e-5,
    )


def test_a_decay_beyond_the_floor_has_no_gradient():
    a = torch.full((1, 1), 200.0, requires_grad=True)
    g, _ = delta_gates(a, a.detach(), torch.zeros(1), torch.zeros(1))
    assert g.item() == DECAY_FLOOR
    assert torch.autograd.grad(g, a)[0].item() == 0.0


def test_registration():
    a, b = (hard(5, HEADS, kind="normal", seed=i).requires_grad_() for i in range(2))
    leaves = (A_LOG.clone().requires_grad_(), DT_BIAS.clone().requires_grad_())
    assert_registered(delta_gates, (a, b, *leaves))


def test_row_46_of_the_field_reports_bf16_parameters_are_refused_because_they_move_the_decay():
    x = hard(5, HEADS, kind="normal")
    with pytest.raises(TypeError, match="needs A_log and dt_bias in float32"):
        delta_gates(x, x, A_LOG.bfloat16(), DT_BIAS)
    right = delta_gates(x, x, A_LOG, DT_BIAS)[0]
    rounded = delta_gates(x, x, A_LOG.bfloat16().float(), DT_BIAS)[0]
    assert relative_rms(rounded, right) > 1e-4
    with pytest.raises(AssertionError):
        assert_same_bits(rounded, right)


def test_wrong_shapes_are_named():
    x = hard(5, HEADS, kind="normal")
    with pytest.raises(
        ValueError, match=r"needs a and b \[T, heads\], A_log and dt_bias \[heads\]"
    ):
        delta_gates(x, x, A_LOG[:3], DT_BIAS)
