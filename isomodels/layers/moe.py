"""Mixture of experts: a router, experts whose weights are one tensor, and shared experts.

T: tokens, E: experts, k: experts of a token, R = T * k: slots, I: width of an expert.
"""

from collections.abc import Callable
from typing import Unpack

import torch
from torch import Tensor, nn

from isomodels.config import DenseConfig, MoEConfig, Routing
from isomodels.kernels.grouped_linear import grouped_linear
from isomodels.kernels.moe_combine import moe_combine
from isomodels.kernels.moe_sort import moe_sort
from isomodels.kernels.router import check_groups, route, router_logits
from isomodels.kernels.swiglu import swiglu
from isomodels.layers.collectives import (
    all_gather,
    gather_tokens,
    own_slice,
    slice_tokens,
    sum_gradients,
)
from isomodels.layers.expert_parallel import (
    dispatch,
    own_offsets,
    plan_dispatch,
    return_rows,
    share_rows,
)
from isomodels.layers.linear import Placed, parameter
from isomodels.layers.mlp import MLP
from isomodels.layers.parallel import ALONE, Layout, Shard, TensorParallel, split
from isomodels.layers.pinned import PinnedBuffers

# logits [T, E], ids [T, k], weights [T, k] -> the weights, the same bits, with a loss hung on them
AttachLoss = Callable[[Tensor, Tensor, Tensor], Tensor]


class Router(PinnedBuffers):
    """Chooses the experts of each token.

    Attributes:
        layer_id: index of the decoder layer.
        capture_fn: called with the ids [T, k] int32 of each forward; the name and the place where
            vLLM hangs its own recorder of routes.
        replay: ids [T, k] int32 to take in the next forward instead of choosing.
        attach_loss: a trainer's load-balancing loss.

    Ranks of tensor parallelism choose for a slice of the tokens each, but in an engine; what is
    captured and replayed is of all tokens.
    """

    e_score_correction_bias: Tensor | None

    def __init__(self, hidden_size: int, routing: Routing, layer_id: int, **placed: Unpack[Placed]):
        super().__init__()
        check_groups(routing.num_experts, routing.top_k, routing.n_group, routing.topk_group)
        self.routing = routing
        self.layer_id = layer_id
        self.capture_fn: Callable[[Tensor], None] | None = None
        self.replay: Tensor | None = None
        self.attach_loss: AttachLoss | None = None
        self.slices = slices_of(placed.get("layout", ALONE))
        self.weight = parameter(routing.num_experts, hidden_size, **placed)
        self.register_buffer("e_score_correction_bias", None)
        if routing.correction_bias:
            # fp32 in a model of any dtype: bf16 would give many experts the same bias
            device, experts = placed.get("device"), routing.num_experts
            bias = torch.empty(experts, dtype=torch.float32, device=device)
            self.pin_buffer("e_score_correction_bias", bias)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """x [T, H] -> (ids [T, k] int32, weights [T, k] fp32)."""
        one = self.routing
        logits = router_logits(x, sum_gradients(self.weight, self.slices))  # [T, E] fp32
        replay = self.replay
        if replay is not None and self.slices.size > 1:
            replay = own_slice(replay, self.slices)
        weights, ids = route(
            logits,
            one.top_k,
            one.scoring,
            one.normalize,
            one.scale,
            self.e_score_correction_bias,
            one.n_group,
            one.topk_group,
            replay,
        )
        if self.capture_fn is not None:
            self.capture_fn(self.of_all_tokens(ids))
        if self.attach_loss is not None:
            weights = self.attach_loss(logits, ids, weights)
        return ids, weights

    def of_all_tokens(self, ids: Tensor) -> Tensor:
        """The ids of this rank's tokens -> those of the tokens of all slices."""
        return ids if self.slices.size == 1 else all_gather(ids, self.slices).flatten(0, 1)


