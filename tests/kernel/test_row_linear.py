import pytest
import torch
import torch.nn.functional as F

from isomodels.kernels.fixed_order import matmul_nt
from isomodels.kernels.linear import linear
from isomodels.kernels.row_linear import LEAVES, row_linear, tree_sum
from tests.kernel.battery import (
    DTYPES,
    KINDS,
    ROWS,
    assert_gradients,
    assert_registered,
    assert_row_invariant,
    assert_same_bits,
    hard,
    layouts,
    odd_storage,
    relative_rms,
    unit_error,
)

# Short and odd leaves, then leaves of whole tiles.
SIZES = [(8, 64), (24, 65), (136, 100), (1376, 72), (2048, 33)]


def partial_of_rank(x, weight, rank, ranks):
    """What one rank holds before the exchange: the fold of its own leaves, [T, N] fp32."""
    x, weight = x.chunk(ranks, 1)[rank], weight.chunk(ranks, 1)[rank]
    leaves = LEAVES // ranks
    pairs = zip(x.chunk(leaves, 1), weight.chunk(leaves, 1), strict=True)
    return tree_sum([matmul_nt(a, b) for a, b in pairs])


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("k", "n"), SIZES)
def test_rows_stand_alone(k, n, dtype):
    weight = hard(n, k, seed=1, dtype=dtype)
    assert_row_invariant(lambda x: row_linear(x, weight), hard(ROWS, k, dtype=dtype))


@pytest.mark.parametrize("kind", KINDS)
def test_rows_stand_alone_for_hard_values(kind):
    weight = hard(70, 264, kind=kind, seed=1)
    assert_row_invariant(lambda x: row_linear(x, weight), hard(ROWS, 264, kind=kind))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("ranks", [r for r in (1, 2, 4, 8) if r <= LEAVES])
@pytest.mark.parametrize(("k", "n"), [*SIZES, (12288, 20)])
def test_ranks_fold_to_the_bits_of_the_whole(k, n, ranks, dtype):
    for rows in (1, 5, ROWS):
        x, weight = hard(rows, k, dtype=dtype), hard(n, k, seed=1, dtype=dtype)
        whole = row_linear(x, weight)
        partials = [
            partial_of_rank(odd_storage(x), odd_storage(weight, 3), rank, ranks)
            for rank in range(ranks)
        ]
        assert_same_bits(tree_sum(partials).to(dtype), whole, f"{ranks} ranks, {rows} rows")


def test_a_leaf_never_reads_the_next_one():
    x, weight = hard(5, 1376), hard(20, 1376, seed=1)
    length = 1376 // LEAVES
    for leaf in range(LEAVES):
        part = slice(leaf * length, (leaf + 1) * length)
        alone, other = torch.zeros_like(x), x.clone()
        alone[:, part] = x[:, part]
        other[:, part] = 0
        left = row_linear(alone, weight)
        assert_same_bits(left, matmul_nt(x[:, part], weight[:, part]) + 0.0, f"leaf {leaf}")


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_column_shard_and_odd_storage_keep_the_bits(dtype):
    x, weight = hard(5, 344, dtype=dtype), hard(72, 344, seed=1, dtype=dtype)
    whole = row_linear(x, weight)
    for shards in (2, 4, 8):
        parts = [row_linear(x, odd_storage(w)) for w in weight.chunk(shards)]
        assert_same_bits(torch.cat(parts, 1), whole, f"{shards} shards")
    for name, same in layouts(weight).items():
        assert_same_bits(row_linear(x, same), whole, name)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("k", [8, 1376, 12288])
def test_accuracy(k, dtype):
    x = hard(5, k, kind="normal", dtype=dtype)
    weight = hard(40, k, kind="normal", seed=1, dtype=dtype)
    exact = F.linear(x.double(), weight.double())
    assert relative_rms(row_linear(x, weight), exact) < unit_error(dtype, k)


@pytest.mark.parametrize("dtype", DTYPES)
def test_gradients(dtype):
    x = hard(20, 48, kind="normal", dtype=dtype)
    weight = hard(30, 48, kind="normal", seed=1, dtype=dtype)
    assert_gradients(row_linear, F.linear, x, weight, bound=unit_error(dtype, 48))


def test_opcheck():
    assert_registered(row_linear, (hard(3, 16).requires_grad_(), hard(5, 16).requires_grad_()))


def test_k_must_be_divisible():
    with pytest.raises(ValueError, match=r"^row_linear needs .* \[3, 8\] and \[5, 12\]"):
        row_linear(hard(3, 8), hard(5, 12))
    with pytest.raises(ValueError, match="K = 62"):
        row_linear(hard(3, 62), hard(5, 62))


def test_the_fold_check_can_fail():
    # One pass over K, and a fold of ranks from left to right, are both other sums.
    x, weight = hard(5, 1376), hard(72, 1376, seed=1)
    with pytest.raises(AssertionError):
        assert_same_bits(linear(x, weight), row_linear(x, weight))
    left_to_right = sum(partial_of_rank(x, weight, rank, LEAVES) for rank in range(LEAVES))
    with pytest.raises(AssertionError):
        assert_same_bits(left_to_right, row_linear(x, weight))
