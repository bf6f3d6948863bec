"""The operations of a mixture of experts: router, sort, grouped products, combination."""

from collections.abc import Iterable
from dataclasses import replace

import torch
import torch.nn.functional as F
from torch import Tensor

from isomodels.kernels.grouped_linear import grouped_linear, grouped_linear_backward
from isomodels.kernels.linear import linear
from isomodels.kernels.moe_combine import moe_combine, moe_combine_backward
from isomodels.kernels.moe_sort import moe_sort
from isomodels.kernels.router import route, route_backward
from isomodels.kernels.router_logits import router_logits, router_logits_backward
from isomodels.validate.battery import Place, operation
from isomodels.validate.bits import Fault
from isomodels.validate.cases import Case, Inputs, row_operation
from isomodels.validate.operations.linear import assert_exact_integers


# Qwen3-30B-A3B and GLM-4.7-Flash; the gate of a shared expert
@row_operation(
    "router_logits", "router_logits_backward",
    small=((8, 64), (65, 100)), real=((128, 2048), (64, 2048), (1, 2048)),
)  # fmt: skip
def logits(draw: Inputs, experts: int, hidden: int) -> Case:
    """fp32 logits of the experts."""
    return Case(
        run=router_logits,
        exact=F.linear,
        rows=(draw.floats(draw.num_rows, hidden),),
        shared=(draw.floats(experts, hidden, seed=1),),
        terms=max(hidden, experts, draw.num_rows),
        backward=lambda grad, x, weight: router_logits_backward(grad, x, weight, True, True),
    )


@logits.check("rounding")
def logits_are_not_rounded(place: Place) -> None:
    """Logits stay fp32 whatever the operands are."""
    assert_exact_integers(place, router_logits, torch.float32)


