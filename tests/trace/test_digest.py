"""Digests of rows: one bit, two elements that change places, every dtype and layout."""

import pytest
import torch

from isomodels.trace.digest import GOLDEN, MIXER, add_digests, row_digests, tensor_digest

DTYPES = [torch.float32, torch.bfloat16, torch.int32, torch.int64, torch.uint8]
MASK = (1 << 64) - 1


def draw(dtype, *shape, seed=0):
    generator = torch.Generator().manual_seed(seed)
    if dtype.is_floating_point:
        return torch.randn(shape, generator=generator).to(dtype)
    return torch.randint(0, 200, shape, generator=generator).to(dtype)


def by_definition(row):
    """In Python's integers."""
    size = row.element_size()
    words = row.view({1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}[size])

    def signed(x):
        x &= MASK
        return x - (1 << 64) if x >> 63 else x

    total = 0
    for j, word in enumerate(words.tolist()):
        mixed = signed((j + 1) * GOLDEN)
        mixed = signed((mixed ^ (mixed >> 32)) * MIXER)
        total += (word + 1) * ((mixed ^ (mixed >> 29)) | 1)
    return signed(total)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("width", [1, 3, 64, 1025])
def test_rows_have_the_digest_of_the_definition(dtype, width):
    x = draw(dtype, 5, width)
    assert row_digests(x).tolist() == [by_definition(row) for row in x]


def test_strides_places_and_shapes_do_not_matter():
    x = draw(torch.bfloat16, 7, 4, 24)
    expected = row_digests(x)
    wide = draw(torch.bfloat16, 7, 4, 40, seed=1)
    wide[:, :, 8:32] = x
    assert row_digests(wide[:, :, 8:32]).equal(expected)
    assert row_digests(x.flatten(1)).equal(expected)
    assert row_digests(x.transpose(0, 1).contiguous().transpose(0, 1)).equal(expected)
    assert row_digests(x[[3, 3]]).tolist() == [int(expected[3])] * 2


@pytest.mark.parametrize("dtype", DTYPES)
def test_every_single_bit_moves_its_row_alone(dtype):
    x = draw(dtype, 3, 9)
    words = x.view(torch.uint8).view(3, -1)
    expected = row_digests(x)
    for byte in range(words.shape[1]):
        for bit in range(8):
            words[1, byte] ^= 1 << bit
            assert (row_digests(x) != expected).tolist() == [False, True, False]
            words[1, byte] ^= 1 << bit


def test_an_exchange_a_shift_and_a_sign_of_zero_move_it():
    x = draw(torch.float32, 1, 50)
    other = x[:, [1, 0, *range(2, 50)]]
    assert row_digests(other) != row_digests(x)
    assert row_digests(x.roll(1, 1)) != row_digests(x)
    assert row_digests(torch.tensor([[0.0]])) != row_digests(torch.tensor([[-0.0]]))
    assert row_digests(torch.zeros(1, 3)) != row_digests(torch.zeros(1, 4))


def test_ten_thousand_sparse_rows_have_digests_of_their_own():
    """Rows of one value at two places, and of two sign bits: where a plain sum would collide."""
    count, width = 10_000, 600
    x = torch.zeros(count, width, dtype=torch.bfloat16)
    places = torch.triu_indices(width, width, 1)[:, :count]
    x[torch.arange(count), places[0]] = -0.0
    x[torch.arange(count), places[1]] = -0.0
    assert len(row_digests(x).unique()) == count


def test_parts_of_rows_add_up_and_empty_ones_are_fine():
    out = torch.zeros(4, dtype=torch.int64)
    assert row_digests(draw(torch.float32, 4, 6), out) is out
    assert row_digests(torch.empty(0, 5)).shape == (0,)
    assert row_digests(torch.empty(3, 0)).tolist() == [0, 0, 0]


def test_a_whole_tensor():
    x = draw(torch.bfloat16, 40, 8)
    before = tensor_digest(x)
    assert before.shape == (1,)
    assert tensor_digest(x[[1, 0, *range(2, 40)]]) != before
    assert tensor_digest(draw(torch.float32, 9)).shape == (1,)


def test_the_gpu_kernel_in_the_interpreter():
    """Integers: the interpreter's bits are the GPU's."""
    import subprocess
    import sys

    pytest.importorskip("triton")
    code = """
import torch
from isomodels.trace.digest import TOGETHER, _as_rows, row_digests
from isomodels.trace.digest_triton import add_row_digests
rows, pairs, expected = 9, [], []
for dtype in (torch.float32, torch.bfloat16, torch.int32, torch.int64, torch.uint8):
    # (columns, others beside them): in whole words of 16 bytes and not, in two spans
    for width, more in ((3, 3), (264, 0), (2600, 8) if dtype.is_floating_point else (1, 0)):
        x = torch.randint(0, 200, (rows, width + more), generator=torch.Generator().manual_seed(1))
        x = ((x - 100) * 373.7).to(dtype)[:, more % 8 : width + more % 8]
        pairs.append((_as_rows(x), torch.zeros(rows, dtype=torch.int64)))
        expected.append(row_digests(x))
for first in range(0, len(pairs), TOGETHER):  # the second launch is not full
    add_row_digests(pairs[first : first + TOGETHER])
assert TOGETHER < len(pairs) < 2 * TOGETHER
for (words, out), sums in zip(pairs, expected, strict=True):
    assert out.equal(sums), (words.dtype, words.shape)
"""
    import os

    environment = {**os.environ, "TRITON_INTERPRET": "1"}
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", code], env=environment, timeout=120
    )
    assert done.returncode == 0


@pytest.mark.gpu
def test_a_gpu_has_the_digests_of_the_cpu():
    for dtype in DTYPES:
        for shape in ((1, 1), (300, 4096), (7, 3, 129), (256, 151936)):
            x = draw(dtype, *shape)
            assert row_digests(x.cuda()).cpu().equal(row_digests(x))
    several = [draw(dtype, 77, width) for dtype in DTYPES for width in (1, 1000, 1001, 4096)]
    pairs = [(x.cuda(), torch.zeros(77, dtype=torch.int64, device="cuda")) for x in several]
    add_digests(pairs)
    for x, (_, out) in zip(several, pairs, strict=True):
        assert out.cpu().equal(row_digests(x)), (x.dtype, x.shape)
