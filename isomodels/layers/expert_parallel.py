"""Experts on several ranks: rows are dispatched to the rank of their expert and returned.

Each expert is whole on one rank, and a row's result depends on no other row; it is combined with
the token's other slots at home, in slot order. So no bit depends on the number of ranks.

t: tokens of this rank, k: experts of a token, R = t * k: slots, n: ranks.
"""

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from isomodels.kernels.grouped_linear import sum_slots
from isomodels.layers.collectives import all_gather, all_to_all_rows, select_rows
from isomodels.layers.parallel import ExpertParallel, TensorParallel


@dataclass(frozen=True)
class DispatchPlan:
    """Where the rows of this rank go, and which rows come here.

    Attributes:
        parallel: the ranks.
        send_counts: rows to each rank; they lie in the order of the experts.
        receive_counts: rows from each rank.
        by_expert: [rows received] int64, from the order in which they came (by rank, then by
            expert) to that of the experts here.
        offsets: [experts here + 1] int32, bounds of each expert's rows.
    """

    parallel: ExpertParallel
    send_counts: list[int]
    receive_counts: list[int]
    by_expert: Tensor
    offsets: Tensor


def plan_dispatch(offsets: Tensor, parallel: ExpertParallel) -> DispatchPlan:
    """Agree with the other ranks on who sends how many rows.

    Args:
        offsets: [E + 1] int32 of this rank's slots, from `moe_sort`.
        parallel: the ranks.
    """
    here = (len(offsets) - 1) // parallel.size  # experts of a rank
    counts = all_gather(offsets.diff(), parallel).long()  # [n, E]
    sent = counts[parallel.rank].view(parallel.size, here).sum(1)
    arriving = counts[:, parallel.rank * here : (parallel.rank + 1) * here]  # [n, experts here]
    experts = torch.arange(here, device=offsets.device).repeat(parallel.size)
    by_expert = experts.repeat_interleave(arriving.flatten()).argsort(stable=True)
    bounds = torch.zeros(here + 1, dtype=torch.int32, device=offsets.device)
    bounds[1:] = arriving.sum(0).cumsum(0)
    return DispatchPlan(parallel, sent.tolist(), arriving.sum(1).tolist(), by_expert, bounds)


def _unsorted(rows: Tensor, by_expert: Tensor) -> Tensor:
    out = torch.empty_like(rows)
    out[by_expert] = rows
    return out


class _Dispatch(torch.autograd.Function):
    """Tokens [t, H] of this rank -> rows [rows received, H] in the order of the experts here."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, order: Tensor, places: Tensor, plan: DispatchPlan) -> Tensor:
        ctx.plan, ctx.dtype = plan, x.dtype
        ctx.save_for_backward(places)
        rows = x[order.long() // places.shape[1]]  # [R, H]
        arrived = all_to_all_rows(rows, plan.send_counts, plan.receive_counts, plan.parallel)
        return arrived[plan.by_expert]

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple:
        (places,) = ctx.saved_tensors
        plan = ctx.plan
        rows = _unsorted(grads[0], plan.by_expert)
        home = all_to_all_rows(rows, plan.receive_counts, plan.send_counts, plan.parallel)
        return sum_slots(home.float(), places).to(ctx.dtype), None, None, None


class _Return(torch.autograd.Function):
    """Rows of the experts here -> [R, H], the rows of this rank's slots by place."""

    @staticmethod
    def forward(ctx: Any, y: Tensor, plan: DispatchPlan) -> Tensor:
        ctx.plan = plan
        rows = _unsorted(y, plan.by_expert)
        return all_to_all_rows(rows, plan.receive_counts, plan.send_counts, plan.parallel)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple:
        plan = ctx.plan
        arrived = all_to_all_rows(grads[0], plan.send_counts, plan.receive_counts, plan.parallel)
        return arrived[plan.by_expert], None


def dispatch(x: Tensor, order: Tensor, places: Tensor, plan: DispatchPlan) -> Tensor:
    """Tokens [t, H] -> rows [rows received, H], expert by expert."""
    out: Tensor = _Dispatch.apply(x, order, places, plan)
    return out


def return_rows(y: Tensor, plan: DispatchPlan) -> Tensor:
    """Rows [rows received, H], expert by expert -> [R, H] by place."""
    out: Tensor = _Return.apply(y, plan)
    return out


def own_offsets(offsets: Tensor, parallel: ExpertParallel) -> Tensor:
    """[E + 1] of all experts -> [experts here + 1], the bounds of those here among all places."""
    here = (len(offsets) - 1) // parallel.size
    return offsets[parallel.rank * here :][: here + 1]


def share_rows(y: Tensor, offsets: Tensor, parallel: ExpertParallel) -> Tensor:
    """[R, H], of which each rank has the places of its experts -> those of all.

    The ranks have the same tokens. Shapes do not depend on where tokens go, and nothing is read
    back from the device: an engine's CUDA graphs hold it. No gradient.
    """
    here = (len(offsets) - 1) // parallel.size
    places = torch.arange(len(y), device=y.device).unsqueeze(1)
    owner = (places >= offsets[here:-1:here]).sum(1)  # [R], by where each rank's experts begin
    return select_rows(y, owner, TensorParallel(parallel.rank, parallel.size, parallel.group))
