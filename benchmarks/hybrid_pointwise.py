"""Rows of the hybrids' small operations against the measured memory bandwidth.

Heads and dims of Qwen3.5-35B-A3B; gates are parts of a projection, as in the model.
"""

from collections.abc import Callable, Iterator

import torch
from torch import Tensor

from benchmarks.harness import Timing, against_bandwidth, copies, row
from isomodels.kernels.causal_conv_triton import (
    causal_conv,
    causal_conv_backward,
    paged_causal_conv,
)
from isomodels.kernels.gated_norm_triton import gated_rms_norm, gated_rms_norm_backward
from isomodels.kernels.partial_rope_triton import partial_rope, partial_rope_backward
from isomodels.kernels.rope import rope_table
from isomodels.kernels.sigmoid_gate_triton import sigmoid_gate, sigmoid_gate_backward

CONV, GATES = (
    "tests/kernel/test_causal_conv_triton.py",
    "tests/kernel/test_gates_and_norms_triton.py",
)
TOKENS, EPS = 8192, 1e-6
CHANNELS, WIDTH, PROJECTED = 8192, 4, 12352  # of the convolution; of [q | k | v | z | b | a]
VALUE_HEADS, VALUE_DIM = 32, 128
HEADS, HEAD_DIM, ROTARY = 16, 256, 64
BF16 = {"device": "cuda", "dtype": torch.bfloat16}


def _randn(*shape: int) -> Tensor:
    return torch.randn(*shape, **BF16)


def _timing(
    name: str, shape: str, make: Callable[[], Callable], moved: int, floor: float = 0.85
) -> Timing:
    calls = [make() for _ in range(copies(moved))]
    return against_bandwidth(name, shape, calls, moved, floor)


def _int32(values: list[int]) -> Tensor:
    return torch.tensor(values, dtype=torch.int32, device="cuda")


@row("causal convolution", CONV)
def convolutions() -> Iterator[Timing]:
    weight, size = _randn(CHANNELS, WIDTH), 2 * TOKENS * CHANNELS
    cu = _int32([*range(0, TOKENS + 1, 2048)])
    shape = f"{TOKENS} x {CHANNELS}, width {WIDTH}"

    def inputs() -> Tensor:
        return _randn(TOKENS, PROJECTED)[:, :CHANNELS]

    def forward() -> Callable:
        x = inputs()
        return lambda: causal_conv(x, weight, cu)

    def backward() -> Callable:
        x, grad = inputs(), _randn(TOKENS, CHANNELS)
        return lambda: causal_conv_backward(grad, x, weight, cu)

    def decode(count: int) -> Callable:
        def make() -> Callable:
            x = _randn(count, PROJECTED)[:, :CHANNELS]
            windows = _randn(count, WIDTH - 1, CHANNELS)
            slots, ones = _int32([*range(count)]), _int32([*range(count + 1)])
            lengths = torch.full_like(slots, 100)
            return lambda: paged_causal_conv(x, weight, windows, slots, ones, lengths)

        return make

    yield _timing("causal convolution", f"forward {shape}", forward, 2 * size)
    yield _timing("causal convolution", f"backward {shape}", backward, 3 * size, 0.0)
    for count in (8, 256):
        moved = 2 * count * CHANNELS * (2 + 2 * (WIDTH - 1))
        what = f"decode {count} x {CHANNELS}, width {WIDTH}"
        yield _timing("causal convolution", what, decode(count), moved, 0.0)


@row("gated RMSNorm", GATES)
def norms() -> Iterator[Timing]:
    weight, size = torch.randn(VALUE_DIM, device="cuda"), 2 * TOKENS * VALUE_HEADS * VALUE_DIM
    shape = f"{TOKENS} x {VALUE_HEADS} x {VALUE_DIM}"

    def inputs() -> tuple[Tensor, Tensor]:
        first, behind = CHANNELS, CHANNELS + VALUE_HEADS * VALUE_DIM
        gate = _randn(TOKENS, PROJECTED)[:, first:behind].unflatten(1, (-1, VALUE_DIM))
        return _randn(TOKENS, VALUE_HEADS, VALUE_DIM), gate

    def forward() -> Callable:
        x, gate = inputs()
        return lambda: gated_rms_norm(x, gate, weight, EPS)

    def backward() -> Callable:
        x, gate = inputs()
        grad = torch.randn_like(x)
        return lambda: gated_rms_norm_backward(grad, x, gate, weight, EPS)

    yield _timing("gated RMSNorm", f"forward {shape}", forward, 3 * size)
    yield _timing("gated RMSNorm", f"backward {shape}", backward, 5 * size)


def _queries() -> tuple[Tensor, Tensor]:
    """Queries and their gates, [TOKENS, HEADS, HEAD_DIM] each, of one projection."""
    fused = _randn(TOKENS, 2 * HEADS + 4, HEAD_DIM)[:, : 2 * HEADS]
    queries, gates = fused.unflatten(1, (HEADS, 2)).unbind(2)
    return queries, gates


@row("sigmoid gate", GATES)
def gates() -> Iterator[Timing]:
    size, shape = 2 * TOKENS * HEADS * HEAD_DIM, f"{TOKENS} x {HEADS} x {HEAD_DIM}"

    def forward() -> Callable:
        x, (_, gate) = _randn(TOKENS, HEADS, HEAD_DIM), _queries()
        return lambda: sigmoid_gate(x, gate)

    def backward() -> Callable:
        x, grad = (_randn(TOKENS, HEADS, HEAD_DIM) for _ in range(2))
        _, gate = _queries()
        return lambda: sigmoid_gate_backward(grad, x, gate)

    yield _timing("sigmoid gate", f"forward {shape}", forward, 3 * size)
    yield _timing("sigmoid gate", f"backward {shape}", backward, 5 * size)


@row("partial rope with qk-norm", GATES)
def ropes() -> Iterator[Timing]:
    size = 2 * TOKENS * HEADS * HEAD_DIM
    shape = f"{TOKENS} x {HEADS} x {HEAD_DIM}, {ROTARY} rotated"
    weight, table = torch.randn(HEAD_DIM, device="cuda"), rope_table(ROTARY, 1e7, TOKENS).cuda()
    positions = torch.arange(TOKENS, device="cuda")

    def forward() -> Callable:
        x, _ = _queries()
        return lambda: partial_rope(x, positions, table, weight, EPS)

    def backward() -> Callable:
        x, _ = _queries()
        grad = _randn(TOKENS, HEADS, HEAD_DIM)
        return lambda: partial_rope_backward(grad, x, positions, table, weight, EPS)

    yield _timing("partial rope with qk-norm", f"forward {shape}", forward, 2 * size)
    yield _timing("partial rope with qk-norm", f"backward {shape}", backward, 3 * size)
