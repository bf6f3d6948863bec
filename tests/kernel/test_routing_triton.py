"""Router, sort and combination on the Triton backend."""

import pytest
import torch

from isomodels.kernels import moe_combine as combine_module
from isomodels.kernels import router as router_module
from isomodels.kernels.linear import linear
from isomodels.kernels.moe_combine import moe_combine
from isomodels.kernels.moe_sort import moe_sort
from isomodels.kernels.router import route
from isomodels.kernels.router_logits import router_logits
from tests.kernel.battery import DTYPES, KINDS, assert_same_bits, hard, relative_rms, unit_error
from tests.kernel.test_moe_sort import draw
from tests.kernel.triton_support import (
    DEVICE,
    ON_GPU,
    assert_rows_stand_alone_on_gpu,
    assert_same_in_a_graph,
    kernels,
)

router_kernels, sort_kernels = kernels("router_triton"), kernels("moe_sort_triton")
combine_kernels = kernels("moe_combine_triton")
BF16, FP32 = torch.bfloat16, torch.float32
HERE = DTYPES if DEVICE == "cuda" else [FP32]
gpu = ON_GPU
COUNTS = (2, 3, 31, 32, 33, 64, 65, 200)


def normal(*shape, seed=0, dtype=FP32):
    return hard(*shape, kind="normal", seed=seed, dtype=dtype).to(DEVICE)


# (T, k, E): one block of slots, several, one that is full; more experts than slots
@pytest.mark.parametrize(
    ("tokens", "top_k", "experts"), [(1, 1, 1), (37, 2, 8), (64, 2, 8), (150, 4, 40), (0, 3, 5)]
)
def test_sort(tokens, top_k, experts):
    ids = draw(tokens, top_k, experts)
    offsets, order, places = sort_kernels.moe_sort(ids.to(DEVICE), experts)
    flat = ids.flatten().tolist()
    right = sorted(range(len(flat)), key=lambda slot: (flat[slot], slot))
    assert order.tolist() == right
    assert offsets.tolist() == [sum(e < expert for e in flat) for expert in range(experts + 1)]
    assert places.flatten()[order.long()].tolist() == list(range(len(flat)))
    assert {t.dtype for t in (offsets, order, places)} == {torch.int32}


def test_sort_of_more_blocks_than_are_summed_at_once(monkeypatch):
    monkeypatch.setattr(sort_kernels, "_BLOCKS", 2)
    test_sort(150, 4, 8)


def test_ids_out_of_range_stay_within_the_places():
    ids = torch.tensor([[-1, 3], [8, 2**31 - 1], [-(2**31), 0]], dtype=torch.int32).to(DEVICE)
    offsets, order, places = sort_kernels.moe_sort(ids, 5)
    expected = ids.clamp(0, 4)
    assert offsets.tolist() == [0, 3, 3, 3, 4, 6]
    assert order.sort().values.tolist() == list(range(6))
    assert expected.flatten()[order.long()].diff().min() >= 0
    assert places.flatten()[order.long()].tolist() == list(range(6))


# (E, k, scoring, normalize, groups, kept groups): sizes that are no power of two among them
ROUTES = [
    (16, 4, "softmax", True, 1, 1),
    (7, 7, "softmax", False, 1, 1),
    (24, 4, "sigmoid", True, 8, 3),
    (9, 3, "sigmoid", False, 3, 2),
    (16, 4, "sigmoid", True, 1, 1),
]


def hard_logits(rows, experts):
    """Ties, zeros of both signs, infinities and a NaN among random logits."""
    x = normal(rows, experts)
    x[0] = x[0].round()
    x[1, :3] = torch.tensor([0.0, -0.0, 0.0])
    x[1, 3:] = -1.0
    x[2, 2] = torch.nan
    x[3, 1], x[3, 4] = torch.inf, -torch.inf
    return x


