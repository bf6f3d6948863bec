"""`rope_qkv` must be `rope` on the parts of a fused projection, bit for bit."""

import pytest
import torch

from isomodels.kernels.attention import write_kv_cache
from isomodels.kernels.rope import rope, rope_table
from isomodels.kernels.rope_qkv import rope_qkv, rope_qkv_to_cache
from tests.kernel.battery import (
    DTYPES,
    KINDS,
    ROWS,
    assert_gradients,
    assert_registered,
    assert_row_invariant,
    assert_same_bits,
    hard,
    unit_error,
)

EPS = 1e-6
TABLE = rope_table(16, 1e6, 2048)


def weights(norm, dtype=torch.float32):
    if not norm:
        return None, None
    return tuple(hard(16, kind="normal", seed=seed, dtype=dtype) for seed in (1, 2))


def apart(qkv, positions, q_weight, k_weight, heads):
    """The same by `rope` and a split."""
    kv_heads = (qkv.shape[1] - heads) // 2
    q, k, v = qkv.split((heads, kv_heads, kv_heads), 1)
    q = rope(q, positions, TABLE, q_weight, EPS)
    return q, rope(k, positions, TABLE, k_weight, EPS), v


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("norm", [True, False])
@pytest.mark.parametrize(("heads", "kv_heads"), [(1, 1), (4, 2), (5, 1)])
def test_the_bits_of_rope(heads, kv_heads, norm, dtype):
    qkv = hard(ROWS, heads + 2 * kv_heads, 16, dtype=dtype)
    positions, pair = torch.arange(ROWS) * 37, weights(norm, dtype)
    expected = apart(qkv, positions, *pair, heads)
    wide = hard(ROWS, 12, 16, seed=9, dtype=dtype)
    wide[:, 2 : 2 + qkv.shape[1]] = qkv
    for name, same in (("dense", qkv), ("a view", wide[:, 2 : 2 + qkv.shape[1]])):
        parts = rope_qkv(same, positions, TABLE, *pair, heads, EPS)
        for part, right in zip(parts, expected, strict=True):
            assert part.is_contiguous()
            assert_same_bits(part, right.contiguous(), name)


@pytest.mark.parametrize("kind", KINDS)
def test_rows_stand_alone(kind):
    pair = weights(True)

    def op(rows):
        # the last column of a row is its position, so that the battery moves both together
        positions = rows[:, -1].nan_to_num(0, 0, 0).abs().clamp(max=2047).long()
        qkv = rows[:, :-1].reshape(len(rows), 6, 16)
        return torch.cat(rope_qkv(qkv, positions, TABLE, *pair, 4, EPS), 1)

    rows = hard(ROWS, 6 * 16 + 1, kind=kind)
    rows[:, -1] = torch.arange(ROWS) * 50
    assert_row_invariant(op, rows)


@pytest.mark.parametrize("norm", [True, False])
def test_keys_and_values_reach_their_pages(norm):
    qkv, positions, pair = hard(9, 6, 16), torch.arange(9) * 5, weights(norm)
    slots = torch.tensor([3, 0, 17, 31, 5, 6, 7, 30, 16])
    # vLLM's pages: heads and slots may lie either way round
    for layout in (torch.zeros(2, 1, 16, 32), torch.zeros(2, 16, 1, 32).transpose(1, 2)):
        expected, actual = layout.clone(), layout.clone()
        parts = rope_qkv(qkv, positions, TABLE, *pair, 4, EPS)
        write_kv_cache(*parts[1:], expected, slots)
        fused = rope_qkv_to_cache(qkv, positions, TABLE, *pair, 4, EPS, actual, slots)
        for one, two in zip(fused, parts, strict=True):
            assert_same_bits(one, two)
        assert_same_bits(actual, expected, "pages")


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("norm", [True, False])
def test_gradients(norm, dtype):
    positions, pair = torch.arange(ROWS) * 50, weights(norm, dtype)

    def exact(qkv, *pair):
        parts = list(qkv.split((4, 1, 1), 1))
        for i, weight in enumerate(pair or (None, None)):
            x = parts[i]
            if weight is not None:
                x = x * torch.rsqrt(x.square().mean(-1, keepdim=True) + EPS) * weight
            cos, sin = TABLE.to(x.dtype)[positions].unsqueeze(1).chunk(2, -1)
            a, b = x.chunk(2, -1)
            parts[i] = torch.cat((a * cos - b * sin, b * cos + a * sin), -1)
        return torch.cat(parts, 1)

    assert_gradients(
        lambda x, *w: torch.cat(rope_qkv(x, positions, TABLE, *(w or pair), 4, EPS), 1),
        exact,
        hard(ROWS, 6, 16, kind="normal", dtype=dtype),
        *(pair if norm else ()),
        bound=unit_error(dtype, 4 * ROWS),
    )


