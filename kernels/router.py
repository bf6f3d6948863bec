"""Which experts a token goes to: `isomodels::route`, of the logits of `isomodels::router_logits`.

Experts are chosen in the order of their logits (softmax: the order of the probabilities before any
rounding) or of sigmoid plus correction bias, ties to the lowest index; a slot's place is its rank.
Weights come from the scores without the bias.

Mathematics: Fedus et al., "Switch Transformers" (2021); sigmoid, bias and groups: "DeepSeek-V3
Technical Report" (2024), section 2.1.2.
"""

from typing import Any

import torch
from torch import Tensor

from isomodels.kernels.fixed_order import fold_sum, one_thread
from isomodels.kernels.router_logits import router_logits as router_logits
from isomodels.kernels.schedule import Schedule, declare

SCORINGS = ("softmax", "sigmoid")
_EPSILON = 1e-20  # of the sigmoid's normaliser, as in the reference implementation

SCHEDULE = declare(
    Schedule(
        operation="route",
        backend="torch",
        version=1,
        constants={
            "order": "logits (softmax) or sigmoid + bias, descending; NaN first",
            "ties": "lowest index; zeros of both signs tie",
            "group_score": "sum of the two highest",
            "softmax": "exp(logit - row maximum) over its sum",
            "sigmoid": "1 / (1 + exp(-logit))",
            "sum_over_experts": "halving",
            "sum_over_slots": "in slot order",
            "epsilon": "1e-20 for sigmoid, none for softmax",
        },
    )
)

TRITON_SCHEDULE = declare(
    Schedule(
        operation="route",
        backend="triton",
        version=1,
        constants={
            "order": "logits (softmax) or sigmoid + bias, descending; NaN first",
            "ties": "lowest index; zeros of both signs tie",
            "group_score": "sum of the two highest",
            "softmax": "exp(logit - row maximum) over its sum",
            "sigmoid": "1 / (1 + exp(-logit))",
            "exp": "the GPU's own power of two of x times log2(e)",
            "quotients": "rounded to nearest",
            "sum_over_experts": "neighbours, padded with zeros to a power of two",
            "sum_over_slots": "in slot order",
            "epsilon": "1e-20 for sigmoid, none for softmax",
        },
    )
)