class Experts(nn.Module):
    """SwiGLU experts; their parameters are never cut, only divided among ranks as wholes."""

    def __init__(
        self, hidden_size: int, intermediate_size: int, num_experts: int, **placed: Unpack[Placed]
    ):
        super().__init__()
        self.num_experts = num_experts
        parallel = self.parallel = placed.get("layout", ALONE).experts
        here = num_experts // parallel.size
        self.gate_up_proj = parameter(here, 2 * intermediate_size, hidden_size, **placed)
        self.down_proj = parameter(here, hidden_size, intermediate_size, **placed)
        self.shards: dict[str, Shard] = {}
        if parallel.size > 1:
            shard = split([num_experts], parallel.rank, parallel.size)
            self.shards = {"gate_up_proj": shard, "down_proj": shard}

    def forward(
        self,
        x: Tensor,
        ids: Tensor,
        weights: Tensor,
        shared: Tensor | None = None,
        shared_gate: Tensor | None = None,
    ) -> Tensor:
        """The weighted sum over a token's experts, plus what the shared experts gave.

        x [T, H], ids [T, k] int32, weights [T, k] fp32, shared [T, H], shared_gate [T, 1] fp32
        -> [T, H]. One module for all of it: between sort and sum, rows are no tokens.
        """
        offsets, order, places = moe_sort(ids, self.num_experts)
        if self.parallel.size == 1 or self.parallel.replicated:
            own = own_offsets(offsets, self.parallel)
            gate_up = grouped_linear(x, self.gate_up_proj, own, order, places)  # [R, 2I]
            y = grouped_linear(swiglu(gate_up), self.down_proj, own)  # [R, I] -> [R, H]
            if self.parallel.size > 1:
                y = share_rows(y, offsets, self.parallel)
        else:
            plan = plan_dispatch(offsets, self.parallel)
            y = self._run(dispatch(x, order, places, plan), plan.offsets)
            y = return_rows(y, plan)
        return moe_combine(y, weights, places, shared, shared_gate)

    def _run(self, rows: Tensor, offsets: Tensor) -> Tensor:
        """Rows [R', H] of the experts here, expert by expert -> [R', H]."""
        gate_up = grouped_linear(rows, self.gate_up_proj, offsets)
        return grouped_linear(swiglu(gate_up), self.down_proj, offsets)


class SharedExpertGate(nn.Module):
    """x [T, H] -> logit [T, 1] fp32 of the shared expert's factor."""

    def __init__(self, hidden_size: int, **placed: Unpack[Placed]):
        super().__init__()
        self.slices = slices_of(placed.get("layout", ALONE))
        self.weight = parameter(1, hidden_size, **placed)

    def forward(self, x: Tensor) -> Tensor:
        """[T, H] -> [T, 1] fp32."""
        return router_logits(x, sum_gradients(self.weight, self.slices))


class MoE(nn.Module):
    """A feed-forward of experts.

    Args:
        hidden_size: H.
        intermediate_size: width of an expert.
        routing: how tokens go to experts.
        layer_id: index of the decoder layer.
        shared_size: width of the shared experts together, or None.
        gated: whether a gate weighs the shared experts.
    """

    def __init__(
        self,
        hidden_size: int,
        intermediate_size: int,
        routing: Routing,
        layer_id: int,
        *,
        shared_size: int | None = None,
        gated: bool = False,
        **placed: Unpack[Placed],
    ):
        super().__init__()
        layout = placed.get("layout", ALONE)
        # without sequence parallelism, slices are cut here and put together again
        self.cut = TensorParallel() if layout.tensor.sequence else slices_of(layout)
        self.gate = Router(hidden_size, routing, layer_id, **placed)
        self.experts = Experts(hidden_size, intermediate_size, routing.num_experts, **placed)
        self.shared_experts = None
        if shared_size is not None:
            self.shared_experts = MLP(hidden_size, shared_size, **placed)
        self.shared_expert_gate = SharedExpertGate(hidden_size, **placed) if gated else None

    @property
    def router(self) -> Router:
        """The name that helpers of Megatron's trainers look for."""
        return self.gate

    def forward(self, x: Tensor) -> Tensor:
        """[T, H] -> [T, H]."""
        shared = None if self.shared_experts is None else self.shared_experts(x)
        if self.cut.size > 1:
            x = slice_tokens(x, self.cut)
            shared = None if shared is None else slice_tokens(shared, self.cut)
        ids, weights = self.gate(x)
        gate = None if self.shared_expert_gate is None else self.shared_expert_gate(x)
        y = self.experts(x, ids, weights, shared, gate)
        return y if self.cut.size == 1 else gather_tokens(y, self.cut)


def feed_forward(config: DenseConfig, layer_index: int, **placed: Unpack[Placed]) -> nn.Module:
    """The feed-forward of a layer, [T, H] -> [T, H]: of experts where the config says so."""
    if not isinstance(config, MoEConfig) or not config.is_sparse(layer_index):
        return MLP(config.hidden_size, config.intermediate_size, **placed)
    assert config.routing is not None, "a config with experts says how tokens go to them"
    return MoE(
        config.hidden_size,
        config.moe_intermediate_size,
        config.routing,
        layer_index,
        shared_size=config.shared_experts_size,
        gated=config.shared_experts_gated,
        **placed,
    )


def slices_of(layout: Layout) -> TensorParallel:
    """The ranks that route a slice of the tokens each: all of tensor parallelism in a trainer, so
    that no expert computes a token twice; none in an engine."""
    return TensorParallel() if layout.experts.replicated else layout.tensor
