"""Norm and rotation of the first channels: against full rope and fp64, rows that stand alone."""

import pytest
import torch

from isomodels.kernels.partial_rope import partial_rope
from isomodels.kernels.rope import rope, rope_table
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
POSITIONS = torch.arange(ROWS) * 37 % 1000
TABLE = rope_table(16, 1e6, 1000)


def exact(x, weight, table, positions=POSITIONS):
    unit = x * torch.rsqrt(x.square().mean(-1, keepdim=True) + EPS) * weight
    cos, sin = table.to(x.dtype)[positions].unsqueeze(1).chunk(2, -1)
    half = cos.shape[-1]
    turned, rest = unit[..., : 2 * half], unit[..., 2 * half :]
    swapped = torch.cat((-turned[..., half:], turned[..., :half]), -1)
    return torch.cat((turned * cos.repeat(1, 1, 2) + swapped * sin.repeat(1, 1, 2), rest), -1)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("kind", KINDS)
def test_rows_stand_alone(kind, dtype):
    weight, position = hard(48, kind="normal", seed=1), torch.tensor([77])

    def op(x):
        return partial_rope(x.view(-1, 2, 48), position.expand(len(x)), TABLE, weight, EPS)

    assert_row_invariant(op, hard(ROWS, 96, kind=kind, dtype=dtype))


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_rotation_of_the_whole_head_is_rope(dtype):
    x, weight = hard(ROWS, 3, 16, dtype=dtype), hard(16, kind="normal", seed=1, dtype=dtype)
    full = rope(x, POSITIONS, TABLE, weight, EPS)
    assert_same_bits(partial_rope(x, POSITIONS, TABLE, weight, EPS), full)


@pytest.mark.parametrize("dtype", DTYPES)
def test_accuracy_and_channels_without_position(dtype):
    x = hard(ROWS, 3, 64, kind="normal", dtype=dtype)
    weight = hard(64, kind="normal", seed=1)
    ours = partial_rope(x, POSITIONS, TABLE, weight, EPS)
    assert relative_rms(ours, exact(x.double(), weight.double(), TABLE)) < unit_error(dtype)
    still = partial_rope(x, POSITIONS * 0, TABLE, weight, EPS)
    assert_same_bits(ours[..., 16:].contiguous(), still[..., 16:].contiguous())


@pytest.mark.parametrize("dtype", DTYPES)
def test_gradients(dtype):
    x, weight = hard(ROWS, 3, 64, kind="normal", dtype=dtype), hard(64, kind="normal", seed=1)
    assert_gradients(
        lambda a, w: partial_rope(a, POSITIONS, TABLE, w, EPS),
        lambda a, w: exact(a, w, TABLE),
        x,
        weight,
        bound=unit_error(dtype, 3 * ROWS),
    )


def test_registration():
    x, weight = hard(5, 3, 48, kind="normal"), hard(48, kind="normal", seed=1)
    args = (x.requires_grad_(), POSITIONS[:5], TABLE, weight.requires_grad_(), EPS)
    assert_registered(partial_rope, args)


def test_wrong_operands_are_named():
    x, weight = hard(5, 3, 48), torch.ones(48)
    with pytest.raises(ValueError, match=r"partial_rope needs x \[T, heads, head_dim\]"):
        partial_rope(x[..., :8], POSITIONS[:5], TABLE, weight[:8], EPS)
    for beyond in (-1, 1000):
        with pytest.raises(IndexError):
            partial_rope(x, torch.full((5,), beyond), TABLE, weight, EPS)
