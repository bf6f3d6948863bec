"""RMSNorm, rope, SwiGLU and embedding on the Triton backend."""

import pytest
import torch
import torch.nn.functional as F

from isomodels.kernels.attention import write_kv_cache
from isomodels.kernels.embedding import embedding
from isomodels.kernels.rms_norm import add_rms_norm, rms_norm
from isomodels.kernels.rope import rope, rope_table
from isomodels.kernels.rope_qkv import rope_qkv, rope_qkv_to_cache
from isomodels.kernels.swiglu import swiglu
from tests.kernel.battery import DTYPES, KINDS, assert_same_bits, hard, relative_rms, unit_error
from tests.kernel.triton_support import (
    DEVICE,
    ON_GPU,
    assert_rows_stand_alone_on_gpu,
    assert_same_in_a_graph,
    kernels,
)

norm_kernels, rope_kernels = kernels("rms_norm_triton"), kernels("rope_triton")
common_kernels = kernels("common_triton")
swiglu_kernels, embedding_kernels = kernels("swiglu_triton"), kernels("embedding_triton")
COUNTS = (2, 3, 8, 31, 32, 33, 64, 65, 200)
EPS = 1e-6
BF16 = torch.bfloat16
# In the interpreter fp32 alone: it does not round to bf16.
HERE = DTYPES if DEVICE == "cuda" else [torch.float32]
gpu = ON_GPU


def normal(*shape, seed=0, dtype=torch.float32):
    return hard(*shape, kind="normal", seed=seed, dtype=dtype).to(DEVICE)


def exact_norm(x, weight):
    return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + EPS) * weight


def exact_rope(x, positions, table, weight):
    x = x if weight is None else exact_norm(x, weight)
    cos, sin = table[positions].double().unsqueeze(1).chunk(2, -1)
    first, second = x.chunk(2, -1)
    return torch.cat((first * cos - second * sin, second * cos + first * sin), -1)


def exact_gradients(function, *inputs, seed):
    leaves = [x.detach().double().requires_grad_() for x in inputs]
    return torch.autograd.grad(function(*leaves), leaves, seed.double())


@pytest.mark.parametrize("dtype", HERE)
@pytest.mark.parametrize(("rows", "n"), [(1, 1), (5, 200), (7, 1000), (3, 4096), (600, 64)])
def test_rms_norm(rows, n, dtype):
    rows = min(rows, 20) if DEVICE == "cpu" else rows
    x, residual, grad, grad_total = (normal(rows, n, seed=i, dtype=dtype) for i in range(4))
    weight = normal(n, seed=5, dtype=dtype)
    bound = unit_error(dtype, n)
    y, total = norm_kernels.rms_norm(x, residual, weight, EPS)
    assert_same_bits(total, (x.float() + residual.float()).to(dtype))
    assert relative_rms(y, exact_norm(total.double(), weight.double())) < bound
    alone, _ = norm_kernels.rms_norm(total, None, weight, EPS)
    assert_same_bits(alone, y, "with and without the residual")
    dx, dweight = norm_kernels.rms_norm_backward(grad, grad_total, x, weight, EPS)
    right = exact_gradients(exact_norm, x, weight, seed=grad)
    assert relative_rms(dx, right[0] + grad_total) < 2 * bound
    assert relative_rms(dweight, right[1]) < unit_error(dtype, rows + n)


@pytest.mark.parametrize("dtype", HERE)
@pytest.mark.parametrize("norm", [True, False])
@pytest.mark.parametrize(("tokens", "heads", "d"), [(1, 1, 2), (9, 5, 40), (21, 4, 128)])
def test_rope(tokens, heads, d, norm, dtype):
    fused = normal(tokens, heads + 3, d, dtype=dtype)
    x, grad = fused[:, 1 : 1 + heads], normal(tokens, heads, d, seed=1, dtype=dtype)
    positions = (torch.arange(tokens) * 7 % 64).to(DEVICE)
    table = rope_table(d, 1e4, 64).to(DEVICE)
    weight = normal(d, seed=2, dtype=dtype) if norm else None
    y = rope_kernels.rope(x, positions, table, weight, EPS)
    args = (x,) if weight is None else (x, weight)
    function = lambda x, weight=None: exact_rope(x, positions, table, weight)  # noqa: E731
    assert relative_rms(y, function(*(a.double() for a in args))) < 2 * unit_error(dtype, d)
    gradients = rope_kernels.rope_backward(grad, x, positions, table, weight, EPS)
    right = exact_gradients(function, *args, seed=grad)
    for one, exact in zip(gradients, right, strict=False):
        # at D = 2 the norm leaves a direction and the gradient nearly cancels
        assert relative_rms(one, exact) < (1e-2 if d == 2 else 4 * unit_error(dtype, d * tokens))


