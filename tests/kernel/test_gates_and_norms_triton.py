"""Gates, norms and partial rope of the hybrids on the Triton backend."""

import pytest
import torch
import torch.nn.functional as F

from isomodels.kernels.delta_gates import DECAY_FLOOR, delta_gates
from isomodels.kernels.gated_norm import gated_rms_norm
from isomodels.kernels.one_plus import one_plus
from isomodels.kernels.partial_rope import partial_rope
from isomodels.kernels.rms_norm import rms_norm
from isomodels.kernels.rope import rope_table
from isomodels.kernels.sigmoid_gate import sigmoid_gate
from tests.kernel.battery import DTYPES, KINDS, assert_same_bits, hard, relative_rms, unit_error
from tests.kernel.test_delta_gates import exact as exact_gates
from tests.kernel.test_gates_and_norms import exact_norm
from tests.kernel.test_partial_rope import exact as exact_rope
from tests.kernel.triton_support import (
    DEVICE,
    ON_GPU,
    assert_rows_stand_alone_on_gpu,
    assert_same_in_a_graph,
    kernels,
)

gate_kernels, norm_kernels = kernels("sigmoid_gate_triton"), kernels("gated_norm_triton")
delta_kernels, rope_kernels = kernels("delta_gates_triton"), kernels("partial_rope_triton")
shift_kernels, plain_rope = kernels("one_plus_triton"), kernels("rope_triton")
EPS, COUNTS, BF16 = 1e-6, (2, 3, 8, 31, 32, 33, 64, 65, 200), torch.bfloat16
HERE = DTYPES if DEVICE == "cuda" else [torch.float32]
gpu = ON_GPU


def normal(*shape, seed=0, dtype=torch.float32):
    return hard(*shape, kind="normal", seed=seed, dtype=dtype).to(DEVICE)


def gradients(function, *inputs, seeds):
    leaves = [x.detach().double().requires_grad_() for x in inputs]
    return torch.autograd.grad(function(*leaves), leaves, seeds)


def projected(tokens, heads, dim, dtype):
    """A part of a wider projection, as a model hands it over."""
    return normal(tokens, 2 * heads, dim + 3, seed=9, dtype=dtype)[:, ::2, 1:-2]


@pytest.mark.parametrize("dtype", HERE)
@pytest.mark.parametrize(("tokens", "heads", "dim"), [(1, 1, 1), (9, 5, 40), (21, 2, 256)])
def test_gates_of_heads(tokens, heads, dim, dtype):
    x, grad = (normal(tokens, heads, dim, seed=i, dtype=dtype) for i in (0, 1))
    gate, weight = projected(tokens, heads, dim, dtype), normal(dim, seed=2)
    bound = 2 * unit_error(dtype, dim * heads * tokens)
    exact = lambda x, z: x * z.sigmoid()  # noqa: E731
    assert (
        relative_rms(gate_kernels.sigmoid_gate(x, gate), exact(x.double(), gate.double())) < bound
    )
    right = gradients(exact, x, gate, seeds=grad.double())
    for one, exactly in zip(gate_kernels.sigmoid_gate_backward(grad, x, gate), right, strict=True):
        assert relative_rms(one, exactly) < bound
    y = norm_kernels.gated_rms_norm(x, gate, weight, EPS)
    assert relative_rms(y, exact_norm(x.double(), gate.double(), weight.double())) < bound
    right = gradients(exact_norm, x, gate, weight, seeds=grad.double())
    ours = norm_kernels.gated_rms_norm_backward(grad, x, gate, weight, EPS)
    for one, exactly in zip(ours, right, strict=True):
        # a norm of one channel has no gradient but by eps
        assert dim == 1 or relative_rms(one, exactly) < 2 * bound


@pytest.mark.parametrize("dtype", HERE)
@pytest.mark.parametrize(("tokens", "heads"), [(1, 1), (70, 6), (300, 32)])
def test_delta_gates(tokens, heads, dtype):
    wide = 3 * normal(tokens, 2 * heads + 3, dtype=dtype)
    a, b = wide[:, 1 : heads + 1], wide[:, heads + 2 : -1]
    a_log = torch.linspace(0.01, 16.0, heads).log().to(DEVICE)
    dt_bias = torch.linspace(-6.0, 2.0, heads).to(DEVICE)
    g, beta = delta_kernels.delta_gates(a, b, a_log, dt_bias, DECAY_FLOOR)
    right = exact_gates(*(x.double() for x in (a, b, a_log, dt_bias)))
    for one, exactly in zip((g, beta), (right[0].clamp(min=DECAY_FLOOR), right[1]), strict=True):
        assert one.dtype == torch.float32
        size = 4 + a.float().abs().maximum(b.float().abs()) + dt_bias.abs()
        assert ((one - exactly).abs() <= 2e-7 * size * exactly.abs()).all()
    grads = [normal(tokens, heads, seed=i) for i in (4, 5)]
    floored = lambda a, b, A, dt: torch.cat(  # noqa: E731
        (exact_gates(a, b, A, dt)[0].clamp(min=DECAY_FLOOR), b.sigmoid()), 1
    )
    right = gradients(floored, a, b, a_log, dt_bias, seeds=torch.cat(grads, 1).double())
    ours = delta_kernels.delta_gates_backward(*grads, a, b, a_log, dt_bias, g, beta, DECAY_FLOOR)
    for one, exactly in zip(ours, right, strict=True):
        assert relative_rms(one, exactly) < 2 * torch.finfo(one.dtype).eps + 1e-5


