"""Tensors that a model keeps for the next save and never runs, such as MTP layers."""

from collections.abc import Mapping
from typing import Any

import torch

from isomodels.layers.pinned import PinnedBuffers
from isomodels.weights_conv.rules import Source


class CarriedTensors(PinnedBuffers):
    """Buffers under dotted names: saved and loaded, never run, never trained.

    Args:
        sources: what they are in HF files, by name; one with a dtype of its own keeps it.
        dtype: of the others.
        device: where to place them.
    """

    def __init__(
        self, sources: Mapping[str, Source], dtype: torch.dtype, device: torch.device | None
    ):
        super().__init__()
        for name, source in sources.items():
            *path, leaf = name.split(".")
            owner: Any = self
            for part in path:
                if not hasattr(owner, part):
                    owner.add_module(part, PinnedBuffers())
                owner = getattr(owner, part)
            register = owner.pin_buffer if source.dtype else owner.register_buffer
            register(leaf, torch.empty(source.shape, dtype=source.dtype or dtype, device=device))