def pages(kv_heads, d, dtype, heads_first=True):
    """Of 16 slots, in either of vLLM's layouts."""
    shape = (3, kv_heads, 16, 2 * d) if heads_first else (3, 16, kv_heads, 2 * d)
    cache = torch.full(shape, 7.0, dtype=dtype, device=DEVICE)
    return cache if heads_first else cache.transpose(1, 2)


@pytest.mark.parametrize("dtype", HERE)
@pytest.mark.parametrize("norm", [True, False])
@pytest.mark.parametrize(
    ("tokens", "heads", "kv_heads", "d"), [(1, 1, 1, 2), (9, 5, 1, 40), (6, 4, 2, 128)]
)
def test_rope_qkv(tokens, heads, kv_heads, d, norm, dtype):
    wide = normal(tokens, heads + 2 * kv_heads + 2, d, dtype=dtype)
    qkv = wide[:, 1:-1]
    grads = [normal(tokens, n, d, seed=i, dtype=dtype) for i, n in ((1, heads), (2, kv_heads))]
    grads.append(normal(kv_heads, tokens, d, seed=3, dtype=dtype).transpose(0, 1))
    positions, table = (torch.arange(tokens) * 7 % 64).to(DEVICE), rope_table(d, 1e4, 64).to(DEVICE)
    weights = [normal(d, seed=i, dtype=dtype) if norm else None for i in (4, 5)]
    args = (qkv, positions, table, *weights, heads, EPS)
    q, k, v = rope_kernels.rope_qkv(*args)
    assert_same_bits(q, rope_kernels.rope(qkv[:, :heads], positions, table, weights[0], EPS))
    keys, values = qkv[:, heads:-kv_heads], qkv[:, -kv_heads:]
    assert_same_bits(k, rope_kernels.rope(keys, positions, table, weights[1], EPS))
    assert_same_bits(v, values.contiguous())
    slots = (torch.arange(tokens) * 5 % 48).to(DEVICE)
    slots[::4] = -1  # padding
    for heads_first in (True, False):
        cache = pages(kv_heads, d, dtype, heads_first)
        again = rope_kernels.rope_qkv(*args, (cache, slots))
        for one, two in zip(again, (q, k, v), strict=True):
            assert_same_bits(one, two, "with pages")
        expected, kept = pages(kv_heads, d, dtype).cpu(), (slots >= 0).cpu()
        write_kv_cache(k.cpu()[kept], v.cpu()[kept], expected, slots.cpu()[kept])
        assert_same_bits(cache.cpu(), expected, "pages")
    dqkv, *dweights = rope_kernels.rope_qkv_backward(*grads, *args[:5], EPS)
    for x, grad, weight, dweight, part in zip(
        (qkv[:, :heads], keys), grads[:2], weights, dweights, (dqkv[:, :heads], dqkv[:, heads:]),
        strict=True,
    ):  # fmt: skip
        inputs = (x,) if weight is None else (x, weight)
        function = lambda x, w=None: exact_rope(x, positions, table, w)  # noqa: E731
        right = exact_gradients(function, *inputs, seed=grad)
        bound = 1e-2 if d == 2 else 4 * unit_error(dtype, d * tokens)
        assert relative_rms(part[:, : x.shape[1]], right[0]) < bound
        assert (dweight is None) == (weight is None)
        assert weight is None or relative_rms(dweight, right[1]) < bound
    assert_same_bits(dqkv[:, -kv_heads:].contiguous(), grads[2].contiguous())


