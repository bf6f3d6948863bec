"""Tensors whose dtype no host may change: wrappers cast whole models (`.bfloat16()`, `.to()`)."""

from collections.abc import Callable
from typing import Self

import torch
from torch import Tensor, nn


class PinnedBuffers(nn.Module):
    """A module that keeps the dtype and the bits of some of its buffers under any cast.

    They move to other devices with the module.
    """

    def __init__(self) -> None:
        super().__init__()
        self.pinned: dict[str, torch.dtype] = {}

    def pin_buffer(self, name: str, tensor: Tensor) -> None:
        """Register a buffer that keeps the dtype which `tensor` has."""
        self.register_buffer(name, tensor)
        self.pinned[name] = tensor.dtype

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Self:
        before = {name: self.get_buffer(name) for name in self.pinned}
        super()._apply(fn, recurse)
        for name, tensor in before.items():
            after = self.get_buffer(name)
            if after.dtype != self.pinned[name]:
                # not `after` cast back, which has lost bits
                setattr(self, name, tensor.to(after.device))
        return self


class PinnedParameters(nn.Module):
    """A module without children whose parameters all keep their dtype and bits under any cast.

    They move to other devices with the module.
    """

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Self:
        def keep_dtype(tensor: Tensor) -> Tensor:
            moved = fn(tensor)
            return moved if moved.dtype == tensor.dtype else tensor.to(moved.device)

        super()._apply(keep_dtype, recurse)
        return self


def pinned_tensors(module: nn.Module) -> dict[str, torch.dtype]:
    """Names of all pinned buffers and parameters below a module, and their dtypes."""
    parameters = {
        f"{prefix}.{name}" if prefix else name: parameter.dtype
        for prefix, one in module.named_modules()
        if isinstance(one, PinnedParameters)
        for name, parameter in one.named_parameters(recurse=False)
    }
    return parameters | {
        f"{prefix}.{name}" if prefix else name: dtype
        for prefix, one in module.named_modules()
        if isinstance(one, PinnedBuffers)
        for name, dtype in one.pinned.items()
    }
