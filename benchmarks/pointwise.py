"""Rows of the memory-bound operations against the measured memory bandwidth."""

from collections.abc import Callable, Iterator

import torch

from benchmarks.harness import Timing, against_bandwidth, copies, row
from isomodels.kernels.embedding_triton import embedding_backward
from isomodels.kernels.rms_norm_triton import rms_norm, rms_norm_backward
from isomodels.kernels.rope import rope_table
from isomodels.kernels.rope_triton import rope_qkv, rope_qkv_backward
from isomodels.kernels.swiglu_triton import swiglu, swiglu_backward

TEST = "tests/kernel/test_pointwise_triton.py"
TOKENS, HIDDEN, INNER, EPS = 8192, 4096, 12288, 1e-6
BF16 = {"device": "cuda", "dtype": torch.bfloat16}


def _timing(name: str, shape: str, make: Callable[[], Callable], moved: int) -> Timing:
    calls = [make() for _ in range(copies(moved))]
    return against_bandwidth(name, shape, calls, moved, 0.85)


def _randn(*shape: int) -> torch.Tensor:
    return torch.randn(*shape, **BF16)


@row("RMSNorm", TEST)
def norms() -> Iterator[Timing]:
    weight, size = _randn(HIDDEN), 2 * TOKENS * HIDDEN
    shape = f"{TOKENS} x {HIDDEN}"

    def forward() -> Callable:
        x = _randn(TOKENS, HIDDEN)
        return lambda: rms_norm(x, None, weight, EPS)

    def add() -> Callable:
        x, residual = _randn(TOKENS, HIDDEN), _randn(TOKENS, HIDDEN)
        return lambda: rms_norm(x, residual, weight, EPS)

    def backward() -> Callable:
        x, grad, total = (_randn(TOKENS, HIDDEN) for _ in range(3))
        return lambda: rms_norm_backward(grad, total, x, weight, EPS)

    yield _timing("RMSNorm", f"forward {shape}", forward, 2 * size)
    yield _timing("RMSNorm", f"with the residual add {shape}", add, 4 * size)
    yield _timing("RMSNorm", f"backward with the add {shape}", backward, 4 * size)


@row("rope with qk-norm", TEST)
def ropes() -> Iterator[Timing]:
    """A fused projection: q and k are rotated, v is copied, and the gradient is one tensor."""
    heads, kv_heads, dim = 32, 8, 128
    weights, table = (_randn(dim), _randn(dim)), rope_table(dim, 1e6, TOKENS).cuda()
    positions = torch.arange(TOKENS, device="cuda")
    head = 2 * TOKENS * dim  # bytes of one head of all tokens
    rotated, copied = heads + kv_heads, kv_heads

    def arguments() -> tuple:
        return _randn(TOKENS, rotated + copied, dim), positions, table, *weights

    def forward() -> Callable:
        args = arguments()
        return lambda: rope_qkv(*args, heads, EPS)

    def paged() -> Callable:
        cache, slots = _randn(TOKENS // 16, kv_heads, 16, 2 * dim), torch.randperm(TOKENS).cuda()
        args = arguments()
        return lambda: rope_qkv(*args, heads, EPS, (cache, slots))

    def backward() -> Callable:
        grads = [_randn(TOKENS, count, dim) for count in (heads, kv_heads, kv_heads)]
        args = arguments()
        return lambda: rope_qkv_backward(*grads, *args, EPS)

    shape = f"{TOKENS} x ({heads} q, {kv_heads} k, {kv_heads} v) x {dim}"
    moved = head * (2 * rotated + 2 * copied)
    yield _timing("rope with qk-norm", f"forward {shape}", forward, moved)
    pages = f"forward and to pages {shape}"
    yield _timing("rope with qk-norm", pages, paged, moved + 2 * kv_heads * head)
    moved = head * (3 * rotated + 2 * copied)
    yield _timing("rope with qk-norm", f"backward {shape}", backward, moved)


@row("SwiGLU", TEST)
def swiglus() -> Iterator[Timing]:
    size = 2 * TOKENS * INNER

    def forward() -> Callable:
        x = _randn(TOKENS, 2 * INNER)
        return lambda: swiglu(x)

    def backward() -> Callable:
        x, grad = _randn(TOKENS, 2 * INNER), _randn(TOKENS, INNER)
        return lambda: swiglu_backward(grad, x)

    yield _timing("SwiGLU", f"forward {TOKENS} x {INNER}", forward, 3 * size)
    yield _timing("SwiGLU", f"backward {TOKENS} x {INNER}", backward, 5 * size)


@row("embedding backward", TEST)
def embeddings() -> Iterator[Timing]:
    vocab = 151936
    ids = torch.randint(0, vocab, (TOKENS,), device="cuda")
    grad = _randn(TOKENS, HIDDEN)
    moved = 2 * HIDDEN * (vocab + 2 * TOKENS)
    call = lambda: embedding_backward(grad, ids, vocab, torch.bfloat16)  # noqa: E731
    yield against_bandwidth("embedding backward", f"{TOKENS} tokens", [call], moved, 0.0)