@torch.library.custom_op("isomodels::route", mutates_args=(), device_types="cpu")
def route(
    logits: Tensor,
    top_k: int,
    scoring: str,
    normalize: bool,
    scale: float = 1.0,
    correction_bias: Tensor | None = None,
    n_group: int = 1,
    topk_group: int = 1,
    replay: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Choose the experts of each token and weigh them.

    A NaN logit ranks first and makes the weights of its row NaN: the ids stay in range, and the
    fault is not hidden. On a GPU a replayed id out of range does the same, and the nearest expert
    is taken.

    Args:
        logits: [T, E] fp32.
        top_k: experts a token goes to.
        scoring: "softmax" over all experts, or "sigmoid" of each.
        normalize: divide the chosen scores by their sum.
        scale: factor of the weights.
        correction_bias: [E] fp32, added to the sigmoid for the choice only.
        n_group: experts lie in so many equal groups; only the experts of the best `topk_group`
            groups, by the sum of their two highest scores, may be chosen.
        topk_group: see `n_group`.
        replay: [T, top_k] int32, distinct ids in [0, E) to take instead of choosing.

    Returns:
        (weights [T, top_k] fp32, ids [T, top_k] int32), best first.

    Raises:
        ValueError: for numbers or shapes that do not fit.
        TypeError: for another dtype.
    """
    check_route(
        logits, top_k, scoring, correction_bias, n_group=n_group, topk_group=topk_group,
        replay=replay,
    )  # fmt: skip
    with one_thread():
        if replay is None:
            choice = logits if scoring == "softmax" else sigmoid(logits)
            if correction_bias is not None:
                choice = choice + correction_bias
            ids = _choose(choice, top_k, n_group, topk_group)
        else:
            ids = replay.clone()
        chosen, total = _scores(logits, ids, scoring, normalize)
        return chosen / total * scale, ids


def check_route(
    logits: Tensor,
    top_k: int,
    scoring: str,
    correction_bias: Tensor | None = None,
    *,
    n_group: int = 1,
    topk_group: int = 1,
    replay: Tensor | None = None,
) -> None:
    """Refuse what `route` cannot take.

    Raises:
        ValueError: naming what does not fit.
        TypeError: for another dtype.
    """
    if logits.dim() != 2 or logits.dtype != torch.float32:
        raise TypeError(
            f"route needs logits [T, E] in float32, got {list(logits.shape)} in {logits.dtype}"
        )
    experts = logits.shape[1]
    if scoring not in SCORINGS:
        raise ValueError(f"route knows the scorings {', '.join(SCORINGS)}, not {scoring!r}")
    if scoring == "softmax" and (correction_bias is not None or n_group != 1):
        raise ValueError("route takes a correction bias and groups with sigmoid scores only")
    if correction_bias is not None and (
        correction_bias.shape != logits.shape[1:] or correction_bias.dtype != torch.float32
    ):
        raise ValueError(
            f"route needs a correction bias [{experts}] in float32, "
            f"got {list(correction_bias.shape)} in {correction_bias.dtype}"
        )
    check_groups(experts, top_k, n_group, topk_group)
    if replay is None:
        return
    if replay.shape != (len(logits), top_k) or replay.dtype != torch.int32:
        raise ValueError(
            f"route needs replayed ids [{len(logits)}, {top_k}] in int32, "
            f"got {list(replay.shape)} in {replay.dtype}"
        )


def check_groups(experts: int, top_k: int, n_group: int, topk_group: int) -> None:
    """Refuse numbers of experts and groups that no token could be routed by.

    Raises:
        ValueError: naming them.
    """
    if n_group < 1 or experts % n_group:
        raise ValueError(f"{experts} experts cannot lie in {n_group} equal groups")
    if not 1 <= topk_group <= n_group:
        raise ValueError(f"topk_group must be from 1 to n_group = {n_group}, got {topk_group}")
    if n_group > 1 and experts // n_group < 2:
        raise ValueError(
            f"a group is scored by its two best experts, {n_group} groups of {experts} experts "
            "have only one each"
        )
    eligible = topk_group * (experts // n_group)
    if not 1 <= top_k <= eligible:
        raise ValueError(f"a token cannot go to {top_k} of {eligible} eligible experts")


def sigmoid(x: Tensor) -> Tensor:
    """Elementwise, fp32; torch's own rounds differently in its vector body and its scalar tail."""
    return 1.0 / (1.0 + torch.exp(-x))


def _choose(choice: Tensor, top_k: int, n_group: int, topk_group: int) -> Tensor:
    """[T, E] fp32 -> ids of the best [T, top_k] int32."""
    # NaN first, ties to the lowest index
    order = choice.argsort(dim=1, descending=True, stable=True)
    if n_group > 1:
        groups = choice.view(len(choice), n_group, choice.shape[1] // n_group)
        best = groups.sort(dim=2, descending=True).values  # [T, groups, E / groups]
        scores = best[..., 0] + best[..., 1]
        kept = scores.argsort(dim=1, descending=True, stable=True)[:, :topk_group]
        excluded = torch.ones_like(scores, dtype=torch.bool).scatter_(1, kept, False)
        excluded = excluded.repeat_interleave(groups.shape[2], 1)  # [T, E]
        # Behind all others, whatever their scores: a mask of -inf would tie with real ones.
        order = order.gather(1, excluded.gather(1, order).byte().argsort(dim=1, stable=True))
    return order[:, :top_k].to(torch.int32)


def _scores(
    logits: Tensor, ids: Tensor, scoring: str, normalize: bool
) -> tuple[Tensor, Tensor | float]:
    """(numerators of the chosen [T, k], their denominator [T, 1] or 1)."""
    if scoring == "sigmoid":
        chosen = sigmoid(logits.gather(1, ids.long()))
        return chosen, slot_sum(chosen) + _EPSILON if normalize else 1.0
    exponentials = torch.exp(logits - logits.amax(1, keepdim=True))  # [T, E]
    chosen = exponentials.gather(1, ids.long())
    if normalize:  # the sum over all experts would cancel
        return chosen, slot_sum(chosen)
    return chosen, fold_sum(exponentials).unsqueeze(1)


def slot_sum(x: Tensor) -> Tensor:
    """[T, k] -> [T, 1], from the first slot to the last."""
    total = x[:, :1]
    for slot in range(1, x.shape[1]):
        total = total + x[:, slot : slot + 1]
    return total


@route.register_kernel("cuda")
def _(
    logits: Tensor,
    top_k: int,
    scoring: str,
    normalize: bool,
    scale: float = 1.0,
    correction_bias: Tensor | None = None,
    n_group: int = 1,
    topk_group: int = 1,
    replay: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    from isomodels.kernels import router_triton

    check_route(
        logits, top_k, scoring, correction_bias, n_group=n_group, topk_group=topk_group,
        replay=replay,
    )  # fmt: skip
    return router_triton.route(
        logits, top_k, scoring, normalize, scale, correction_bias, n_group, topk_group, replay
    )


@route.register_fake
def _(
    logits: Tensor,
    top_k: int,
    scoring: str,
    normalize: bool,
    scale: float = 1.0,
    correction_bias: Tensor | None = None,
    n_group: int = 1,
    topk_group: int = 1,
    replay: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    shape = (logits.shape[0], top_k)
    return logits.new_empty(shape), logits.new_empty(shape, dtype=torch.int32)


# An operator of its own, so that torch.compile need not look into Triton launches.
@torch.library.custom_op("isomodels::route_backward", mutates_args=(), device_types="cuda")
def route_backward(
    grad: Tensor, logits: Tensor, ids: Tensor, scoring: str, normalize: bool, scale: float
) -> Tensor:
    """Gradient of `route` on the GPU: grad [T, k] fp32, logits [T, E] -> [T, E] fp32."""
    from isomodels.kernels import router_triton

    return router_triton.route_backward(grad, logits, ids, scoring, normalize, scale)


@route_backward.register_fake
def _(
    grad: Tensor, logits: Tensor, ids: Tensor, scoring: str, normalize: bool, scale: float
) -> Tensor:
    return logits.new_empty(logits.shape)


def _route_setup(ctx: Any, inputs: tuple, output: Any) -> None:
    logits, _, ctx.scoring, ctx.normalize = inputs[:4]
    ctx.scale = inputs[4] if len(inputs) > 4 else 1.0
    ctx.inputs = len(inputs)
    ctx.mark_non_differentiable(output[1])
    ctx.save_for_backward(logits, output[1])


def _route_backward(ctx: Any, grad: Tensor, _: Tensor) -> tuple:
    logits, ids = ctx.saved_tensors
    dlogits = route_gradient(grad, logits, ids, ctx.scoring, ctx.normalize, ctx.scale)
    return dlogits, *[None] * (ctx.inputs - 1)


def route_gradient(
    grad: Tensor, logits: Tensor, ids: Tensor, scoring: str, normalize: bool, scale: float
) -> Tensor:
    """grad [T, k] fp32 of the weights -> [T, E] fp32 of the logits."""
    if grad.is_cuda:
        return route_backward(grad, logits, ids, scoring, normalize, scale)
    ids = ids.long()
    chosen, total = _scores(logits, ids, scoring, normalize)
    grad = grad * scale
    if normalize:
        # d(s_i / sum s) = (ds_i - w_i * sum of ds) / sum s
        grad = grad - (grad * chosen / total).sum(1, keepdim=True)
    if scoring == "sigmoid":
        dchosen = grad / total * chosen * (1.0 - chosen)
        return torch.zeros_like(logits).scatter_add_(1, ids, dchosen)
    dlogits = torch.zeros_like(logits).scatter_add_(1, ids, grad * chosen / total)
    if normalize:
        return dlogits
    probabilities = torch.exp(logits - logits.amax(1, keepdim=True)) / total
    return dlogits - probabilities * dlogits.sum(1, keepdim=True)


route.register_autograd(_route_backward, setup_context=_route_setup)
