"""What Megatron's trainers expect of experts: marked parameters and a load-balancing loss."""

from functools import partial
from typing import Any

import torch
from megatron.core.transformer.moe.moe_utils import MoEAuxLossAutoScaler
from torch import Tensor, nn

from isomodels.layers.load_balancing import load_balancing_loss
from isomodels.layers.moe import Experts, Router
from isomodels.layers.routes import routers


def prepare_experts(config: Any, core: nn.Module) -> dict[int, Tensor]:
    """Mark the parameters of experts, and hang the loss on the routers if the config has one.

    Args:
        config: Megatron's `TransformerConfig`.
        core: the model; without experts nothing happens.

    Returns:
        Layer index -> the loss [] of the last training forward, before its coefficient; filled by
        the forwards.
    """
    mark_experts(core)
    losses: dict[int, Tensor] = {}
    if config.moe_router_load_balancing_type == "aux_loss" and config.moe_aux_loss_coeff:
        for router in routers(core):
            router.attach_loss = partial(_attach, router, config, losses)
    return losses


def mark_experts(core: nn.Module) -> None:
    """Set `allreduce` as Megatron's own experts do.

    False has Megatron reduce, clip and store a parameter's gradients among the ranks that hold the
    same experts and see other tokens: with expert parallelism not those of other experts, with
    tensor parallelism also its ranks, each of which has a slice of the tokens. It is the same in
    every layout, so that each has an optimizer of its own for experts, and can load any other's.
    """
    for module in core.modules():
        if isinstance(module, Experts):
            for parameter in module.parameters(recurse=False):
                parameter.allreduce = False  # type: ignore[attr-defined]


def _attach(
    router: Router,
    config: Any,
    losses: dict[int, Tensor],
    logits: Tensor,
    ids: Tensor,
    weights: Tensor,
) -> Tensor:
    """The weights as they are; their backward pass starts that of the loss, too."""
    if not (router.training and torch.is_grad_enabled()):
        return weights
    # the shares are of all tokens, the scores of this rank's slice of them
    loss = load_balancing_loss(logits, ids, router.routing, router.of_all_tokens(ids))
    losses[router.layer_id] = loss.detach()  # a recomputed layer writes it again
    scaled = loss * config.moe_aux_loss_coeff
    if config.calculate_per_token_loss:
        scaled = scaled * len(ids)  # Megatron divides all gradients by the number of tokens
    else:
        scaled = scaled / router.slices.size
    return MoEAuxLossAutoScaler.apply(weights, scaled)
