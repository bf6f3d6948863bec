"""The load-balancing loss of a router: for a trainer only, no part of a forward's bits."""

import torch
from torch import Tensor

from isomodels.config import Routing


def load_balancing_loss(
    logits: Tensor, ids: Tensor, routing: Routing, all_ids: Tensor | None = None
) -> Tensor:
    """E * sum over experts of (share of the slots) * (mean score), differentiable in the logits.

    1 for a router that spreads its tokens evenly. Source: Fedus et al., "Switch Transformers"
    (2021), equations 4 to 6, with the share over all k slots; sigmoid scores are divided by their
    sum over the experts first ("DeepSeek-V3 Technical Report" (2024), equation 18).

    Args:
        logits: [T, E] fp32.
        ids: [T, k] int32.
        routing: the router's.
        all_ids: those of the tokens that the shares are of, where these are only some of them.

    Returns:
        [] fp32.
    """
    if routing.scoring == "softmax":
        scores = logits.softmax(1)
    else:
        scores = torch.sigmoid(logits)
        scores = scores / (scores.sum(1, keepdim=True) + 1e-20)
    ids = ids if all_ids is None else all_ids
    slots = torch.bincount(ids.reshape(-1).long(), minlength=routing.num_experts)
    share = slots.to(torch.float32) / max(ids.numel(), 1)
    return routing.num_experts * (share * scores.mean(0)).sum()