def spread(x):
    """The same values two places apart in memory."""
    return torch.stack((x, torch.full_like(x, 7)), -1).flatten(-2)[..., ::2]


def test_every_argument_may_be_spread_out():
    x, weight, table = normal(5, 4, 16), normal(16, seed=1), rope_table(16, 1e4, 64).to(DEVICE)
    positions, slots = torch.arange(5, device=DEVICE) * 3, torch.arange(5, device=DEVICE)
    cases = [
        (norm_kernels.rms_norm, (x[0], x[1], weight, EPS)),
        (norm_kernels.rms_norm_backward, (x[0], x[1], x[2], weight, EPS)),
        (rope_kernels.rope, (x, positions, table, weight, EPS)),
        (rope_kernels.rope_backward, (x.flip(0), x, positions, table, weight, EPS)),
        (rope_kernels.rope_qkv, (x, positions, table, weight, weight * 2, 2, EPS)),
        (
            rope_kernels.rope_qkv_backward,
            (*x.split((2, 1, 1), 1), x.flip(0), positions, table, weight, weight * 2, EPS),
        ),
        (swiglu_kernels.swiglu, (x[0],)),
        (swiglu_kernels.swiglu_backward, (x[0, :, :8], x[0])),
        (embedding_kernels.embedding_backward, (x[0], positions[:4], 20, torch.float32)),
    ]
    for function, args in cases:
        expected = function(*args)
        expected = expected if isinstance(expected, tuple) else (expected,)
        for i, argument in enumerate(args):
            if isinstance(argument, torch.Tensor):
                actual = function(*args[:i], spread(argument), *args[i + 1 :])
                actual = actual if isinstance(actual, tuple) else (actual,)
                for one, two in zip(actual, expected, strict=True):
                    assert_same_bits(one, two, f"{function.__name__}, argument {i}")
    caches = [pages(1, 16, torch.float32) for _ in range(2)]
    for cache, at in zip(caches, (slots, spread(slots)), strict=True):
        rope_kernels.rope_qkv(x, positions, table, None, None, 2, EPS, (cache, at))
    assert_same_bits(*caches, "slots")


@pytest.mark.parametrize("dtypes", [[BF16], [torch.float32, BF16]])
@pytest.mark.parametrize(("rows", "width"), [(1, 1), (700, 40), (70, 300)])
def test_sum_rows(rows, width, dtypes):
    x, split = normal(rows, width), rows if len(dtypes) == 1 else rows // 2
    sums = common_kernels.sum_rows(x, split, dtypes)
    exact = [part.double().sum(0) for part in (x[:split], x[split:])]
    for one, right, dtype in zip(sums, exact, dtypes, strict=False):
        assert one.dtype == dtype
        empty = not right.abs().max()
        assert one.abs().max() == 0 if empty else relative_rms(one, right) < unit_error(dtype, rows)


@pytest.mark.parametrize("dtype", HERE)
@pytest.mark.parametrize(("rows", "width"), [(1, 1), (5, 300), (3, 2049)])
def test_swiglu(rows, width, dtype):
    x, grad = normal(rows, 2 * width, dtype=dtype), normal(rows, width, seed=1, dtype=dtype)
    exact = lambda x: F.silu(x.chunk(2, -1)[0]) * x.chunk(2, -1)[1]  # noqa: E731
    assert relative_rms(swiglu_kernels.swiglu(x), exact(x.double())) < unit_error(dtype, 4)
    (right,) = exact_gradients(exact, x, seed=grad)
    assert relative_rms(swiglu_kernels.swiglu_backward(grad, x), right) < unit_error(dtype, 8)


@pytest.mark.parametrize("dtype", HERE)
@pytest.mark.parametrize(("tokens", "vocab", "width"), [(1, 3, 5), (40, 6, 70), (30, 100, 600)])
def test_embedding_backward(tokens, vocab, width, dtype):
    grad = normal(tokens, width, dtype=dtype)
    ids = (torch.arange(tokens) ** 2 % vocab).to(DEVICE)
    right = torch.zeros(vocab, width, dtype=torch.float64, device=DEVICE)
    right.index_add_(0, ids, grad.double())
    actual = embedding_kernels.embedding_backward(grad, ids, vocab, dtype)
    assert relative_rms(actual, right) < unit_error(dtype, tokens)


