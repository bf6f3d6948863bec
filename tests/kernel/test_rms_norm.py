import pytest
import torch

from isomodels.kernels.rms_norm import add_rms_norm, rms_norm
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
SIZES = [1, 7, 32, 65, 128, 1000, 4096]


def exact(x, weight, eps=EPS):
    return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + eps) * weight


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("n", SIZES)
def test_rows_stand_alone(n, dtype):
    weight = hard(n, kind="normal", seed=1, dtype=dtype)
    assert_row_invariant(lambda x: rms_norm(x, weight, EPS), hard(ROWS, n, dtype=dtype))


@pytest.mark.parametrize("kind", KINDS)
def test_rows_stand_alone_for_hard_values(kind):
    weight = hard(96, kind="normal", seed=1)
    assert_row_invariant(lambda x: rms_norm(x, weight, EPS), hard(ROWS, 96, kind=kind))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("kind", KINDS)
def test_rows_of_the_sum_stand_alone(kind, dtype):
    weight = hard(100, kind="normal", seed=1, dtype=dtype)

    def op(both):
        return torch.stack(add_rms_norm(both[:, :100], both[:, 100:], weight, EPS), 1)

    assert_row_invariant(op, hard(ROWS, 200, kind=kind, dtype=dtype))


@pytest.mark.parametrize("dtype", DTYPES)
def test_add_is_the_sum_and_the_norm_of_the_sum(dtype):
    x, residual = hard(ROWS, 65, dtype=dtype), hard(ROWS, 65, seed=1, dtype=dtype)
    weight = hard(65, kind="normal", seed=2, dtype=dtype)
    normed, total = add_rms_norm(x, residual, weight, EPS)
    assert_same_bits(total, x + residual, "residual stream")
    assert_same_bits(normed, rms_norm(total, weight, EPS), "norm of the stream")


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("scale", [1e-3, 1.0, 1e4])
def test_accuracy(scale, dtype):
    # At 1e-3 the square of x is of the size of eps.
    x = (hard(ROWS, 1000, kind="normal") * scale).to(dtype)
    weight = hard(1000, kind="normal", seed=1, dtype=dtype)
    error = relative_rms(rms_norm(x, weight, EPS), exact(x.double(), weight.double()))
    assert error < unit_error(dtype)


@pytest.mark.parametrize("dtype", DTYPES)
def test_gradients(dtype):
    x, weight = (
        hard(ROWS, 48, kind="normal", dtype=dtype),
        hard(48, kind="normal", seed=1, dtype=dtype),
    )
    assert_gradients(
        lambda x, w: rms_norm(x, w, EPS), exact, x, weight, bound=unit_error(dtype, 48)
    )


@pytest.mark.parametrize("dtype", DTYPES)
def test_gradients_of_the_sum(dtype):
    x, residual = (hard(20, 48, kind="normal", seed=i, dtype=dtype) for i in (0, 1))
    weight = hard(48, kind="normal", seed=2, dtype=dtype)

    def op(x, residual, weight):
        return torch.cat(add_rms_norm(x, residual, weight, EPS), 1)

    def reference(x, residual, weight):
        return torch.cat((exact(x + residual, weight), x + residual), 1)

    # The norm sees the rounded sum, the reference the exact one: two roundings.
    assert_gradients(op, reference, x, residual, weight, bound=2 * unit_error(dtype, 48))


def test_opcheck():
    x, residual, weight = (hard(3, 8, seed=i).requires_grad_() for i in range(3))
    assert_registered(rms_norm, (x, weight[0], EPS))
    assert_registered(add_rms_norm, (x, residual, weight[0], EPS))


def test_opcheck_of_a_transposed_input():
    x = hard(8, 3).t()
    assert_registered(rms_norm, (x, hard(8), EPS), trainable=False)
    assert_registered(add_rms_norm, (x, x + 1, hard(8), EPS), trainable=False)


def test_shapes_that_would_broadcast_are_refused():
    x = hard(3, 8)
    for weight in (hard(1), hard(9), hard(3, 8), hard(1, 8)):
        with pytest.raises(ValueError, match=r"^rms_norm needs .* got \[3, 8\] and"):
            rms_norm(x, weight, EPS)
        with pytest.raises(ValueError, match=r"^add_rms_norm needs"):
            add_rms_norm(x, x, weight, EPS)
    with pytest.raises(ValueError, match=r"one shape, got \[3, 8\] and \[1, 8\]"):
        add_rms_norm(x, x[:1], hard(8), EPS)


def test_the_battery_can_fail():
    weight = hard(1000, kind="normal", seed=1)
    by_columns = lambda x: x * torch.rsqrt((x * x).t().contiguous().mean(0) + EPS)[:, None] * weight  # noqa: E731
    with pytest.raises(AssertionError):
        assert_row_invariant(by_columns, hard(ROWS, 1000))