def test_the_ends_of_the_range():
    x = torch.tensor([[-1e30, -200.0, -100.0, 0.0, 100.0, 1e30]], device=DEVICE)
    none = torch.zeros(6, device=DEVICE)
    g, beta = delta_kernels.delta_gates(x, x, none, none, DECAY_FLOOR)
    assert g[0].tolist() == pytest.approx([0.0, 0.0, 0.0, -0.6931472, -100.0, -104.0])
    assert beta[0].tolist() == pytest.approx([0.0, 0.0, 0.0, 0.5, 1.0, 1.0])
    g, _ = delta_kernels.delta_gates(x, x, none + 80.0, none, DECAY_FLOOR)
    assert g.isfinite().all()
    nan = torch.full_like(x, torch.nan)
    assert all(x.isnan().all() for x in delta_kernels.delta_gates(nan, nan, none, none, -104.0))
    ones, ends = torch.ones(1, 1, 6, device=DEVICE), x[None]
    gated = gate_kernels.sigmoid_gate(ones, ends)
    assert gated.flatten().tolist() == pytest.approx([0.0, 0.0, 0.0, 0.5, 1.0, 1.0])
    z = x.clamp(-1e3, 1e3)[None]
    y = norm_kernels.gated_rms_norm(ones, z, torch.ones(6, device=DEVICE), 0.0)
    assert y.flatten().tolist() == pytest.approx([0.0, 0.0, 0.0, 0.0, 100.0, 1000.0])


@pytest.mark.parametrize("dtype", HERE)
@pytest.mark.parametrize(
    ("tokens", "heads", "dim", "rotary"), [(1, 1, 2, 2), (9, 5, 40, 10), (21, 2, 256, 64)]
)
def test_partial_rope(tokens, heads, dim, rotary, dtype):
    x, grad = projected(tokens, heads, dim, dtype), normal(tokens, heads, dim, dtype=dtype)
    positions = (torch.arange(tokens) * 37 % 64).to(DEVICE)
    table, weight = rope_table(rotary, 1e4, 64).to(DEVICE), normal(dim, seed=1)
    args, bound = (x, positions, table, weight, EPS), 2 * unit_error(dtype, dim * heads * tokens)
    y = rope_kernels.partial_rope(*args)
    exact = lambda x, w: exact_rope(x, w, table, positions)  # noqa: E731
    assert relative_rms(y, exact(x.double(), weight.double())) < bound
    if rotary == dim:
        full = plain_rope.rope(x, positions, table, weight, EPS)
        assert relative_rms(y, full.double()) < bound
    right = gradients(exact, x, weight, seeds=grad.double())
    for one, exactly in zip(rope_kernels.partial_rope_backward(grad, *args), right, strict=True):
        assert relative_rms(one, exactly) < (1e-2 if dim == 2 else 2 * bound)


@pytest.mark.parametrize("dtype", HERE)
@pytest.mark.parametrize("count", [1, 7, 2049])
def test_one_plus(count, dtype):
    weight = normal(2 * count, dtype=dtype)[::2]
    assert_same_bits(shift_kernels.one_plus(weight), 1.0 + weight.float())


@gpu
@pytest.mark.parametrize("kind", KINDS)
def test_rows_stand_alone(kind):
    weight, table = hard(256, seed=1).cuda(), rope_table(64, 1e7, 2048).cuda()
    position = torch.full((2000,), 977, device="cuda")
    x = hard(300, 2, 16, 256, kind=kind, dtype=BF16).cuda()
    norm = lambda x: gated_rms_norm(*x.unbind(1), weight, EPS)  # noqa: E731
    turn = lambda x: partial_rope(x[:, 0], position[: len(x)], table, weight, EPS)  # noqa: E731
    for op in (lambda x: sigmoid_gate(*x.unbind(1)), norm, turn):
        assert_rows_stand_alone_on_gpu(op, x, COUNTS)
    if kind not in ("huge", "wide"):
        rate, bias = weight[:32].clamp(-3, 3), weight[32:64].clamp(-3, 3)
        gates = lambda x: torch.cat(delta_gates(*x.chunk(2, 1), rate, bias), 1)  # noqa: E731
        assert_rows_stand_alone_on_gpu(gates, hard(300, 64, kind=kind, dtype=BF16).cuda(), COUNTS)