@pytest.mark.parametrize("case", ROUTES)
def test_route(case):
    experts, top_k, scoring, normalize, groups, kept = case
    x = hard_logits(6, experts)
    bias = None
    if scoring == "sigmoid":
        bias = (normal(experts, seed=1) - 1).to(DEVICE)  # negative, with groups
        bias[1] = bias[2]
    arguments = (top_k, scoring, normalize, 2.5, bias, groups, kept)
    weights, ids = router_kernels.route(x, *arguments, None)
    on_cpu = route._backend_fns["cpu"]
    right, right_ids = on_cpu(
        x.cpu(), *arguments[:4], None if bias is None else bias.cpu(), groups, kept
    )
    # The CPU's exponential differs in the last bit: the two need not agree on a near tie.
    assert ids.tolist() == right_ids.tolist()
    assert (weights.isnan().cpu() == right.isnan()).all()
    assert weights[2].isnan().any()
    assert relative_rms(weights.cpu().nan_to_num(), right.double().nan_to_num()) < 1e-6
    again, replayed = router_kernels.route(x, *arguments[:4], bias, 1, 1, ids)
    assert torch.equal(replayed, ids)
    assert_same_bits(again, weights, "weights of a replay")


def test_a_group_is_scored_by_its_two_best():
    x = torch.full((1, 9), -5.0, device=DEVICE)
    x[0, 0] = 3.0  # the best of all, alone in its group
    x[0, 3:5] = x[0, 7:9] = 1.0
    ids = router_kernels.route(x, 4, "sigmoid", True, 1.0, None, 3, 2, None)[1]
    assert ids.tolist() == [[3, 4, 7, 8]]


def test_replayed_ids_out_of_range_are_not_hidden():
    x, ids = normal(3, 8), torch.tensor([[0, 1], [2, 8], [-1, 3]], dtype=torch.int32).to(DEVICE)
    weights, taken = router_kernels.route(x, 2, "softmax", True, 1.0, None, 1, 1, ids)
    assert taken.tolist() == [[0, 1], [2, 7], [0, 3]]
    assert weights.isnan().tolist() == [[False] * 2, [True] * 2, [True] * 2]


@pytest.mark.parametrize("case", ROUTES)
def test_gradient_of_a_route(case):
    experts, top_k, scoring, normalize, *_ = case
    x, grad = normal(5, experts), normal(5, top_k, seed=1)
    ids = torch.stack([torch.randperm(experts)[:top_k] for _ in range(5)]).int()
    found = router_kernels.route_backward(grad, x, ids.to(DEVICE), scoring, normalize, 2.5)
    leaf = x.cpu().double().requires_grad_()
    chosen, total = router_module._scores(leaf, ids, scoring, normalize)
    weights = chosen / total * 2.5
    (right,) = torch.autograd.grad(weights, leaf, grad.cpu().double())
    assert relative_rms(found.cpu(), right) < 1e-5


@pytest.mark.parametrize("dtype", HERE)
@pytest.mark.parametrize(("rows", "experts", "hidden"), [(5, 8, 64), (3, 1, 40), (33, 65, 100)])
def test_logits_and_their_gradients(rows, experts, hidden, dtype):
    x = normal(rows, hidden, dtype=dtype)
    weight = normal(experts, hidden, seed=1, dtype=dtype)
    grad = normal(rows, experts, seed=2)
    logits = router_kernels.router_logits(x, weight)
    assert logits.dtype == FP32
    exact = [t.double() for t in (x, weight, grad)]
    assert relative_rms(logits, exact[0] @ exact[1].T) < unit_error(FP32, hidden)
    dx, dweight = router_kernels.logits_backward(grad, x, weight, True, True)
    assert relative_rms(dx, exact[2] @ exact[1]) < unit_error(dtype, experts)
    assert relative_rms(dweight, exact[2].T @ exact[0]) < unit_error(dtype, rows)
    assert router_kernels.logits_backward(grad, x, weight, False, False)[0].numel() == 0


def test_three_parts_are_the_whole():
    x = normal(500) * torch.exp2(normal(500, seed=1) * 20)
    parts = [part.double() for part in router_kernels._parts(x)]
    assert_same_bits(sum(parts).float(), x)


COMBINATIONS = [(3, 33, False, False), (4, 100, True, False), (1, 7, True, True), (8, 40, 1, 1)]


def combined(top_k, hidden, shared, gated, rows=5, dtype=FP32):
    order = torch.randperm(rows * top_k, generator=torch.Generator().manual_seed(0))
    return (
        normal(rows * top_k, hidden, dtype=dtype),
        normal(rows, top_k, seed=1),
        order.view(rows, top_k).int().to(DEVICE),
        normal(rows, hidden, seed=2, dtype=dtype) if shared else None,
        normal(rows, 1, seed=3) if gated else None,
    )


