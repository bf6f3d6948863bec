"""RMSNorm, rope, SwiGLU and embedding on the Triton backend."""

import pytest
import torch
import torch.nn.functional as F

from isomodels.kernels.embedding import embedding
from isomodels.kernels.rms_norm import add_rms_norm, rms_norm
from isomodels.kernels.rope import rope, rope_table
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
    assert_same_in_a_graph(
        lambda x: rope(x.view(64, 32, 128), position, table, weight[:128], EPS), x
    )
