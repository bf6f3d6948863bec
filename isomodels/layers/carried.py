"""Tensors that a model keeps for the next save and never runs, such as MTP layers."""

from collections.abc import Mapping
from typing import Any

import torch

from isomodels.layers.pinned import PinnedBuffers


class CarriedTensors(PinnedBuffers):
    """Buffers under dotted names: saved and loaded, never run, never trained.

    `pinned` names those that have a dtype of their own, whatever the model's.
    """

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
            owner: Any = self
            for part in path:
                if not hasattr(owner, part):
                    owner.add_module(part, PinnedBuffers())
                owner = getattr(owner, part)
            if pinned and name in pinned:
                owner.pin_buffer(leaf, torch.empty(shape, dtype=pinned[name], device=device))
            else:
                owner.register_buffer(leaf, torch.empty(shape, dtype=dtype, device=device))
