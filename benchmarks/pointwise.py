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
    weight, table = _randn(128), rope_table(128, 1e6, TOKENS).cuda()
    positions = torch.arange(TOKENS, device="cuda")
    heads, kv_heads = 32, 8
    whole = heads + 2 * kv_heads

    def forward() -> Callable:
        qkv = _randn(TOKENS, whole, 128)
        return lambda: rope_qkv(qkv, positions, table, weight, weight, heads, EPS)

    def backward() -> Callable:
        grads = [_randn(TOKENS, count, 128) for count in (heads, kv_heads, kv_heads)]
        qkv = _randn(TOKENS, whole, 128)
        return lambda: rope_qkv_backward(*grads, qkv, positions, table, weight, weight, EPS)

    one = 2 * TOKENS * 128  # bytes of one head
    shape = f"{TOKENS} x {whole} x 128: {heads} of q, {kv_heads} of k, {kv_heads} of v copied"
    yield _timing("rope with qk-norm", f"forward {shape}", forward, 2 * whole * one)
    # The backward reads no values.
    moved = (3 * whole - kv_heads) * one
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