@pytest.mark.parametrize(("heads", "message"), [(5, "5 heads"), (0, "0 heads"), (6, "6 heads")])
def test_heads_that_do_not_divide(heads, message):
    with pytest.raises(ValueError, match=rf"^rope_qkv needs heads .* {message} .*\[2, 6, 16\]"):
        rope_qkv(hard(2, 6, 16), torch.arange(2), TABLE, None, None, heads, EPS)


@pytest.mark.parametrize("pair", [(None, hard(16)), (hard(16), None), (hard(8), hard(8))])
def test_weights_that_do_not_fit(pair):
    with pytest.raises(ValueError, match=r"^rope_qkv needs .* norm weights .*\[2, 6, 16\]"):
        rope_qkv(hard(2, 6, 16), torch.arange(2), TABLE, *pair, 4, EPS)


@pytest.mark.parametrize(("positions", "dim"), [(3, 16), (2, 32)])
def test_shapes_that_do_not_fit(positions, dim):
    with pytest.raises(ValueError, match=r"^rope_qkv needs qkv .* got \[2, 6, "):
        rope_qkv(hard(2, 6, dim), torch.arange(positions), TABLE, None, None, 4, EPS)


@pytest.mark.parametrize("bad", [-1, 2048])
def test_a_position_outside_the_table(bad):
    with pytest.raises(IndexError):
        rope_qkv(hard(2, 6, 16), torch.tensor([0, bad]), TABLE, None, None, 4, EPS)


def test_a_cache_that_does_not_fit():
    args, slots = (hard(2, 6, 16), torch.arange(2), TABLE, None, None, 4, EPS), torch.arange(2)
    with pytest.raises(TypeError, match=r"holds torch\.bfloat16"):
        rope_qkv_to_cache(*args, torch.zeros(1, 1, 16, 32, dtype=torch.bfloat16), slots)
    with pytest.raises(ValueError, match=r"^rope_qkv_to_cache needs a cache .* got \[1, 2, 16, 32"):
        rope_qkv_to_cache(*args, torch.zeros(1, 2, 16, 32), slots)
    with pytest.raises(ValueError, match=r"slots \[2\], got .* and \[3\]"):
        rope_qkv_to_cache(*args, torch.zeros(1, 1, 16, 32), torch.arange(3))


def test_no_tokens():
    empty = torch.empty(0, dtype=torch.int64)
    q, k, v = rope_qkv(hard(0, 6, 16), empty, TABLE, None, None, 4, EPS)
    assert (q.shape, k.shape, v.shape) == ((0, 4, 16), (0, 1, 16), (0, 1, 16))


@pytest.mark.parametrize("norm", [True, False])
def test_opcheck(norm):
    qkv, positions = hard(3, 6, 16).requires_grad_(), torch.tensor([0, 5, 9])
    pair = [weight if weight is None else weight.requires_grad_() for weight in weights(norm)]
    args = (qkv, positions, TABLE, *pair, 4, EPS)
    assert_registered(rope_qkv, args)
    cached = (qkv.detach(), *args[1:], torch.zeros(1, 1, 16, 32), positions)
    assert_registered(rope_qkv_to_cache, cached, trainable=False)


def test_the_comparison_can_fail():
    # One weight for both parts, or the keys' positions off by one, is another function.
    qkv, positions, (q_weight, k_weight) = hard(ROWS, 6, 16), torch.arange(ROWS), weights(True)
    _, right, _ = apart(qkv, positions, q_weight, k_weight, 4)
    for wrong in ((positions, q_weight, q_weight), (positions + 1, q_weight, k_weight)):
        k = rope_qkv(qkv, wrong[0], TABLE, *wrong[1:], 4, EPS)[1]
        with pytest.raises(AssertionError):
            assert_same_bits(k, right)
