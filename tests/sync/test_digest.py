"""The digest of weights: every single change moves it, and each device gives the same."""

import os
import subprocess
import sys

import pytest
import torch

from isomodels.sync.digest import copy_and_digest, digest, digests

SIZES = (1, 3, 4, 4096, 8192, 8196, 70_001, 131_072 * 2 + 12)

INTERPRETED = """
import torch
from isomodels.sync import digest_triton
from isomodels.sync.digest import Spans, digests

def sums(x, y, copy):
    x, y = Spans.of(x), Spans.of(y)
    words = y.nbytes // 4
    got = digest_triton.launch(torch.device("cpu"), x.address, y.address, words, copy)
    return (got.numpy() + words * words).tolist()

digest_triton.TENSORS = 4
generator = torch.Generator().manual_seed(0)
sizes = (1, 2, 3, 700, 2048, 2049, 5000)
x = [torch.randint(256, (16 * n,), generator=generator, dtype=torch.uint8) for n in sizes]
y = [torch.zeros_like(one) for one in x]
assert sums(y, x, False) == digests(x)
assert sums(x, y, True) == digests(x)
assert all(torch.equal(a, b) for a, b in zip(x, y))
"""


def random_bits(size: int, dtype: torch.dtype = torch.bfloat16, device: str = "cpu"):
    generator = torch.Generator().manual_seed(size)
    data = torch.randint(256, (size * dtype.itemsize,), generator=generator, dtype=torch.uint8)
    return data.to(device).view(dtype)


def by_definition(tensor: torch.Tensor) -> int:
    data = tensor.contiguous().view(-1).view(torch.uint8).tolist()
    data += [0] * (-len(data) % 4)
    words = [int.from_bytes(data[i : i + 4], "little", signed=True) for i in range(0, len(data), 4)]
    total = sum((w + 1) * (2 * i + 1) for i, w in enumerate(words)) % 2**64
    return total - 2**64 * (total >= 2**63)


@pytest.mark.parametrize("size", SIZES)
def test_the_digest_is_its_definition(size):
    x = random_bits(size)
    assert digest(x) == by_definition(x)
    odd = torch.cat([x, x])[1 : size + 1]  # at an address of no word
    assert digest(odd) == by_definition(odd)


def test_two_signs_that_change_are_seen():
    """In words of 64 bits their terms would cancel modulo 2^64."""
    x = random_bits(64, torch.int32)
    for i in range(64):
        for j in range(i):
            changed = x.clone()
            changed[[i, j]] ^= -(2**31)
            assert digest(changed) != digest(x)


def test_copies_are_digested_where_they_lie():
    sources = [random_bits(size) for size in SIZES]
    targets = [torch.zeros_like(x) for x in sources]
    assert copy_and_digest(sources, targets) == digests(sources)
    assert all(torch.equal(a.view(torch.int16), b.view(torch.int16))
               for a, b in zip(sources, targets, strict=True))  # fmt: skip


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.uint8, torch.int64])
def test_the_digest_sees_every_single_change(dtype):
    generator = torch.Generator().manual_seed(0)
    x = torch.randint(0, 200, (37, 11), generator=generator).to(dtype)
    base = digest(x)
    assert digest(x.t().contiguous().t()) == base  # strides are no content
    words = x.clone().view(-1).view(torch.uint8)
    for place in range(0, len(words), 7):
        changed = words.clone()
        changed[place] ^= 1
        assert digest(changed.view(dtype).view(x.shape)) != base
    swapped = x.clone().view(-1)
    swapped[[0, 1]] = swapped[[1, 0]]
    assert (digest(swapped.view(x.shape)) != base) == bool((swapped != x.view(-1)).any())
    assert digest(torch.tensor([0.0])) != digest(torch.tensor([-0.0]))
    assert digest(torch.zeros(3)) != digest(torch.zeros(4))


@pytest.mark.gpu
def test_a_gpu_gives_the_digests_of_the_cpu():
    many = [random_bits(8 * n) for n in range(1, 1200)]  # more than one launch takes
    sources = [*(random_bits(size) for size in SIZES), *many, random_bits(50_000_000)]
    on_gpu = [x.cuda() for x in sources]
    expected = digests(sources)
    assert digests(on_gpu) == expected
    targets = [torch.zeros_like(x) for x in on_gpu]
    assert copy_and_digest(on_gpu, targets) == expected
    assert copy_and_digest(sources, [torch.zeros_like(x) for x in on_gpu]) == expected
    for target, x in zip(targets, sources, strict=True):
        assert torch.equal(target.cpu().view(torch.int16), x.view(torch.int16))


def test_the_kernel_gives_the_digests_of_the_cpu(pytestconfig: pytest.Config):
    """In Triton's interpreter, over several launches, each tensor apart and copied."""
    pytest.importorskip("triton", reason="triton is not installed")
    environment = {**os.environ, "TRITON_INTERPRET": "1"}
    done = subprocess.run(
        [sys.executable, "-c", INTERPRETED],
        env=environment,
        cwd=pytestconfig.rootpath,
        capture_output=True,
        text=True,
        check=False,
        timeout=200,
    )
    assert done.returncode == 0, done.stderr
