import math

import pytest
import torch

from isomodels.kernels.rms_norm import rms_norm
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
    threads,
    unit_error,
)

EPS = 1e-6
THETAS = [(128, 1e6), (128, 640000.0), (32, 1e6), (64, 10000.0)]


def transformers_frequencies(dim, theta):
    """As transformers computes them: fp32 throughout."""
    from transformers import Qwen3Config
    from transformers.models.qwen3.modeling_qwen3 import Qwen3RotaryEmbedding

    config = Qwen3Config(
        head_dim=dim, rope_parameters={"rope_type": "default", "rope_theta": theta}
    )
    return Qwen3RotaryEmbedding(config).inv_freq


@pytest.mark.parametrize(("dim", "theta"), THETAS)
def test_row_28_of_the_field_reports_table_in_fp32(dim, theta):
    frequencies = transformers_frequencies(dim, theta)
    table = rope_table(dim, theta, 40960)
    assert table.dtype == torch.float32
    for position in (0, 1, 100, 5000, 40959):
        # the angle as the checkpoints were trained, its cosine by the C library in fp64
        angles = [float(a) for a in torch.tensor(float(position)) * frequencies]
        cos = torch.tensor([math.cos(a) for a in angles], dtype=torch.float64)
        sin = torch.tensor([math.sin(a) for a in angles], dtype=torch.float64)
        assert_same_bits(table[position], torch.cat((cos, sin)).float(), f"position {position}")


def test_table_does_not_depend_on_threads_or_length():
    whole = rope_table.__wrapped__(128, 1e6, 5000)
    for count in (1, 3, 8):
        with threads(count):
            assert_same_bits(rope_table.__wrapped__(128, 1e6, 5000), whole, f"{count} threads")
    for length in (1, 100, 4999):
        assert_same_bits(rope_table.__wrapped__(128, 1e6, length), whole[:length], f"{length}")


def table_of(dim):
    return rope_table(dim, 1e6, 2048)


def exact(x, positions, weight=None):
    """RoFormer's rotation in pairs (i, i + D/2), in the dtype of x."""
    if weight is not None:
        x = x * torch.rsqrt(x.square().mean(-1, keepdim=True) + EPS) * weight
    half = x.shape[-1] // 2
    table = table_of(2 * half).to(x.dtype)[positions]
    cos, sin = table[:, None, :half], table[:, None, half:]
    a, b = x[..., :half], x[..., half:]
    return torch.cat((a * cos - b * sin, b * cos + a * sin), -1)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("norm", [True, False])
@pytest.mark.parametrize(("heads", "dim"), [(1, 32), (3, 64), (2, 128), (1, 10)])
def test_rows_stand_alone(heads, dim, norm, dtype):
    weight = hard(dim, kind="normal", seed=1, dtype=dtype) if norm else None

    def op(rows):
        # the last column of a row is its position, so that the battery moves both together
        positions = rows[:, -1].float().nan_to_num(0, 0, 0).abs().clamp(max=2047).long()
        x = rows[:, :-1].reshape(len(rows), heads, dim)
        return rope(x, positions, table_of(dim), weight, EPS)

    rows = hard(ROWS, heads * dim + 1, dtype=dtype)
    rows[:, -1] = torch.arange(ROWS) * 50
    assert_row_invariant(op, rows)


@pytest.mark.parametrize("kind", KINDS)
def test_a_head_stands_alone_and_may_be_a_view_of_qkv(kind):
    qkv, weight = hard(ROWS, 6, 64, kind=kind), hard(64, kind="normal", seed=1)
    positions = torch.arange(ROWS) * 37
    q, k = qkv[:, :4], qkv[:, 4:5]
    whole = rope(q.contiguous(), positions, table_of(64), weight, EPS)
    assert_same_bits(rope(q, positions, table_of(64), weight, EPS), whole, "view of qkv")
    for head in range(4):
        one = rope(q[:, head : head + 1], positions, table_of(64), weight, EPS)
        assert_same_bits(one, whole[:, head : head + 1], f"head {head}")
    for count in (1, 3, 8):
        with threads(count):
            assert_same_bits(rope(q, positions, table_of(64), weight, EPS), whole, "threads")
    assert rope(k, positions, table_of(64), None, 0.0).is_contiguous()