# (experts, top_k, groups or 0 for softmax)
@row_operation(
    "route", "route_backward", small=((16, 4, 0), (16, 4, 4), (7, 7, 0)),
    real=((128, 8, 0),), fp32_only=True,
)  # fmt: skip
def router(draw: Inputs, experts: int, top_k: int, groups: int) -> Case:
    """Weights and ids side by side; sigmoid scores with a bias where there are groups."""
    draw = replace(draw, dtype=torch.float32)
    bias = draw.floats(experts, seed=5, kind="normal") * 0.1 if groups else None
    scoring = "sigmoid" if groups else "softmax"
    options = (max(groups, 1), max(groups // 2, 1))

    def run(x: Tensor) -> Tensor:
        weights, ids = route(x, top_k, scoring, True, 2.0, bias, *options)
        return torch.cat((weights, ids.float()), 1)

    def exact(x: Tensor) -> Tensor:
        scores = x.sigmoid() if groups else x.softmax(-1)
        choice = scores if bias is None else scores + bias.double()
        in_groups = choice.unflatten(1, (options[0], -1))  # [T, groups, experts of one]
        best = in_groups.topk(min(2, in_groups.shape[2]), 2).values.sum(2)
        kept = torch.zeros_like(best, dtype=torch.bool)
        kept.scatter_(1, best.topk(options[1], 1).indices, True)
        choice = choice.masked_fill(~kept.repeat_interleave(in_groups.shape[2], 1), -torch.inf)
        ids = choice.topk(top_k, 1).indices
        chosen = scores.gather(1, ids)
        return torch.cat((chosen / chosen.sum(1, keepdim=True) * 2.0, ids.to(x.dtype)), 1)

    def backward(grad: Tensor, x: Tensor) -> tuple[Tensor]:
        _, ids = route(x, top_k, scoring, True, 2.0, bias, *options)
        return (route_backward(grad[:, :top_k].contiguous(), x, ids, scoring, True, 2.0),)

    rows = (draw.floats(draw.num_rows, experts),)
    return Case(run=run, exact=exact, rows=rows, terms=experts, backward=backward)


@router.check("ties")
def ties_go_to_the_lowest_index(place: Place) -> None:
    """Equal logits, and zeros of both signs."""
    x = torch.tensor([[1.0, 2.0, 2.0, 1.0], [0.0, -0.0, 0.0, -1.0]], dtype=torch.float32)
    _, ids = route(x.to(place.device), 3, "softmax", True)
    if ids.tolist() != [[1, 2, 0], [0, 1, 2]]:
        raise Fault(f"ids of tied logits are {ids.tolist()}")


sort = operation("moe_sort", trainable=False)


def _assert_sorted(ids: Tensor, experts: int, what: str) -> None:
    offsets, order, places = moe_sort(ids, experts)
    flat = ids.flatten().tolist()
    right = sorted(range(len(flat)), key=lambda slot: (flat[slot], slot))
    bounds = [sum(e < expert for e in flat) for expert in range(experts + 1)]
    found = [order.tolist(), offsets.tolist(), order[places.flatten().long()].tolist()]
    for name, one, wanted in zip(
        ("order", "offsets", "places"), found, (right, bounds, [*range(len(flat))]), strict=True
    ):
        if one != wanted:
            raise Fault(f"{what}: {name} {one[:8]} instead of {wanted[:8]}")


def _ids(place: Place, tokens: int, top_k: int, experts: int) -> Tensor:
    at = torch.arange(tokens, device=place.device)[:, None] * 31
    return ((at + torch.arange(top_k, device=place.device) * 7) ** 2 % experts).int()


@sort.check("invariance")
def a_stable_sort(place: Place) -> None:
    """A token's place among those of its expert is its place in the batch."""
    ids = _ids(place, 50, 4, 16)
    for count in (1, 2, 17, 50):
        _assert_sorted(ids[:count], 16, f"the first {count} tokens")
        _assert_sorted(ids[-count:].flip(0), 16, f"the last {count} tokens in reverse")


@sort.check("degenerate")
def no_tokens_and_strides(place: Place) -> None:
    """No tokens, one token, and ids in other storage."""
    ids = _ids(place, 20, 4, 16)
    for same in (ids[:0], ids[:1], ids[::3], ids[:, ::2], ids.t().contiguous().t()):
        _assert_sorted(same, 16, f"ids {list(same.shape)}, strides {same.stride()}")


@sort.check("hazards")
def crowded_and_empty_experts(place: Place) -> None:
    """All tokens to one expert, the first or the last, the others without any."""
    for expert in (0, 15):
        ids = torch.full((40, 2), expert, dtype=torch.int32, device=place.device)
        _assert_sorted(ids, 16, f"all to expert {expert}")


@sort.check("accuracy")
def at_the_size_of_a_model(place: Place) -> None:
    """128 experts, 8 a token; on a GPU beyond one block of slots."""
    tokens = 2000 if place.on_gpu else 20 if place.interpreted else 200
    _assert_sorted(_ids(place, tokens, 8, 128), 128, "128 experts")


def sorted_outputs(place: Place) -> Iterable[Tensor]:
    """As floats: what the digest takes."""
    for part in moe_sort(_ids(place, 50, 4, 16), 16):
        yield part.float()


sort.outputs = sorted_outputs


# (experts, top_k, N, K)
@row_operation(
    "grouped_linear", "grouped_linear_backward", small=((4, 2, 65, 40), (8, 3, 7, 100)),
    real=((32, 4, 1536, 2048),),
)  # fmt: skip
def grouped(draw: Inputs, experts: int, top_k: int, n: int, k: int) -> Case:
    """Each token through its experts' products, [T, top_k * n] in the order of its slots."""
    at = torch.arange(draw.num_rows, device=draw.place.device)[:, None]
    ids = ((at * 5 + torch.arange(top_k, device=draw.place.device) * 3) % experts).int()

    def run(x: Tensor, ids: Tensor, weight: Tensor) -> Tensor:
        offsets, order, places = moe_sort(ids, experts)
        y = grouped_linear(x, weight, offsets, order, places)
        return y[places.long()].flatten(1)  # [R, n] -> [T, k, n]

    def backward(grad: Tensor, x: Tensor, ids: Tensor, weight: Tensor) -> tuple[Tensor, Tensor]:
        sorting = moe_sort(ids, experts)
        by_place = grad.view(-1, n)[sorting[1].long()]
        return grouped_linear_backward(by_place, x, weight, *sorting, True, True)

    def exact(x: Tensor, ids: Tensor, weight: Tensor) -> Tensor:
        # Expert by expert: a weight for each slot would not fit the memory of a GPU.
        slots = [(ids.flatten() == e).nonzero().squeeze(1) for e in range(experts)]
        parts = [x[at // top_k] @ weight[e].t() for e, at in enumerate(slots)]
        return torch.cat(parts)[torch.cat(slots).argsort()].view(len(x), top_k * n)

    return Case(
        run=run,
        exact=exact,
        rows=(draw.floats(draw.num_rows, k), ids),
        shared=(draw.floats(experts, n, k, seed=1),),
        terms=max(k, n * top_k, draw.num_rows),
        backward=backward,
    )


@grouped.check("linear")
def is_the_linear_of_its_expert(place: Place) -> None:
    """A row has the bits of `linear` with its expert's weight, whoever shares the expert."""
    draw = Inputs(place, place.sharp, "wide", place.few_rows)
    x, weight = draw.floats(draw.num_rows, 40), draw.floats(4, 65, 40, seed=1)
    counts = [draw.num_rows // 2, 0, 1, draw.num_rows - draw.num_rows // 2 - 1]
    bounds = torch.tensor([0, *counts], dtype=torch.int32).cumsum(0).int().to(place.device)
    y = grouped_linear(x, weight, bounds)
    for expert, part in enumerate(x.split(counts)):
        rows = y.split(counts)[expert]
        place.same(rows, linear(part, weight[expert]), f"expert {expert}")


# (top_k, H, shared expert and its gate)
@row_operation(
    "moe_combine", "moe_combine_backward",
    small=((4, 33, 1), (8, 100, 0), (1, 7, 1)), real=((8, 2048, 1), (4, 2048, 0)),
)  # fmt: skip
def combine(draw: Inputs, top_k: int, hidden: int, shared: int) -> Case:
    """Slots in order, then the shared expert."""
    rows, full = draw.num_rows, replace(draw, dtype=torch.float32)
    tensors = [draw.floats(rows, top_k, hidden), full.floats(rows, top_k, seed=1, kind="normal")]
    if shared:
        tensors += [draw.floats(rows, hidden, seed=2), full.floats(rows, 1, seed=3, kind="normal")]

    def run(y: Tensor, weights: Tensor, *rest: Tensor) -> Tensor:
        places = torch.arange(weights.numel(), dtype=torch.int32, device=y.device)
        return moe_combine(y.flatten(0, 1), weights, places.view(weights.shape), *rest)

    def exact(y: Tensor, weights: Tensor, *rest: Tensor) -> Tensor:
        total = (y * weights.unsqueeze(2)).sum(1)
        return total + rest[0] * rest[1].sigmoid() if rest else total

    def backward(grad: Tensor, y: Tensor, weights: Tensor, *rest: Tensor) -> list[Tensor]:
        places = torch.arange(weights.numel(), dtype=torch.int32, device=y.device)
        arguments = (y.flatten(0, 1), weights, places.view(weights.shape), *rest)
        gradients = moe_combine_backward(grad, *(*arguments, None, None)[:5])
        return [gradients[0].view_as(y), *gradients[1 : 2 + len(rest)]]

    return Case(run, exact, tuple(tensors), terms=top_k + hidden, backward=backward)
