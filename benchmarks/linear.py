"""Rows of the linear operations against cuBLAS through torch."""

import math
from collections.abc import Iterator

import torch
import torch.nn.functional as F
from torch import Tensor

from benchmarks.harness import Timing, against, copies, row
from isomodels.kernels.linear import linear
from isomodels.kernels.linear_triton import input_gradient, weight_gradient
from isomodels.kernels.row_linear import row_linear

TEST = "tests/kernel/test_linear_triton.py"
TREE_TEST = "tests/kernel/test_row_linear_triton.py"
CUBLAS = "cuBLAS through torch"
# (N, K): qkv, o, gate-up and down of Qwen3-8B; then q with gate and kv, the linear attention's
# inputs, o, and the shared expert of Qwen3.5-35B-A3B
SHAPES = [(6144, 4096), (4096, 4096), (24576, 4096), (4096, 12288)]
SHAPES_35B = [(9216, 2048), (12288, 2048), (2048, 4096), (1024, 2048)]
TREES = [(4096, 4096), (4096, 12288), (4096, 11008)]
# What an engine with 8B models runs between the sizes above: qkv, gate-up, MiMo-7B's gate-up
ENGINE = [(6144, 4096), (24576, 4096), (22016, 4096)]


def operands(m: int, n: int, k: int) -> list[tuple[Tensor, Tensor]]:
    """Sets of x [M, K] and weight [N, K] to rotate."""
    return [
        (torch.randn(m, k, **BF16), torch.randn(n, k, **BF16) / math.sqrt(k))
        for _ in range(copies(2 * (m * k + n * k + m * n)))
    ]


BF16 = {"device": "cuda", "dtype": torch.bfloat16}


def mean(name: str, shape: str, timings: list[Timing], floor: float) -> Timing:
    """The geometric mean of the ratios, as a line: times in units of ours."""
    ratio = math.exp(sum(math.log(t.ratio) for t in timings) / len(timings))
    return Timing(name, shape, CUBLAS, 1.0, ratio, floor, mean=True)


def _rows(name: str, sizes: tuple[int, ...], shapes, op, floor: float) -> list[Timing]:
    timings = []
    for m in sizes:
        for n, k in shapes:
            sets = operands(m, n, k)
            ours = [lambda x=x, w=w: op(x, w) for x, w in sets]
            theirs = [lambda x=x, w=w: F.linear(x, w) for x, w in sets]
            shape = f"M={m} N={n} K={k}"
            timings.append(against(name, shape, CUBLAS, ours, theirs, floor))
    return timings


@row("linear", TEST)
def large() -> Iterator[Timing]:
    timings = _rows("linear", (1024, 4096, 8192, 16384), SHAPES + SHAPES_35B, linear, 0.90)
    yield from timings
    yield mean("linear", "M >= 1024, geometric mean", timings, 0.97)


@row("linear small", TEST)
def small() -> Iterator[Timing]:
    timings = _rows("linear small", (1, 8, 16, 64, 256), SHAPES + SHAPES_35B, linear, 0.0)
    yield from timings
    yield mean("linear small", "M <= 256, geometric mean", timings, 0.97)


@row("linear between", TEST)
def between() -> Iterator[Timing]:
    """Batches of other sizes, so that the sizes above are no special case."""
    sizes = (24, 96, 136, 200, 320, 512, 776)
    timings = _rows("linear between", sizes, ENGINE, linear, 0.0)
    timings += _rows("linear between, trees", sizes, TREES[:2], row_linear, 0.0)
    yield from timings
    yield mean("linear between", "M = 24 to 776, geometric mean", timings, 0.0)


@row("row linear", TREE_TEST)
def tree() -> Iterator[Timing]:
    timings = _rows("row linear", (1024, 8192), TREES, row_linear, 0.0)
    yield from timings
    yield mean("row linear", "M >= 1024, geometric mean", timings, 0.85)
    timings = _rows("row linear", (1, 8, 64, 256), TREES, row_linear, 0.0)
    yield from timings
    yield mean("row linear", "M <= 256, geometric mean", timings, 0.93)


@row("linear backward", TEST)
def backward() -> Iterator[Timing]:
    timings = []
    for n, k in SHAPES:
        m = 8192
        sets = [
            (g, w, x) for (x, w), g in ((s, torch.randn(m, n, **BF16)) for s in operands(m, n, k))
        ]
        for name, ours, theirs in (
            ("dgrad", lambda g, w, x: input_gradient(g, w), lambda g, w, x: g @ w),
            ("wgrad", lambda g, w, x: weight_gradient(g, x), lambda g, w, x: g.t() @ x),
        ):
            calls = [[lambda s=s, f=f: f(*s) for s in sets] for f in (ours, theirs)]
            shape = f"{name} M={m} N={n} K={k}"
            timings.append(against("linear backward", shape, CUBLAS, *calls, 0.0))
    yield from timings
    yield mean("linear backward", "geometric mean", timings, 0.97)