@gpu
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("n", [4096, 2048, 128, 1000])
def test_norm_rows_stand_alone(n, kind):
    x, weight = hard(300, n, kind=kind, dtype=BF16).cuda(), hard(n, seed=1, dtype=BF16).cuda()
    assert_rows_stand_alone_on_gpu(lambda x: rms_norm(x, weight, EPS), x, COUNTS)
    other = hard(300, n, kind=kind, seed=2, dtype=BF16).cuda()
    both = torch.cat((x, other), 1)
    op = lambda xr: torch.cat(add_rms_norm(*xr.chunk(2, 1), weight, EPS), 1)  # noqa: E731
    assert_rows_stand_alone_on_gpu(op, both, COUNTS)


@gpu
@pytest.mark.parametrize("heads", [1, 4, 8, 32])
@pytest.mark.parametrize("norm", [True, False])
def test_rope_rows_stand_alone(heads, norm):
    table = rope_table(128, 1e6, 4096).cuda()
    weight = hard(128, seed=1, dtype=BF16).cuda() if norm else None
    position = torch.full((2000,), 977, device="cuda")
    op = lambda x: rope(x, position[: len(x)], table, weight, EPS)  # noqa: E731
    x = hard(300, heads, 128, dtype=BF16).cuda()
    whole = assert_rows_stand_alone_on_gpu(op, x, COUNTS)
    for part in (1, 2, 4):  # heads of a rank of tensor parallelism
        if heads % part == 0:
            shards = [op(shard) for shard in x.chunk(part, 1)]
            assert_same_bits(torch.cat(shards, 1), whole, f"{part} ranks")


def qkv_case(tokens, heads, kv_heads, norm=True):
    qkv = hard(tokens, heads + 2 * kv_heads, 128, dtype=BF16).cuda()
    weights = [hard(128, seed=i, dtype=BF16).cuda() if norm else None for i in (1, 2)]
    position = torch.arange(tokens, device="cuda") % 4096
    return qkv, position, rope_table(128, 1e6, 4096).cuda(), *weights, heads, EPS


@gpu
@pytest.mark.parametrize("norm", [True, False])
@pytest.mark.parametrize(("heads", "kv_heads"), [(32, 8), (16, 8), (5, 1)])
def test_the_fused_rope_has_the_bits_of_rope(heads, kv_heads, norm, monkeypatch):
    qkv, position, table, *weights, _, _ = args = qkv_case(1000, heads, kv_heads, norm)
    q = rope(qkv[:, :heads], position, table, weights[0], EPS)
    k = rope(qkv[:, heads:-kv_heads], position, table, weights[1], EPS)
    tilings = [(rope_kernels._ROWS, rope_kernels._WARPS)]
    tilings += [(4, 1), (8, 4), (64, 8)] if norm and heads == 32 else []
    for rows, warps in tilings:
        monkeypatch.setattr(rope_kernels, "_ROWS", rows)
        monkeypatch.setattr(rope_kernels, "_WARPS", warps)
        cache, slots = pages(kv_heads, 128, BF16), torch.arange(1000, device="cuda") - 952
        fused = rope_qkv(*args)
        expected = (q, k, qkv[:, -kv_heads:].contiguous())
        for one, two in zip(fused, expected, strict=True):
            assert_same_bits(one, two, f"{rows} rows a program")
        for one, two in zip(rope_qkv_to_cache(*args, cache, slots), expected, strict=True):
            assert_same_bits(one, two, f"{rows} rows a program, with pages")
        kept = torch.cat((k, expected[2]), 2)[952:]  # [48, kv_heads, 2D]
        assert_same_bits(cache.transpose(1, 2).flatten(0, 1), kept, "pages")


@gpu
def test_rows_of_the_fused_rope_stand_alone():
    qkv, _, *rest = qkv_case(300, 8, 2)
    position = torch.full((2000,), 977, device="cuda")
    op = lambda x: torch.cat(rope_qkv(x, position[: len(x)], *rest), 1)  # noqa: E731
    assert_rows_stand_alone_on_gpu(op, qkv, COUNTS)


