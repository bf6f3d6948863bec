"""Attention on the GPU: one function, whatever the batch, tile, page, cut or graph.

The same checks run at small sizes through Triton's interpreter on any machine: index and mask
errors show there, bits do not, and its bf16 products are wrong.
"""

import importlib.util
import itertools
import os
import subprocess
import sys

import pytest
import torch

from isomodels.kernels.attention import (
    TRITON_SCHEDULE,
    attention,
    paged_attention,
    write_kv_cache,
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
# (kv heads, group, head_dim)
HEADS = [(8, 4, 128), (2, 1, 32), (4, 2, 64), (2, 5, 128), (1, 8, 256)]
LENGTHS = [1, 17, 128, 129, 0, 700, 2048, 2049, 5000]  # around a block, a segment, and several
ORDERS = [(0, 1, 2, 3), (0, 2, 1, 3), (1, 0, 2, 3)]
TILES = [
    {"BLOCK_M": 128, "num_warps": 8, "num_stages": 3},
    {"BLOCK_M": 64, "num_warps": 4, "num_stages": 2},
    {"BLOCK_M": 64, "num_warps": 8, "num_stages": 2, "TMA": False},
    {"BLOCK_M": 32, "num_warps": 4, "num_stages": 1, "TMA": False},
    {"BLOCK_M": 16, "num_warps": 2, "num_stages": 1, "TMA": False},
]
DECODES = [
    {"BLOCK_M": 16, "num_warps": 1, "num_stages": 1, "PROGRAMS": 1},
    {"BLOCK_M": 16, "num_warps": 8, "num_stages": 2, "PROGRAMS": 4096},
    {"BLOCK_M": 32, "num_warps": 2, "num_stages": 1},
    {"BLOCK_M": 64, "num_warps": 4, "num_stages": 2},
]


def assert_same(actual, expected, what):
    """The same bits; in the interpreter, whose products follow numpy, nearly the same values."""
    if actual.is_cuda:
        assert_same_bits(actual, expected, what)
    else:
        assert relative_rms(actual, expected) < unit_error(FP32, 100), what


class Case:
    """Packed sequences on a device, and their pages."""

    def __init__(self, lengths, kv_heads, group, dim, dtype, device, *, block_size=16, order=0):
        shapes = (kv_heads * group, kv_heads, kv_heads)
        self.q, self.k, self.v = (
            hard(sum(lengths), heads, dim, kind="normal", seed=i, dtype=dtype).to(device)
            for i, heads in enumerate(shapes)
        )
        self.lengths, self.device, self.scale = lengths, device, dim**-0.5
        self.starts = [0, *itertools.accumulate(lengths)]
        self.cu_seqlens = self.int32(self.starts)
        pages = Pages(lengths, kv_heads, dim, block_size, dtype, order=ORDERS[order])
        slots = torch.cat([pages.slots(i, 0, n) for i, n in enumerate(lengths)]).to(device)
        self.cache = pages.cache.to(device)  # keeps the strides
        self.block_table = pages.block_table.to(device)
        write(self.k, self.v, self.cache, slots)

    def int32(self, values):
        return torch.tensor(values, dtype=torch.int32, device=self.device)

    def packed(self, config=None):
        from isomodels.kernels import attention_triton

        return attention_triton.attention(
            self.q, self.k, self.v, self.cu_seqlens, self.scale, config
        )

    def rows(self, sequence, start, end):
        return slice(self.starts[sequence] + start, self.starts[sequence] + end)

    def step(self, runs, *, padding=0, bound_k=None, loose=0, **configs):
        """One engine step: runs of (sequence, start, end). Returns (output, rows of `packed`).

        `padding` sequences without tokens follow, and as many tokens, and `loose` more tokens.
        """
        from isomodels.kernels import attention_decode_triton

        at = torch.cat([torch.arange(self.starts[s] + a, self.starts[s] + b) for s, a, b in runs])
        at = at.to(self.device)
        counts = [b - a for _, a, b in runs] + [0] * padding
        ends = [b for _, _, b in runs] + [0] * padding
        sequences = [s for s, _, _ in runs] + [0] * padding
        q_padding = self.q.new_full((padding + loose, *self.q.shape[1:]), torch.nan)
        q = torch.cat((self.q[at], q_padding))
        bounds = self.int32([0, *itertools.accumulate(counts)])
        with uninitialised_is_nan():
            out = attention_decode_triton.paged_attention(
                q, self.cache, self.block_table[sequences], bounds, self.int32(ends),
                self.scale, max(counts), bound_k or max(ends), **configs,
            )  # fmt: skip
        assert not out[len(at) :].any(), "padding rows must be zero"
        return out[: len(at)], at


def write(k, v, cache, slots):
    from isomodels.kernels import attention_decode_triton

    attention_decode_triton.write_kv_cache(k, v, cache, slots)


def exact(q, k, v, starts, scale):
    """Attention by its definition in the dtype of q: (output, log-sum-exp)."""
    outs, sums = [], []
    for start, end in itertools.pairwise(starts):
        one, keys, values = (x[start:end].transpose(0, 1) for x in (q, k, v))
        group = len(one) // len(keys)
        keys, values = (x.repeat_interleave(group, 0) for x in (keys, values))
        scores = one @ keys.transpose(1, 2) * scale
        hidden = torch.ones(scores.shape[1:], dtype=torch.bool, device=q.device).triu(1)
        scores = scores.masked_fill(hidden, -torch.inf)
        outs.append((scores.softmax(-1) @ values).transpose(0, 1))
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
    alone.q, alone.k, alone.v = (x[rows] for x in (case.q, case.k, case.v))
    alone.cu_seqlens = case.int32([0, case.lengths[longest]])
    assert_same(alone.packed()[0], whole[rows], "one sequence alone")
    return whole


def check_paged(case, whole, tiles, decodes, decode_rows):
    """Prefill in one step, in chunks, row by row and mixed."""
    full = [(s, 0, n) for s, n in enumerate(case.lengths) if n]
    for config in [None, *tiles]:
        tile = {k: v for k, v in (config or {}).items() if k != "TMA"}
        out, at = case.step(full, tiles=tile or None)
        assert_same(out, whole[at], f"prefill over pages, tile {tile}")
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
    mixed = [*rows[::3], *((s, n // 3, n) for s, n in enumerate(case.lengths) if n > 1)]
    out, at = case.step(mixed, padding=2)
    assert_same(out, whole[at], "decode rows among chunks")


def check_gradients(case, bound, configs=(None,)):
    """Against fp64 autograd; equal from run to run."""
    from isomodels.kernels.attention_backward_triton import attention_backward

    grad = hard(*case.q.shape, kind="normal", seed=9, dtype=case.q.dtype).to(case.device)
    out, lse = case.packed()
    leaves = [x.double().requires_grad_() for x in (case.q, case.k, case.v)]
    right = torch.autograd.grad(exact(*leaves, case.starts, case.scale)[0], leaves, grad.double())
    for config in configs:
        args = (grad, case.q, case.k, case.v, case.cu_seqlens, out, lse, case.scale, config)
        first, second = attention_backward(*args), attention_backward(*args)
        for name, one, two, exactly in zip("qkv", first, second, right, strict=True):
            assert_same(one, two, f"d{name}, second run")
            assert relative_rms(one, exactly) < bound, f"d{name}, {config}"


def check_tokens_after_the_last_sequence(case, count, configs=None):
    """They have no gradient, and take nothing from the others': every row is written."""
    from isomodels.kernels.attention_backward_triton import attention_backward

    grad = hard(*case.q.shape, kind="normal", seed=9, dtype=case.q.dtype).to(case.device)
    inputs = (grad, case.q, case.k, case.v, case.packed()[0])
    lse = case.packed()[1]

    def padded(x):
        return torch.cat((x, x[:1].expand(count, *x.shape[1:])))

    right = attention_backward(*inputs[:4], case.cu_seqlens, inputs[4], lse, case.scale, configs)
    longer = [padded(x) for x in inputs]
    with uninitialised_is_nan():
        after = attention_backward(
            *longer[:4], case.cu_seqlens, longer[4], padded(lse), case.scale, configs
        )
    for name, one, exactly in zip("qkv", after, right, strict=True):
        n = len(exactly)
        assert_same(one[:n], exactly, f"d{name}, {count} tokens after the last sequence")
        assert not one[n:].any(), f"d{name} of {count} tokens after the last sequence"


def check_accuracy(case, bound):
    out, lse = case.packed()
    right, sums = exact(*(x.double() for x in (case.q, case.k, case.v)), case.starts, case.scale)
    assert relative_rms(out, right) < bound
    # Short rows of bf16: the sum is of rounded probabilities.
    assert (lse.double() - sums).abs().max() < bound * sums.abs().max().clamp(min=1)


@pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="Triton is not installed")
def test_through_the_interpreter():
    # Triton reads the variable when it is imported: a process of its own.
    code = "from tests.kernel.test_attention_triton import interpreted; interpreted()"
    environment = {**os.environ, "TRITON_INTERPRET": "1"}
    done = subprocess.run(
        [sys.executable, "-c", code], env=environment, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr[-3000:]


def interpreted():
    from isomodels.kernels import attention_decode_triton, attention_triton

    constants = TRITON_SCHEDULE.constants
    assert constants["segment"] == attention_triton.SEGMENT
    assert all(constants["kv_block"] == attention_triton.kv_block(d) for d in (32, 64, 128, 256))
    attention_triton.SEGMENT = attention_decode_triton.SEGMENT = 128
    case = Case([1, 0, 133, 20], 1, 2, 32, FP32, "cpu", block_size=48, order=1)
    tile = {"BLOCK_M": 64, "TMA": True}
    whole = check_packed(case, [tile])
    check_accuracy(case, 1e-6)
    full = [(s, 0, n) for s, n in enumerate(case.lengths) if n]
    mixed = [(2, 132, 133), (0, 0, 1), (2, 50, 133), (3, 19, 20)]
    for runs in (full, mixed):
        out, at = case.step(runs, tiles={"BLOCK_M": 64}, padding=1)
        assert_same(out, whole[at], f"step {runs}")
    out, at = case.step([(2, 132, 133), (3, 5, 6), (2, 128, 129)], padding=2)
    assert_same(out, whole[at], "decode")
    case.step([(3, 5, 9)], tiles={"BLOCK_M": 64}, padding=1, loose=70)
    case = Case([1, 0, 70, 20], 1, 2, 32, FP32, "cpu")
    keys = {"BLOCK_M": 16, "BLOCK_N": 32}
    queries = {"BLOCK_M": 32, "BLOCK_N": 16}
    pairs = [({**keys, "TMA": tma}, {**queries, "TMA": tma}) for tma in (True, False)]
    check_gradients(case, 1e-6, pairs)
    for lengths, count in (([1, 0, 70, 20], 75), ([20, 0], 1), ([33], 31)):
        case = Case(lengths, 1, 2, 32, FP32, "cpu")
        check_tokens_after_the_last_sequence(case, count, pairs[0])


@pytest.mark.gpu
@pytest.mark.parametrize(("kv_heads", "group", "dim"), HEADS)
def test_one_function(kv_heads, group, dim):
    case = Case(LENGTHS, kv_heads, group, dim, BF16, "cuda")
    # A tile of 128 rows times 256 does not fit with three stages.
    tiles = TILES if dim <= 128 else TILES[1:]
    decodes = DECODES if dim <= 128 else DECODES[:2]
    whole = check_packed(case, tiles)
    check_paged(case, whole, tiles, decodes, decode_rows=40)


@pytest.mark.gpu
@pytest.mark.parametrize(("block_size", "order"), [(16, 0), (48, 1), (64, 2)])
def test_form_for_hopper(block_size, order):
    from isomodels.kernels import attention_triton

    hopper = attention_triton._hopper(torch.device("cuda", torch.cuda.current_device()))
    if hopper is None:
        pytest.skip("only for compute capability 9.0 and Triton 3.6")
    lengths = [*[1] * 40, 0, 63, 65, 127, 128, 129, 191, 2049, 4097]
    case = Case(lengths, 8, 4, 128, BF16, "cuda", block_size=block_size, order=order)
    assert hopper.fits_packed(case.q, case.k, case.v)
    assert hopper.fits_paged(case.q, case.cache)
    whole = check_packed(case, TILES)  # the others are portable
    check_paged(case, whole, TILES[:1], [], decode_rows=3)
    fused = torch.cat((case.q, case.k, case.v), 1).split((32, 8, 8), 1)
    assert hopper.fits_packed(*fused)
    assert_same(attention(*fused, case.cu_seqlens, case.scale)[0], whole, "views of one tensor")


@pytest.mark.gpu
def test_one_function_in_float32():
    case = Case([1, 129, 0, 700, 2100], 2, 2, 64, FP32, "cuda")
    check_paged(case, check_packed(case, []), [], [], decode_rows=10)


@pytest.mark.gpu
@pytest.mark.parametrize("block_size", [16, 48, 528])
@pytest.mark.parametrize("order", range(len(ORDERS)))
def test_pages(block_size, order):
    case = Case([300, 2500], 2, 4, 128, BF16, "cuda", block_size=block_size, order=order)
    check_paged(case, case.packed()[0], [], [], decode_rows=20)


@pytest.mark.gpu
@pytest.mark.parametrize(("kv_heads", "group", "dim"), HEADS)
def test_accuracy_and_gradients(kv_heads, group, dim):
    case = Case([1, 17, 0, 300, 1000, 2500], kv_heads, group, dim, BF16, "cuda")
    check_accuracy(case, 6e-3)
    check_gradients(case, 1e-2)


@pytest.mark.gpu
@pytest.mark.parametrize("count", [1, 63, 300])
def test_gradients_of_tokens_after_the_last_sequence(count):
    case = Case([17, 1000, 0, 100], 2, 4, 128, BF16, "cuda")
    check_tokens_after_the_last_sequence(case, count)


@pytest.mark.gpu
def test_accuracy_and_gradients_in_float32():
    case = Case([1, 17, 0, 300, 700], 2, 2, 64, FP32, "cuda")
    check_accuracy(case, 1e-5)
    check_gradients(case, 1e-5)


@pytest.mark.gpu
def test_scores_far_apart():
    # Whole blocks underflow before and after the row's maximum, and rescaling reaches zero.
    case = Case([2500], 2, 2, 128, BF16, "cuda")
    case.q *= 500
    check_accuracy(case, 2e-2)
    check_paged(case, check_packed(case, TILES), [], DECODES, decode_rows=50)


@pytest.mark.gpu
def test_neighbours_of_nan():
    case = Case([130, 333, 64], 2, 2, 128, BF16, "cuda")
    whole, _ = case.packed()
    rows = case.rows(1, 0, 333)
    for x in (case.q, case.k, case.v):
        x[: rows.start] = torch.nan
        x[rows.stop :] = torch.inf
    assert_same(case.packed()[0][rows], whole[rows], "among NaN and infinity")


@pytest.mark.gpu
def test_decode_in_a_graph():
    case = Case([2600, 700, 40], 8, 4, 128, BF16, "cuda")
    whole, _ = case.packed()
    size = 8
    q = torch.zeros(size, *case.q.shape[1:], dtype=BF16, device="cuda")
    tables = torch.zeros(size, case.block_table.shape[1], dtype=torch.int32, device="cuda")
    bounds = torch.zeros(size + 1, dtype=torch.int32, device="cuda")
    lengths = torch.zeros(size, dtype=torch.int32, device="cuda")

    def call():
        return paged_attention(q, case.cache, tables, bounds, lengths, case.scale, 1, 32768)

    call()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = call()
    for rows in ([(0, 2599), (1, 699), (2, 3)], [(0, p) for p in range(2044, 2052)], [(2, 0)]):
        n = len(rows)
        at = torch.tensor([case.starts[s] + p for s, p in rows], device="cuda")
        q[:n] = case.q[at]
        q[n:] = torch.nan
        tables[:n] = case.block_table[[s for s, _ in rows]]
        lengths.zero_()
        lengths[:n] = case.int32([p + 1 for _, p in rows])
        bounds.copy_(torch.arange(size + 1).clamp(max=n))
        graph.replay()
        assert_same(out[:n], whole[at], f"replay of {rows}")
        assert not out[n:].any()


@pytest.mark.gpu
def test_through_the_operators():
    case = Case([100, 300], 2, 2, 64, BF16, "cuda")
    q, k, v = (x.clone().requires_grad_() for x in (case.q, case.k, case.v))
    out, lse = attention(q, k, v, case.cu_seqlens, case.scale)
    assert_same(out, case.packed()[0], "operator")
    assert not lse.requires_grad
    out.sum().backward()
    assert all(torch.isfinite(x.grad).all() and x.grad.any() for x in (q, k, v))
    torch.library.opcheck(attention, (q, k, v, case.cu_seqlens, case.scale))


@pytest.mark.gpu
def test_padding_tokens_are_not_written():
    case = Case([20], 2, 1, 64, BF16, "cuda")
    before = case.cache.clone()
    slots = torch.full((20,), -1, device="cuda")
    write_kv_cache(case.k + 1, case.v, case.cache, slots)
    same = (case.cache == before) | (case.cache.isnan() & before.isnan())
    assert same.all()


@pytest.mark.gpu
def test_refusals():
    case = Case([20], 2, 1, 64, BF16, "cuda")
    with pytest.raises(TypeError, match="float16"):
        attention(case.q.half(), case.k.half(), case.v.half(), case.cu_seqlens, 1.0)
    odd = case.q[..., :40].contiguous()
    with pytest.raises(ValueError, match="head_dim 40"):
        attention(odd, odd, odd, case.cu_seqlens, 1.0)
    with pytest.raises(ValueError, match="positive"):
        attention(case.q, case.k, case.v, case.cu_seqlens, 0.0)