@gpu
def test_tiles_move_no_bit(monkeypatch):
    x, gate = hard(333, 2, 16, 256, dtype=BF16).cuda().unbind(1)
    weight, table = hard(256, seed=1).cuda(), rope_table(64, 1e7, 2048).cuda()
    position = torch.arange(333, device="cuda") * 5
    calls = [
        (gate_kernels, lambda: gate_kernels.sigmoid_gate(x, gate)),
        (norm_kernels, lambda: norm_kernels.gated_rms_norm(x, gate, weight, EPS)),
        (rope_kernels, lambda: rope_kernels.partial_rope(x, position, table, weight, EPS)),
    ]
    for module, call in calls:
        whole = call()
        for rows, warps in [(1, 1), (4, 8), (32, 4), (2, 2)]:
            monkeypatch.setattr(module, "_ROWS", rows)
            monkeypatch.setattr(module, "_WARPS", warps)
            assert_same_bits(call(), whole, f"{module.__name__}: {rows} rows, {warps} warps")
    a, b = hard(333, 2, 32, kind="normal", dtype=BF16).cuda().unbind(1)
    zeros = torch.zeros(32, device="cuda")
    call = lambda: torch.cat(delta_kernels.delta_gates(a, b, zeros, zeros, -104.0))  # noqa: E731
    whole = call()
    for elements in (32, 128, 4096):
        monkeypatch.setattr(delta_kernels, "_ELEMENTS", elements)
        assert_same_bits(call(), whole, f"delta_gates: {elements} elements")


@gpu
def test_row_50_of_the_field_reports_a_small_zero_centred_weight_counts_in_bf16():
    x, weight = hard(40, 64, kind="normal", dtype=BF16).cuda(), torch.full((64,), 1e-3).cuda()
    weight = weight.bfloat16()
    right = rms_norm(x.float(), 1.0 + weight.float(), EPS).bfloat16()
    assert_same_bits(rms_norm(x, one_plus(weight), EPS), right)
    assert (one_plus(weight) != 1).all()


@gpu
def test_backward_repeats():
    x, gate = hard(3000, 2, 16, 256, kind="normal", dtype=BF16).cuda().unbind(1)
    weight, table = hard(256, seed=1).cuda(), rope_table(64, 1e7, 3000).cuda()
    position, grad = torch.arange(3000, device="cuda"), x.flip(0)
    a, b = hard(3000, 2, 32, kind="normal", dtype=BF16).cuda().unbind(1)
    g, beta = delta_gates(a, b, weight[:32], weight[32:64])
    calls = [
        lambda: norm_kernels.gated_rms_norm_backward(grad, x, gate, weight, EPS),
        lambda: rope_kernels.partial_rope_backward(grad, x, position, table, weight, EPS),
        lambda: delta_kernels.delta_gates_backward(
            beta, g, a, b, weight[:32], weight[32:64], g, beta, DECAY_FLOOR
        ),
    ]
    for call in calls:
        for one, two in zip(call(), call(), strict=True):
            assert_same_bits(one, two, "second run")


@gpu
def test_same_in_a_graph():
    x, table = hard(64, 2, 16, 256, dtype=BF16).cuda(), rope_table(64, 1e7, 2048).cuda()
    weight, position = hard(256, seed=1).cuda(), torch.arange(64, device="cuda")
    assert_same_in_a_graph(lambda x: sigmoid_gate(*x.unbind(1)), x)
    assert_same_in_a_graph(lambda x: gated_rms_norm(*x.unbind(1), weight, EPS), x)
    assert_same_in_a_graph(lambda x: partial_rope(x[:, 0], position, table, weight, EPS), x)
    gates = lambda x: torch.cat(delta_gates(*x.chunk(2, 1), weight[:8], weight[8:16]), 1)  # noqa: E731
    assert_same_in_a_graph(gates, hard(64, 16, kind="normal", dtype=BF16).cuda())


def test_silu_of_the_norm_is_that_of_torch():
    z = torch.linspace(-20, 20, 256, device=DEVICE).view(1, 1, 256)
    y = norm_kernels.gated_rms_norm(torch.ones_like(z), z, torch.ones(256, device=DEVICE), 0.0)
    assert relative_rms(y, F.silu(z.double())) < unit_error(torch.float32, 4)