@pytest.mark.parametrize("dtype", HERE)
@pytest.mark.parametrize("case", COMBINATIONS)
def test_combine(case, dtype):
    arguments = combined(*case, dtype=dtype)
    y, weights, places, shared, gate = arguments
    total = weights[:, :1] * y[places[:, 0].long()].float()
    for slot in range(1, weights.shape[1]):
        total = total + weights[:, slot : slot + 1] * y[places[:, slot].long()].float()
    if shared is not None and gate is None:
        total = total + shared.float()
    found = combine_kernels.moe_combine(*arguments)
    if gate is None:
        assert_same_bits(found, total.to(dtype))
    else:
        right = total.double() + gate.double().sigmoid() * shared.double()
        assert relative_rms(found, right) < unit_error(dtype, 1)
    grad = normal(len(places), y.shape[1], seed=4, dtype=dtype)
    gradients = combine_kernels.combine_backward(grad, *arguments)
    on_cpu = [None if t is None else t.cpu() for t in (grad.float(), *arguments)]
    right = combine_module.combine_gradients(*on_cpu)
    for one, exactly in zip(gradients, right, strict=True):
        if exactly is not None:
            assert relative_rms(one.cpu(), exactly.double()) < 2 * unit_error(one.dtype, 50)


def test_rows_to_their_places_and_back():
    x, places = normal(5, 33), combined(3, 1, False, False)[2]
    rows = combine_kernels.spread(x, places)
    for slot in range(3):
        assert_same_bits(rows[places[:, slot].long()], x)
    assert_same_bits(combine_kernels.sum_slots(rows, places), x + x + x)


@gpu
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(
    ("hidden", "experts"), [(2048, 64), (2048, 128), (2048, 256), (2048, 1), (1000, 60)]
)
def test_logits_stand_alone(hidden, experts, dtype):
    weight = hard(experts, hidden, seed=1, dtype=dtype).cuda()
    x = hard(700, hidden, dtype=dtype).cuda()
    counts = (*COUNTS, 16, 17, 511, 512, 513)
    whole = assert_rows_stand_alone_on_gpu(lambda x: router_logits(x, weight), x, counts)
    assert_same_bits(whole.to(dtype), linear(x, weight), "rounded as a linear is")


def packed(x, case, bias):
    _, top_k, scoring, normalize, groups, kept = case
    weights, ids = route(x, top_k, scoring, normalize, 2.5, bias, groups, kept)
    return torch.cat((weights, ids.float()), 1)


MODELS = [
    (128, 8, "softmax", True, 1, 1),
    (512, 10, "softmax", False, 1, 1),
    (64, 4, "sigmoid", True, 1, 1),
    (256, 8, "sigmoid", True, 8, 4),
    (160, 6, "sigmoid", True, 8, 3),
]


@gpu
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("case", MODELS)
def test_routes_stand_alone(case, kind):
    bias = hard(case[0], kind="normal", seed=1).cuda() if case[2] == "sigmoid" else None
    x = hard(300, case[0], kind=kind).cuda()
    assert_rows_stand_alone_on_gpu(lambda x: packed(x, case, bias), x, COUNTS)


