"""Latent attention on the GPU: one function, whatever the batch, tile, page, cut or graph.

The same checks run at small sizes through Triton's interpreter on any machine: index and mask
errors show there, bits do not, and its bf16 products are wrong.
"""

import importlib.util
import itertools
import os
import subprocess
import sys
from contextlib import contextmanager

import pytest
import torch

from isomodels.kernels.mla_attention import (
    TRITON_SCHEDULE,
    mla_attention,
    paged_mla_attention,
    split_kv_b,
    write_latent_cache,
)
from tests.kernel.battery import (
    assert_same_bits,
    hard,
    relative_rms,
    uninitialised_is_nan,
    unit_error,
)
from tests.kernel.pages import Pages

BF16, FP32 = torch.bfloat16, torch.float32
# (heads, nope, rope, value size, rank): GLM-4.7-Flash, DeepSeek-V3, and sizes off every tile
GLM, DEEPSEEK = (20, 192, 64, 256, 512), (128, 128, 64, 128, 512)
ODD, SMALL = (5, 24, 8, 40, 48), (4, 32, 16, 32, 128)
TINY, SINGLE = (3, 24, 8, 40, 48), (1, 32, 16, 32, 128)
LENGTHS = [1, 17, 128, 129, 0, 700, 2048, 2049, 4500]  # around a block, a segment, and several
ORDERS = [(0, 1, 2, 3), (0, 2, 1, 3), (1, 0, 2, 3)]
TILES = [
    {"BLOCK_M": 64, "num_warps": 8, "num_stages": 2},
    {"BLOCK_M": 64, "num_warps": 8, "num_stages": 1, "TMA": False},
    {"BLOCK_M": 32, "num_warps": 8, "num_stages": 1, "TMA": False},
    {"BLOCK_M": 16, "num_warps": 4, "num_stages": 1, "TMA": False},
]
DECODES = [
    {"BLOCK_M": 16, "num_warps": 4, "num_stages": 1, "PROGRAMS": 1},
    {"BLOCK_M": 32, "num_warps": 8, "num_stages": 2, "PROGRAMS": 4096},
    {"BLOCK_M": 64, "num_warps": 8, "num_stages": 2, "TMA": False},
]
PRODUCTS = [
    {"BLOCK_M": 16, "BLOCK_N": 64, "BLOCK_K": 32, "num_warps": 4, "num_stages": 2},
    {"BLOCK_M": 64, "BLOCK_N": 128, "BLOCK_K": 64, "num_warps": 4, "num_stages": 3},
    {"BLOCK_M": 128, "BLOCK_N": 256, "BLOCK_K": 64, "num_warps": 8, "num_stages": 3},
]


def assert_same(actual, expected, what):
    """The same bits; in the interpreter, whose products follow numpy, nearly the same values."""
    if actual.is_cuda:
        assert_same_bits(actual, expected, what)
    else:
        assert relative_rms(actual, expected) < unit_error(FP32, 100), what


