"""Tensors that a model keeps for the next save and never runs, such as MTP layers."""

from collections.abc import Mapping

import torch
from torch import nn


class CarriedTensors(nn.Module):
    """Buffers under dotted names: saved and loaded, never run, never trained."""

    def __init__(
        self,
        shapes: Mapping[str, tuple[int, ...]],
        dtype: torch.dtype,
        device: torch.device | None,
        pinned: Mapping[str, torch.dtype] | None = None,
    ):
        super().__init__()
        for name, shape in shapes.items():
            *path, leaf = name.split(".")
            owner: nn.Module = self
            for part in path:
                if not hasattr(owner, part):
                    owner.add_module(part, nn.Module())
                owner = getattr(owner, part)
            own = (pinned or {}).get(name, dtype)
            owner.register_buffer(leaf, torch.empty(shape, dtype=own, device=device))