@gpu
@pytest.mark.parametrize("norm", [True, False])
def test_gradients_of_the_fused_rope_are_those_of_rope(norm):
    qkv, position, table, *weights, heads, _ = qkv_case(900, 8, 2, norm)
    qkv = hard(900, 12, 128, kind="normal", dtype=BF16).cuda()
    leaves = [x.requires_grad_() for x in (qkv, *weights) if x is not None]
    seeds = [
        hard(900, n, 128, kind="normal", seed=n + i, dtype=BF16).cuda()
        for i, n in enumerate((8, 2, 2))
    ]
    fused = rope_qkv(qkv, position, table, *weights, heads, EPS)
    q, k, v = qkv.split((8, 2, 2), 1)
    apart = (
        rope(q, position, table, weights[0], EPS),
        rope(k, position, table, weights[1], EPS),
        v,
    )
    first, second = (torch.autograd.grad(fused, leaves, seeds, retain_graph=True) for _ in range(2))
    right = torch.autograd.grad(apart, leaves, seeds)
    for one, two, other in zip(first, second, right, strict=True):
        assert_same_bits(one, two, "second run")
        assert relative_rms(one, other) < unit_error(BF16)
    assert_same_bits(first[0], right[0], "gradient of qkv")


@gpu
@pytest.mark.parametrize("kind", KINDS)
def test_swiglu_rows_stand_alone(kind):
    x = hard(300, 2 * 1000, kind=kind, dtype=BF16).cuda()
    assert_rows_stand_alone_on_gpu(swiglu, x, COUNTS)


@gpu
def test_embedding_copies_and_sums_without_atomics():
    weight = hard(1000, 512, dtype=BF16).cuda().requires_grad_()
    ids = torch.randint(0, 1000, (5000,), generator=torch.Generator().manual_seed(0)).cuda()
    ids[::3] = 7  # a frequent token
    y = embedding(ids, weight)
    assert_same_bits(y, weight[ids])
    seed = hard(5000, 512, kind="normal", dtype=BF16).cuda()
    first, second = (torch.autograd.grad(embedding(ids, weight), weight, seed)[0] for _ in range(2))
    assert_same_bits(first, second, "second run")
    right = torch.zeros(1000, 512, dtype=torch.float64, device="cuda")
    right.index_add_(0, ids, seed.double())
    assert relative_rms(first, right) < unit_error(BF16, 2000)


@gpu
def test_backward_repeats():
    x = hard(3000, 4096, kind="normal", dtype=BF16).cuda()
    weight, grad = hard(4096, seed=1, dtype=BF16).cuda(), x.flip(0)
    runs = [norm_kernels.rms_norm_backward(grad, x, x, weight, EPS) for _ in range(2)]
    q, norm_weight = x.view(3000, 32, 128), weight[:128].contiguous()
    position, table = torch.arange(3000, device="cuda"), rope_table(128, 1e6, 4096).cuda()
    args = (q.flip(0), q, position, table, norm_weight, EPS)
    rope_runs = [rope_kernels.rope_backward(*args) for _ in range(2)]
    for one, two in [*zip(*runs, strict=True), *zip(*rope_runs, strict=True)]:
        assert_same_bits(one, two, "second run")


@gpu
def test_same_in_a_graph():
    x, weight = hard(64, 4096, dtype=BF16).cuda(), hard(4096, seed=1, dtype=BF16).cuda()
    table, position = rope_table(128, 1e6, 4096).cuda(), torch.arange(64, device="cuda")
    assert_same_in_a_graph(lambda x: rms_norm(x, weight, EPS), x)
    assert_same_in_a_graph(swiglu, x)
    qkv, *rest = qkv_case(64, 32, 8)
    assert_same_in_a_graph(lambda x: torch.cat(rope_qkv(x, *rest), 1), qkv)
    assert_same_in_a_graph(
        lambda x: rope(x.view(64, 32, 128), position, table, weight[:128], EPS), x
    )