def test_position_zero_is_the_identity():
    x = hard(5, 2, 64, kind="zeros").abs()  # -0 + 0 is +0: only magnitudes are kept
    assert_same_bits(rope(x, torch.zeros(5, dtype=torch.int64), table_of(64), None, 0.0), x)


def test_norm_is_rms_norm_before_the_rotation():
    x, weight = hard(20, 1, 64), hard(64, kind="normal", seed=1)
    zeros = torch.zeros(20, dtype=torch.int64)
    got = rope(x, zeros, table_of(64), weight, EPS)
    assert_same_bits(got[:, 0] + 0.0, rms_norm(x[:, 0], weight, EPS) + 0.0, "qk-norm")


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("norm", [True, False])
def test_accuracy(norm, dtype):
    x = hard(ROWS, 3, 64, kind="normal", dtype=dtype)
    weight = hard(64, kind="normal", seed=1, dtype=dtype) if norm else None
    positions = torch.arange(ROWS) * 50
    right = exact(x.double(), positions, weight.double() if norm else None)
    assert relative_rms(rope(x, positions, table_of(64), weight, EPS), right) < unit_error(dtype)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("norm", [True, False])
def test_gradients(norm, dtype):
    x = hard(ROWS, 3, 16, kind="normal", dtype=dtype)
    weights = [hard(16, kind="normal", seed=1, dtype=dtype)] if norm else []
    positions = torch.arange(ROWS) * 50
    assert_gradients(
        lambda x, *w: rope(x, positions, table_of(16), *(w or [None]), EPS),
        lambda x, *w: exact(x, positions, *w),
        x,
        *weights,
        bound=unit_error(dtype, 3 * ROWS),
    )


@pytest.mark.parametrize("bad", [-1, 2048])
def test_a_position_outside_the_table(bad):
    with pytest.raises(IndexError):
        rope(hard(2, 1, 32), torch.tensor([0, bad]), table_of(32), None, 0.0)


@pytest.mark.parametrize(
    ("positions", "dim", "weight"), [(1, 32, None), (3, 32, None), (2, 16, None), (2, 32, 1)]
)
def test_shapes_that_do_not_fit(positions, dim, weight):
    weight = None if weight is None else hard(weight)
    with pytest.raises(ValueError, match=r"^rope needs x .* got \[2, 1, 32\]"):
        rope(hard(2, 1, 32), torch.arange(positions), table_of(dim), weight, EPS)


def test_no_tokens():
    empty = torch.empty(0, dtype=torch.int64)
    assert rope(hard(0, 2, 32), empty, table_of(32), None, 0.0).shape == (0, 2, 32)


@pytest.mark.parametrize("norm", [True, False])
def test_opcheck(norm):
    x, positions = hard(3, 2, 8).requires_grad_(), torch.tensor([0, 5, 9])
    weight = hard(8, seed=1).requires_grad_() if norm else None
    assert_registered(rope, (x, positions, table_of(8), weight, EPS))


def test_opcheck_of_a_view_of_qkv():
    args = (hard(5, 6, 8)[:, 4:5], torch.arange(5), table_of(8), None, EPS)
    assert_registered(rope, args, trainable=False)


def test_the_table_check_can_fail():
    # fp64 angles are the mathematics, but not what the checkpoints saw.
    exponents = torch.arange(0, 128, 2, dtype=torch.float64) / 128
    angles = 5000.0 / 1e6**exponents
    with pytest.raises(AssertionError):
        assert_same_bits(
            torch.cat((angles.cos(), angles.sin())).float(), rope_table(128, 1e6, 40960)[5000]
        )
