import pytest
import torch
import torch.nn.functional as F

from isomodels.kernels.embedding import embedding
from tests.kernel.battery import (
    DTYPES,
    assert_gradients,
    assert_registered,
    assert_same_bits,
    bits,
    hard,
    odd_storage,
    unit_error,
)


@pytest.mark.parametrize("dtype", DTYPES)
def test_rows_are_copied_bit_for_bit(dtype):
    weight = hard(300, 65, kind="zeros", dtype=dtype)
    weight[7] = torch.nan
    weight[8] = hard(65, kind="subnormal", dtype=dtype)
    payload = bits(weight)
    payload[9] = 0x7FA5  # a NaN with a payload in bf16, a subnormal in fp32
    weight = payload.view(dtype)
    ids = torch.randint(0, 300, (1000,), generator=torch.Generator().manual_seed(0))
    for table in (weight, odd_storage(weight), weight.t().contiguous().t()):
        out = embedding(ids, table)
        assert torch.equal(bits(out), bits(weight)[ids])
    assert torch.equal(bits(embedding(torch.arange(300), weight)), payload)


def test_the_result_is_no_view():
    weight = hard(5, 4)
    out = embedding(torch.arange(5), weight)
    out.zero_()
    assert weight.any()


@pytest.mark.parametrize("bad", [-1, -300, 300, 10**9])
def test_an_id_outside_the_vocabulary(bad):
    with pytest.raises(IndexError):
        embedding(torch.tensor([0, bad]), hard(300, 8))


def test_no_tokens():
    assert embedding(torch.empty(0, dtype=torch.int64), hard(5, 8)).shape == (0, 8)


@pytest.mark.parametrize("dtype", DTYPES)
def test_gradients(dtype):
    ids = torch.randint(0, 20, (500,), generator=torch.Generator().manual_seed(0))
    weight = hard(30, 16, kind="normal", dtype=dtype)
    assert_gradients(
        lambda w: embedding(ids, w),
        lambda w: F.embedding(ids, w),
        weight,
        bound=unit_error(dtype, 500),
    )


def test_a_frequent_token_keeps_its_gradient_in_bf16():
    weight = torch.zeros(2, 4, dtype=torch.bfloat16, requires_grad=True)
    embedding(torch.zeros(1000, dtype=torch.int64), weight).sum().backward()
    assert_same_bits(weight.grad[0], torch.full((4,), 1000.0, dtype=torch.bfloat16))


def test_opcheck():
    assert_registered(embedding, (torch.tensor([1, 3, 1]), hard(5, 8).requires_grad_()))