class Case:
    """Packed sequences on a device, and their pages of latents."""

    def __init__(self, lengths, sizes, dtype, device, *, block_size=16, order=0):
        heads, nope, rope, value, rank = sizes
        count = sum(lengths)
        shapes = [(count, heads, nope), (count, heads, rope), (count, rank), (count, rope)]
        self.q_nope, self.q_rope, self.latent, self.k_rope = (
            hard(*shape, kind="normal", seed=i, dtype=dtype).to(device)
            for i, shape in enumerate(shapes)
        )
        weight = hard(heads * (nope + value), rank, kind="normal", seed=9) * rank**-0.5
        self.kv_b = weight.to(dtype).to(device)
        self.lengths, self.device, self.scale = lengths, device, (nope + rope) ** -0.5
        self.starts = [0, *itertools.accumulate(lengths)]
        self.cu_seqlens = self.int32(self.starts)
        self.fill(block_size, order)

    @property
    def tokens(self):
        return self.q_nope, self.q_rope, self.latent, self.k_rope

    def fill(self, block_size=16, order=0):
        width = self.latent.shape[1] + self.k_rope.shape[1]
        pages = Pages(
            self.lengths, 1, width // 2, block_size, self.latent.dtype, order=ORDERS[order]
        )
        slots = [pages.slots(i, 0, n) for i, n in enumerate(self.lengths)]
        self.cache = pages.cache.to(self.device)  # keeps the strides
        self.block_table = pages.block_table.to(self.device)
        write(self.latent, self.k_rope, self.cache, torch.cat(slots).to(self.device))

    def int32(self, values):
        return torch.tensor(values, dtype=torch.int32, device=self.device)

    def absorbed(self, config=None):
        from isomodels.kernels.mla_heads_triton import heads_product

        return heads_product(self.q_nope, split_kv_b(self.kv_b, self.q_nope)[0], config)

    def packed(self, config=None):
        """Latents of the output and log-sum-exp."""
        from isomodels.kernels import mla_triton

        return mla_triton.mla_attention(
            self.absorbed(), *self.tokens[1:], self.cu_seqlens, self.scale, config
        )

    def rows(self, sequence, start, end):
        return slice(self.starts[sequence] + start, self.starts[sequence] + end)

    def step(self, runs, *, padding=0, bound_k=None, loose=0, **configs):
        """One engine step: runs of (sequence, start, end). Returns (latents, rows of `packed`).

        `padding` sequences without tokens follow, and as many tokens, and `loose` more tokens.
        """
        from isomodels.kernels import mla_decode_triton

        at = torch.cat([torch.arange(self.starts[s] + a, self.starts[s] + b) for s, a, b in runs])
        at = at.to(self.device)
        counts = [b - a for _, a, b in runs] + [0] * padding
        ends = [b for _, _, b in runs] + [0] * padding
        sequences = [s for s, _, _ in runs] + [0] * padding
        q, q_rope = (
            torch.cat((x[at], x.new_full((padding + loose, *x.shape[1:]), torch.nan)))
            for x in (self.absorbed(), self.q_rope)
        )
        bounds = self.int32([0, *itertools.accumulate(counts)])
        with uninitialised_is_nan():
            out = mla_decode_triton.paged_mla_attention(
                q, q_rope, self.cache, self.block_table[sequences], bounds, self.int32(ends),
                self.scale, max(counts), bound_k or max(ends), **configs,
            )  # fmt: skip
        assert not out[len(at) :].any(), "padding rows must be zero"
        return out[: len(at)], at


@contextmanager
def no_room_for_parts():
    """The states of segments fit no memory: decode walks them one after the other."""
    from isomodels.kernels import mla_decode_triton

    room, mla_decode_triton._PART_BYTES = mla_decode_triton._PART_BYTES, 0
    try:
        yield
    finally:
        mla_decode_triton._PART_BYTES = room


def write(latent, k_rope, cache, slots):
    from isomodels.kernels import mla_decode_triton

    mla_decode_triton.write_latent_cache(latent, k_rope, cache, slots)


def exact(q_nope, q_rope, latent, k_rope, kv_b, starts, scale):
    """The definition with keys and values expanded: (output, log-sum-exp)."""
    heads, nope = q_nope.shape[1:]
    expanded = (latent @ kv_b.t()).view(len(latent), heads, -1)
    keys = torch.cat((expanded[..., :nope], k_rope.unsqueeze(1).expand(-1, heads, -1)), 2)
    outs, sums = [], []
    for start, end in itertools.pairwise(starts):
        q, k, v = (
            x[start:end].transpose(0, 1)
            for x in (torch.cat((q_nope, q_rope), 2), keys, expanded[..., nope:])
        )
        scores = q @ k.transpose(1, 2) * scale
        hidden = torch.ones(scores.shape[1:], dtype=torch.bool, device=q.device).triu(1)
        scores = scores.masked_fill(hidden, -torch.inf)
        outs.append((scores.softmax(-1) @ v).transpose(0, 1))
        sums.append(scores.logsumexp(-1).t())
    return torch.cat(outs), torch.cat(sums)


def check_packed(case, tiles):
    """Tiles, neighbours and second runs."""
    whole, lse = case.packed()
    for config in [None, *tiles]:
        again, sums = case.packed(config)
        assert_same(again, whole, f"tile {config}")
        assert_same(sums, lse, f"log-sum-exp, tile {config}")
    longest = max(range(len(case.lengths)), key=lambda i: case.lengths[i])
    rows = case.rows(longest, 0, case.lengths[longest])
    alone = Case.__new__(Case)
    alone.__dict__.update(case.__dict__)
    alone.q_nope, alone.q_rope, alone.latent, alone.k_rope = (x[rows] for x in case.tokens)
    alone.cu_seqlens = case.int32([0, case.lengths[longest]])
    assert_same(alone.packed()[0], whole[rows], "one sequence alone")
    return whole


