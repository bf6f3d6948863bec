import pytest
import torch

from isomodels.kernels.attention import attention
from isomodels.kernels.fixed_order import fold_sum, matmul_nt, one_thread
from isomodels.kernels.linear import linear
from isomodels.kernels.logprob import lm_head
from isomodels.kernels.row_linear import LEAVES, row_linear
from tests.kernel.battery import (
    DTYPES,
    ROWS,
    assert_row_invariant,
    assert_same_bits,
    bits,
    hard,
    layouts,
    odd_storage,
    threads,
)


@pytest.mark.parametrize("length", [1, 2, 3, 7, 8, 100, 127, 129, 1000])
def test_fold_sum_adds_halves(length):
    x = hard(5, length)
    values = [[float(v) for v in row] + [0.0] * (1024 - length) for row in x]
    size = 1 << (length - 1).bit_length()
    for row, total in zip(values, fold_sum(x), strict=True):
        terms = torch.tensor(row[:size])
        while len(terms) > 1:
            half = len(terms) // 2
            terms = torch.stack([terms[i] + terms[i + half] for i in range(half)])
        assert_same_bits(total, terms[0])


@pytest.mark.parametrize("length", [64, 100, 1000])
def test_fold_sum_rows_stand_alone(length):
    assert_row_invariant(fold_sum, hard(ROWS, length))


def test_torch_sum_is_another_order():
    with pytest.raises(AssertionError):
        assert_same_bits(hard(ROWS, 1000).sum(1), fold_sum(hard(ROWS, 1000)))


FUNCTIONS = {
    "exp": (torch.exp, -104.0, 0.0),
    "log": (torch.log, 1.0, 160000.0),
    "sqrt": (torch.sqrt, 0.0, 1e30),
    "divide": (lambda x: 1.0 / x, 1.0, 1e30),
}


def differ_by_place(function, x):
    """How many values get other bits in a scalar tail, or at another place in memory."""
    whole = function(x)
    tails = torch.empty(len(x) // 3, 5)[:, :3]  # inner length 3: no full vector
    tails.copy_(x.view(-1, 3))
    moved = function(odd_storage(x))
    by_tail = bits(function(tails)).view(-1) != bits(whole)
    return int((by_tail | (bits(moved) != bits(whole))).sum())


@pytest.mark.parametrize("name", FUNCTIONS)
def test_elementwise_functions_do_not_depend_on_the_place(name):
    function, low, high = FUNCTIONS[name]
    generator = torch.Generator().manual_seed(0)
    uniform = low + (high - low) * torch.rand(300_000, generator=generator)
    near = low + (torch.rand(300_000, generator=generator) * 40).exp2().log2() * (high > low)
    subnormal = torch.arange(1, 300_001, dtype=torch.int32).view(torch.float32)
    edge = -103.0 - torch.rand(30_000, generator=generator) if name == "exp" else subnormal
    for x in (uniform, near, edge):
        assert differ_by_place(function, x) == 0


def test_the_place_check_can_fail():
    x = torch.linspace(-20, 20, 300_000)
    assert differ_by_place(torch.nn.functional.silu, x) > 0


@pytest.fixture
def products(monkeypatch):
    """Watches every matrix product: its shape, and that BLAS has no other path to choose."""
    real, shapes = torch.mm, set()

    def watched(a, b, *, out):
        shapes.add((*a.shape, b.shape[1]))
        assert a.is_contiguous()
        assert out.is_contiguous()
        assert b.is_contiguous() or b.t().is_contiguous()
        assert all(x.data_ptr() % 64 == 0 and x.dtype == torch.float32 for x in (a, b, out))
        assert torch.get_num_threads() == 1
        return real(a, b, out=out)

    monkeypatch.setattr(torch, "mm", watched)
    return shapes


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("k", [8, 24, 1000, 1376])
def test_every_product_has_one_shape(products, k, dtype):
    weight = hard(100, k, seed=1, dtype=dtype)
    with threads(2):
        for rows in (1, 16, 17, 32):
            x = hard(rows, k, dtype=dtype)
            for view in (x, odd_storage(x), *layouts(x).values()):
                for stored in (weight, weight[:64], odd_storage(weight[:64]), weight[1:65]):
                    linear(view, stored)
                    lm_head(view, stored)
                    row_linear(view, stored)
    assert products == {(16, k, 64), (16, k // LEAVES, 64)}


@pytest.mark.parametrize("dim", [8, 40, 128])
def test_every_product_of_attention_has_one_shape(products, dim):
    with threads(2):
        for length in (1, 16, 130):
            q, k, v = (odd_storage(hard(length, h, dim)) for h in (6, 2, 2))
            bounds = torch.tensor([0, length // 2, length], dtype=torch.int32)
            attention(q, k, v, bounds, 0.1)
    assert products == {(16, dim, 64), (16, 64, dim)}


@pytest.mark.parametrize("precision", ["high", "medium"])
def test_lower_matmul_precision_is_refused(precision):
    torch.set_float32_matmul_precision(precision)
    try:
        with pytest.raises(RuntimeError, match='set_float32_matmul_precision\\("highest"\\)'):
            linear(hard(3, 8), hard(5, 8))
    finally:
        torch.set_float32_matmul_precision("highest")


def test_thread_count_is_given_back_after_an_error():
    with threads(2):
        inside = []

        def fail() -> None:
            with one_thread():
                inside.append(torch.get_num_threads())
                raise ZeroDivisionError

        with pytest.raises(ZeroDivisionError):
            fail()
        assert inside == [1]
        assert torch.get_num_threads() == 2


@pytest.mark.parametrize(("m", "n"), [(0, 5), (5, 0), (0, 0)])
def test_products_without_rows_or_columns(m, n):
    assert matmul_nt(hard(m, 8), hard(n, 8)).shape == (m, n)
