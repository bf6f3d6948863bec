"""Load balancing without a loss: Megatron's own update of the routers' correction bias.

After each step Megatron raises the bias of experts that got fewer tokens than the mean, and lowers
that of the others (`finalize_model_grads`). It looks for modules with an `expert_bias` and the
tokens they counted; the routers are shown to it by these modules, and only where
`moe_router_bias_update_rate` is not 0. A forward only counts: no bit of it moves.

Mathematics: Wang et al., "Auxiliary-Loss-Free Load Balancing Strategy for Mixture-of-Experts"
(2024).
"""

from typing import Any

import torch
from torch import Tensor, nn

from isomodels.layers.moe import Router
from isomodels.layers.routes import routers


class BiasUpdate(nn.Module):
    """One router, under the names that Megatron looks for.

    Attributes:
        local_tokens_per_expert: [E] fp32, slots since the last step. No buffer: wrappers would
            cast it to a dtype that cannot count.
    """

    _router: Any

    def __init__(self, router: Router):
        super().__init__()
        self.__dict__["_router"] = router  # not a child: the core has it
        experts, device = router.routing.num_experts, router.weight.device
        self.local_tokens_per_expert = torch.zeros(experts, dtype=torch.float32, device=device)
        router.register_forward_hook(self._count)

    @property
    def expert_bias(self) -> Tensor:
        """[E] fp32, the router's own."""
        bias: Tensor = self._router.e_score_correction_bias
        return bias

    def _count(self, router: nn.Module, _: Any, output: tuple[Tensor, Tensor]) -> None:
        if not (router.training and torch.is_grad_enabled()):
            return
        ids = output[0].reshape(-1).long()
        counts = self.local_tokens_per_expert.to(ids.device)
        # Whole numbers, whose fp32 sums are the same in any order. A recomputed layer counts twice,
        # and so does every expert of it.
        ones = torch.ones_like(ids, dtype=torch.float32)
        self.local_tokens_per_expert = counts.scatter_add_(0, ids, ones)


def bias_updates(config: Any, core: nn.Module) -> nn.ModuleList:
    """What lets Megatron update the biases of a model.

    Args:
        config: Megatron's `TransformerConfig`.
        core: the model.

    Returns:
        One module a router; none without correction biases, or with a rate of 0.
    """
    wanted = config.moe_router_enable_expert_bias and config.moe_router_bias_update_rate
    return nn.ModuleList(BiasUpdate(router) for router in routers(core) if wanted)
