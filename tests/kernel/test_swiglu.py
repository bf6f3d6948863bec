import pytest
import torch
import torch.nn.functional as F

from isomodels.kernels.swiglu import swiglu
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


def exact(gate_up):
    gate, up = gate_up.chunk(2, -1)
    return F.silu(gate) * up


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("size", [1, 7, 16, 100, 1376])
def test_rows_stand_alone(size, dtype):
    assert_row_invariant(swiglu, hard(ROWS, 2 * size, dtype=dtype))


@pytest.mark.parametrize("kind", KINDS)
def test_rows_stand_alone_for_hard_values(kind):
    assert_row_invariant(swiglu, hard(ROWS, 66, kind=kind))


def test_columns_stand_alone():
    # A shard of gate and up holds other columns of the same rows.
    gate_up = hard(ROWS, 400, kind="normal")
    gate, up = gate_up.chunk(2, 1)
    for shards in (2, 4, 8):
        parts = zip(gate.chunk(shards, 1), up.chunk(shards, 1), strict=True)
        sharded = torch.cat([swiglu(torch.cat(pair, 1)) for pair in parts], 1)
        assert_same_bits(sharded, swiglu(gate_up), f"{shards} shards")


@pytest.mark.parametrize("dtype", DTYPES)
def test_accuracy(dtype):
    gate_up = (hard(ROWS, 1000, kind="normal") * 4).to(dtype)
    assert relative_rms(swiglu(gate_up), exact(gate_up.double())) < unit_error(dtype)


def test_ends_of_the_range():
    gate = torch.tensor([-200.0, -89.0, -88.0, -0.0, 0.0, 88.0, 200.0, 3e38])
    out = swiglu(torch.stack((gate, torch.ones(8)), 1))
    assert torch.isfinite(out).all()
    assert torch.allclose(out[:, 0].double(), F.silu(gate.double()), rtol=1e-6, atol=1e-36)


@pytest.mark.parametrize("dtype", DTYPES)
def test_gradients(dtype):
    gate_up = (hard(ROWS, 50, kind="normal") * 3).to(dtype)
    assert_gradients(swiglu, exact, gate_up, bound=unit_error(dtype))


def test_gradient_at_the_ends_of_the_range():
    gate = torch.tensor([-200.0, -88.0, 0.0, 88.0, 200.0])
    gate_up = torch.stack((gate, torch.ones(5)), 1).requires_grad_()
    swiglu(gate_up).sum().backward()
    assert torch.isfinite(gate_up.grad).all()


def test_opcheck():
    assert_registered(swiglu, (hard(3, 8).requires_grad_(),))


def test_the_battery_can_fail():
    with pytest.raises(AssertionError):
        assert_row_invariant(exact, hard(ROWS, 66, kind="normal"))
