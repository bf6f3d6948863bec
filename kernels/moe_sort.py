"""`isomodels::moe_sort`: the order in which tokens visit experts, a stable counting sort.

A slot is one of the k choices of one token; slot t * k + j is choice j of token t.
"""

import torch
from torch import Tensor

from isomodels.kernels.schedule import Schedule, declare

SCHEDULE = declare(
    Schedule("moe_sort", "torch", 1, {"order": "expert, then slot: a stable counting sort"})
)
TRITON_SCHEDULE = declare(
    Schedule("moe_sort", "triton", 1, {"order": "expert, then slot: a stable counting sort"})
)


@torch.library.custom_op("isomodels::moe_sort", mutates_args=(), device_types="cpu")
def moe_sort(ids: Tensor, num_experts: int) -> tuple[Tensor, Tensor, Tensor]:
    """Sort slots by expert.

    Args:
        ids: [T, k] int32, each in [0, num_experts).
        num_experts: E; experts without a slot are fine.

    Returns:
        (offsets [E + 1] int32: expert e has the places offsets[e] to offsets[e + 1],
        order [T * k] int32: the slot at each place,
        places [T, k] int32: the place of each slot).

    Raises:
        ValueError: for an id out of range. On a GPU no id is looked at, since that would wait for
            the device: it counts as the nearest expert.
        TypeError: for another dtype or shape.
    """
    check_ids(ids)
    flat = ids.reshape(-1)
    if flat.numel() and not 0 <= int(flat.min()) <= int(flat.max()) < num_experts:
        raise ValueError(f"moe_sort: an id lies outside the {num_experts} experts")
    counts = torch.bincount(flat, minlength=num_experts)
    offsets = torch.zeros(num_experts + 1, dtype=torch.int32, device=ids.device)
    offsets[1:] = counts.cumsum(0)
    order = flat.argsort(stable=True)
    places = torch.empty_like(flat)
    places[order] = torch.arange(len(flat), dtype=torch.int32, device=ids.device)
    return offsets, order.to(torch.int32), places.view_as(ids)


def check_ids(ids: Tensor) -> None:
    """Refuse ids of another dtype or shape."""
    if ids.dim() != 2 or ids.dtype != torch.int32:
        raise TypeError(f"moe_sort needs ids [T, k] in int32, got {list(ids.shape)} in {ids.dtype}")


@moe_sort.register_kernel("cuda")
def _(ids: Tensor, num_experts: int) -> tuple[Tensor, Tensor, Tensor]:
    from isomodels.kernels import moe_sort_triton

    check_ids(ids)
    return moe_sort_triton.moe_sort(ids, num_experts)


@moe_sort.register_fake
def _(ids: Tensor, num_experts: int) -> tuple[Tensor, Tensor, Tensor]:
    return (
        ids.new_empty(num_experts + 1),
        ids.new_empty(ids.shape[0] * ids.shape[1]),
        torch.empty_like(ids),
    )