@gpu
@pytest.mark.parametrize("case", MODELS)
def test_routes_of_fp64(case):
    """Outside ties, and the order is exact: by (score, lowest index)."""
    experts, top_k, scoring, normalize, groups, kept = case
    x = hard(2000, experts, kind="normal").cuda()
    bias = hard(experts, kind="normal", seed=1).cuda() * 0.1 if scoring == "sigmoid" else None
    weights, ids = route(x, top_k, scoring, normalize, 2.5, bias, groups, kept)
    scores = x.double().sigmoid() if scoring == "sigmoid" else x.double().softmax(1)
    choice = scores if bias is None else scores + bias.double()
    in_groups = choice.view(len(x), groups, -1)
    best = in_groups.topk(2, 2).values.sum(2)
    chosen = torch.zeros_like(best, dtype=torch.bool).scatter_(1, best.topk(kept, 1).indices, True)
    allowed = chosen.repeat_interleave(experts // groups, 1)
    ranked = choice.masked_fill(~allowed, -torch.inf).topk(top_k + 1, 1).values
    apart = (ranked[:, :-1] - ranked[:, 1:] > 1e-6).all(1)
    apart &= best.topk(groups, 1).values.diff(dim=1).abs().gt(1e-6).all(1)
    right = choice.masked_fill(~allowed, -torch.inf).topk(top_k, 1).indices
    assert apart.float().mean() > 0.9
    assert (ids[apart].long() == right[apart]).all()
    exact = scores.gather(1, ids.long())
    exact = exact / exact.sum(1, keepdim=True) if normalize else exact
    assert relative_rms(weights, exact * 2.5) < 1e-6


@gpu
@pytest.mark.parametrize("case", MODELS)
def test_ties_go_to_the_lowest_index(case):
    experts, top_k, scoring, normalize, groups, kept = case
    x = torch.zeros(4, experts, device="cuda")
    x[1] = -0.0
    x[2, ::2] = -0.0
    x[3] = 1.5
    ids = route(x, top_k, scoring, normalize, 1.0, None, groups, kept)[1]
    assert ids.tolist() == [list(range(top_k))] * 4


@gpu
@pytest.mark.parametrize(("tokens", "top_k", "experts"), [(8192, 8, 256), (5000, 10, 512)])
def test_sort_of_a_model(tokens, top_k, experts):
    ids = draw(tokens, top_k, experts).cuda()
    offsets, order, places = moe_sort(ids, experts)
    assert torch.equal(order, ids.flatten().argsort(stable=True).int())
    counts = torch.bincount(ids.flatten().long(), minlength=experts)
    assert torch.equal(offsets[1:], counts.cumsum(0).int())
    slots = torch.arange(tokens * top_k, dtype=torch.int32, device="cuda")
    assert torch.equal(places.flatten()[order.long()], slots)


@gpu
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("gated", [True, False])
def test_combinations_stand_alone(gated, dtype):
    top_k, hidden = 4, 2048
    y, weights, places, shared, _ = combined(top_k, hidden, True, gated, 300, dtype)
    rows = [y[places.long()].flatten(1).float(), weights, shared.float()]
    sizes = [r.shape[1] for r in rows]

    def op(x):
        by_slot, weights, shared = x.split(sizes, 1)
        y = by_slot.to(dtype).reshape(-1, hidden)
        places = torch.arange(len(y), dtype=torch.int32, device="cuda").view(-1, top_k)
        gates = weights[:, :1].contiguous() if gated else None
        return moe_combine(y, weights, places, shared.to(dtype), gates)

    assert_rows_stand_alone_on_gpu(op, torch.cat(rows, 1), COUNTS)


@gpu
def test_gradients_repeat():
    case = combined(8, 2048, True, True, 500, BF16)
    leaves = [t.requires_grad_() for t in case if t is not None and t.is_floating_point()]
    seed = normal(500, 2048, seed=9, dtype=BF16)
    out = moe_combine(*case)
    runs = [torch.autograd.grad(out, leaves, seed, retain_graph=True) for _ in range(2)]
    for one, two in zip(*runs, strict=True):
        assert_same_bits(one, two, "moe_combine")
    x = normal(500, 2048, dtype=BF16).requires_grad_()
    weight = normal(128, 2048, seed=1, dtype=BF16).requires_grad_()
    weights, _ = route(router_logits(x, weight), 8, "softmax", True)
    seed = normal(500, 8, seed=9)
    runs = [torch.autograd.grad(weights, (x, weight), seed, retain_graph=True) for _ in range(2)]
    for one, two in zip(*runs, strict=True):
        assert_same_bits(one, two, "route")


@gpu
def test_same_in_a_graph():
    x = normal(64, 2048, dtype=BF16)
    weight = normal(64, 2048, seed=1, dtype=BF16)
    bias = normal(64, seed=2)

    def op(x):
        weights, ids = route(router_logits(x, weight), 4, "sigmoid", True, 1.8, bias)
        _, order, places = moe_sort(ids, 64)
        return moe_combine(x[order.long() // 4], weights, places, x)

    assert_same_in_a_graph(op, x)


@gpu
def test_opcheck():
    x, weight = (normal(*s, dtype=BF16).requires_grad_() for s in ((5, 16), (8, 16)))
    torch.library.opcheck(router_logits, (x, weight))
    logits = normal(5, 8).requires_grad_()
    torch.library.opcheck(route, (logits, 2, "softmax", True))
    torch.library.opcheck(moe_sort, (draw(5, 3).cuda(), 8))
    arguments = combined(3, 16, True, True, dtype=BF16)
    torch.library.opcheck(moe_combine, tuple(t.detach() for t in arguments))