def check_paged(case, whole, tiles, decodes, decode_rows):
    """Prefill in one step, in chunks, row by row and mixed."""
    full = [(s, 0, n) for s, n in enumerate(case.lengths) if n]
    for config in [None, *tiles]:
        out, at = case.step(full, tiles=config)
        assert_same(out, whole[at], f"prefill over pages, tile {config}")
    for chunk in (100, 1000):
        for turn in range(0, max(case.lengths), chunk):
            runs = [(s, turn, min(n, turn + chunk)) for s, n in enumerate(case.lengths) if n > turn]
            out, at = case.step(runs)
            assert_same(out, whole[at], f"chunk at {turn} of {chunk}")
    rows = [
        (s, p, p + 1)
        for s, n in enumerate(case.lengths)
        for p in sorted({*range(0, n, max(1, n // decode_rows)), *range(max(0, n - 2), n)})
    ]
    for config in [None, *decodes]:
        out, at = case.step(rows, decode=config)
        assert_same(out, whole[at], f"decode, {config}")
    out, at = case.step(rows, padding=3, bound_k=40_000)
    assert_same(out, whole[at], "decode in a padded batch with a loose bound")
    out, at = case.step(rows[-1:])
    assert_same(out, whole[at], "one decode row alone")
    with no_room_for_parts():
        out, at = case.step(rows, padding=3)
    assert_same(out, whole[at], "decode without room for the states of segments")
    mixed = [*rows[::3], *((s, n // 3, n) for s, n in enumerate(case.lengths) if n > 1)]
    out, at = case.step(mixed, padding=2, loose=70)
    assert_same(out, whole[at], "decode rows among chunks")


def check_gradients(case, bound):
    """Against fp64 autograd; equal from run to run."""
    from isomodels.kernels.mla_backward_triton import mla_attention_backward

    args = (*case.tokens, case.kv_b)
    out, lse = operator(case)
    grad = hard(*out.shape, kind="normal", seed=10, dtype=out.dtype).to(case.device)
    leaves = [x.double().requires_grad_() for x in args]
    right = torch.autograd.grad(exact(*leaves, case.starts, case.scale)[0], leaves, grad.double())
    first, second = (
        mla_attention_backward(grad, *args, case.cu_seqlens, out, lse, case.scale) for _ in range(2)
    )
    names = ("q_nope", "q_rope", "latent", "k_rope", "kv_b")
    for name, x, one, two, exactly in zip(names, args, first, second, right, strict=True):
        assert (one.shape, one.dtype) == (x.shape, x.dtype)
        assert_same(one, two, f"gradient of {name}, second run")
        assert relative_rms(one, exactly) < bound, f"gradient of {name}"


def operator(case):
    """As the operator does it, on any device."""
    from isomodels.kernels.mla_heads_triton import heads_product

    mixed, lse = case.packed()
    return heads_product(mixed, split_kv_b(case.kv_b, case.q_nope)[1].transpose(1, 2)), lse


def check_accuracy(case, bound):
    out, lse = operator(case)
    args = (x.double() for x in (*case.tokens, case.kv_b))
    right, sums = exact(*args, case.starts, case.scale)
    assert relative_rms(out, right) < bound
    # Short rows of bf16: the sum is of rounded probabilities.
    assert (lse.double() - sums).abs().max() < bound * sums.abs().max().clamp(min=1)


@pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="Triton is not installed")
def test_through_the_interpreter():
    # Triton reads the variable when it is imported: a process of its own.
    code = "from tests.kernel.test_mla_triton import interpreted; interpreted()"
    environment = {**os.environ, "TRITON_INTERPRET": "1"}
    done = subprocess.run(
        [sys.executable, "-c", code], env=environment, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr[-3000:]


def interpreted():
    from isomodels.kernels import mla_block_triton, mla_decode_triton, mla_triton

    constants = TRITON_SCHEDULE.constants
    assert constants["segment"] == mla_triton.SEGMENT
    assert constants["kv_block"] == mla_block_triton.BLOCK
    mla_triton.SEGMENT = mla_decode_triton.SEGMENT = 128
    case = Case([1, 0, 133, 20], TINY, FP32, "cpu", block_size=48, order=1)
    whole = check_packed(case, [{"BLOCK_M": 64}])
    check_accuracy(case, 1e-6)
    full = [(s, 0, n) for s, n in enumerate(case.lengths) if n]
    mixed = [(2, 132, 133), (0, 0, 1), (2, 50, 133), (3, 19, 20)]
    for runs, config in ((full, {"BLOCK_M": 64}), (mixed, {"BLOCK_M": 32})):
        out, at = case.step(runs, tiles=config, padding=1)
        assert_same(out, whole[at], f"step {runs}")
    out, at = case.step([(2, 132, 133), (3, 5, 6), (2, 128, 129)], padding=2)
    assert_same(out, whole[at], "decode")
    with no_room_for_parts():
        out, at = case.step([(2, 132, 133), (3, 5, 6), (2, 128, 129)], padding=2)
    assert_same(out, whole[at], "decode without room for the states of segments")
    case.step([(3, 5, 9)], tiles={"BLOCK_M": 64}, padding=1, loose=70)
    case = Case([1, 0, 70, 20], TINY, FP32, "cpu", block_size=64)
    out, at = case.step([(2, 10, 70), (3, 19, 20)])
    assert_same(out, case.packed()[0][at], "pages of whole blocks")
    check_gradients(case, 1e-6)
    check_gradients(Case([1, 0, 20], SINGLE, FP32, "cpu"), 1e-6)


@pytest.mark.gpu
@pytest.mark.parametrize("sizes", [GLM, DEEPSEEK, SMALL, ODD, SINGLE])
def test_one_function(sizes):
    case = Case(LENGTHS if sizes != DEEPSEEK else LENGTHS[:-1], sizes, BF16, "cuda")
    whole = check_packed(case, TILES)
    check_paged(case, whole, TILES, DECODES, decode_rows=40)
    case.fill(block_size=64)
    check_paged(case, whole, TILES[:1], [], decode_rows=40)
    product = case.absorbed()
    for config in PRODUCTS:
        assert_same(case.absorbed(config), product, f"product {config}")
    for count in (1, 5, 16, 17, 64, 65, 300):
        part = Case.__new__(Case)
        part.__dict__.update(case.__dict__)
        part.q_nope = case.q_nope[-count:]
        assert_same(part.absorbed(), product[-count:], f"product of {count} rows")


@pytest.mark.gpu
def test_one_function_in_float32():
    case = Case([1, 129, 0, 700, 2100], SMALL, FP32, "cuda")
    check_paged(case, check_packed(case, []), [], [], decode_rows=10)


@pytest.mark.gpu
@pytest.mark.parametrize("block_size", [16, 48, 64, 128, 528])
@pytest.mark.parametrize("order", range(len(ORDERS)))
def test_pages(block_size, order):
    case = Case([300, 2500], GLM, BF16, "cuda", block_size=block_size, order=order)
    check_paged(case, case.packed()[0], [], [], decode_rows=20)


@pytest.mark.gpu
@pytest.mark.parametrize("sizes", [GLM, DEEPSEEK, SMALL, ODD, SINGLE])
def test_accuracy_and_gradients(sizes):
    case = Case([1, 17, 0, 300, 1000], sizes, BF16, "cuda")
    check_accuracy(case, 8e-3)
    check_gradients(case, 1.5e-2)


@pytest.mark.gpu
@pytest.mark.parametrize("sizes", [SMALL, SINGLE])
def test_accuracy_and_gradients_in_float32(sizes):
    case = Case([1, 17, 0, 300, 700], sizes, FP32, "cuda")
    check_accuracy(case, 1e-5)
    check_gradients(case, 1e-5)


@pytest.mark.gpu
def test_accuracy_over_several_segments():
    check_accuracy(Case([5000], SMALL, BF16, "cuda"), 8e-3)


@pytest.mark.gpu
def test_scores_far_apart():
    # Whole blocks underflow before and after the row's maximum, and rescaling reaches zero.
    case = Case([2500], GLM, BF16, "cuda")
    case.q_nope *= 200
    check_paged(case, check_packed(case, TILES), [], DECODES, decode_rows=50)


@pytest.mark.gpu
def test_neighbours_of_nan():
    case = Case([130, 333, 64], GLM, BF16, "cuda")
    whole, _ = case.packed()
    rows = case.rows(1, 0, 333)
    for x in case.tokens:
        x[: rows.start] = torch.nan
        x[rows.stop :] = torch.inf
    for config in [None, *TILES]:
        out, _ = case.packed(config)
        assert_same(out[rows], whole[rows], f"among NaN and infinity, {config}")


@pytest.mark.gpu
@pytest.mark.parametrize("block_size", [16, 64])
def test_decode_in_a_graph(block_size):
    case = Case([2600, 700, 40], GLM, BF16, "cuda", block_size=block_size)
    whole, _ = operator(case)
    size = 8
    q_nope, q_rope = (
        torch.zeros(size, *x.shape[1:], dtype=BF16, device="cuda") for x in case.tokens[:2]
    )
    tables = torch.zeros(size, case.block_table.shape[1], dtype=torch.int32, device="cuda")
    bounds = torch.zeros(size + 1, dtype=torch.int32, device="cuda")
    lengths = torch.zeros(size, dtype=torch.int32, device="cuda")

    def call():
        pages = (case.cache, case.kv_b, tables, bounds, lengths)
        return paged_mla_attention(q_nope, q_rope, *pages, case.scale, 1, 32768)

    call()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = call()
    for rows in ([(0, 2599), (1, 699), (2, 3)], [(0, p) for p in range(2044, 2052)], [(2, 0)]):
        n = len(rows)
        at = torch.tensor([case.starts[s] + p for s, p in rows], device="cuda")
        for held, x in ((q_nope, case.q_nope), (q_rope, case.q_rope)):
            held[:n], held[n:] = x[at], torch.nan
        tables[:n] = case.block_table[[s for s, _ in rows]]
        lengths.zero_()
        lengths[:n] = case.int32([p + 1 for _, p in rows])
        bounds.copy_(torch.arange(size + 1).clamp(max=n))
        graph.replay()
        assert_same(out[:n], whole[at], f"replay of {rows}")
        assert not out[n:].any()


@pytest.mark.gpu
def test_through_the_operators():
    case = Case([100, 300], GLM, BF16, "cuda")
    args = [x.clone().requires_grad_() for x in (*case.tokens, case.kv_b)]
    out, lse = mla_attention(*args, case.cu_seqlens, case.scale)
    assert_same(out, operator(case)[0], "operator")
    assert not lse.requires_grad
    out.sum().backward()
    assert all(torch.isfinite(x.grad).all() and x.grad.any() for x in args)
    torch.library.opcheck(mla_attention, (*args, case.cu_seqlens, case.scale))
    pages = (case.cache, case.kv_b, case.block_table, case.cu_seqlens, case.int32([100, 300]))
    paged = paged_mla_attention(*case.tokens[:2], *pages, case.scale, 300, 300)
    assert_same(paged, out.detach(), "operator on pages")


@pytest.mark.gpu
def test_padding_tokens_are_not_written():
    case = Case([20], SMALL, BF16, "cuda")
    before = case.cache.clone()
    slots = torch.full((20,), -1, device="cuda")
    write_latent_cache(case.latent + 1, case.k_rope, case.cache, slots)
    same = (case.cache == before) | (case.cache.isnan() & before.isnan())
    assert same.all()


@pytest.mark.gpu
def test_refusals():
    case = Case([20], SMALL, BF16, "cuda")
    tail = (case.cu_seqlens, 1.0)
    with pytest.raises(TypeError, match="float16"):
        mla_attention(*(x.half() for x in (*case.tokens, case.kv_b)), *tail)
    with pytest.raises(ValueError, match="positive"):
        mla_attention(*case.tokens, case.kv_b, case.cu_seqlens, 0.0)
    wide = Case([20], (2, 16, 16, 16, 1024), BF16, "cuda")
    with pytest.raises(ValueError, match="latents of 1024"):
        mla_attention(*wide.tokens, wide.kv_b, wide.cu_seqlens, 1.0)
