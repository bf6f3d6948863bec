"""Tensors as bit patterns, read one at a time, and words for messages about them."""

from collections.abc import Collection, Iterator, Mapping

import torch
from torch import Tensor

_SHOWN = 6
_LONGEST = 300
_INTEGERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


class LazyTensors(Mapping[str, Tensor]):
    """Name -> tensor, made when it is asked for; `meta` tells shapes and dtypes before.

    Args:
        meta: name -> meta tensor.
    """

    def __init__(self, meta: Mapping[str, Tensor]):
        self._meta = dict(meta)

    def meta(self) -> dict[str, Tensor]:
        """Every tensor's shape and dtype, as meta tensors."""
        return self._meta

    def __getitem__(self, name: str) -> Tensor:
        raise NotImplementedError

    def __contains__(self, name: object) -> bool:
        return name in self._meta  # without making the tensor

    def __iter__(self) -> Iterator[str]:
        return iter(self._meta)

    def __len__(self) -> int:
        return len(self._meta)


class HeldTensors(LazyTensors):
    """Tensors that are in memory, on any device; each is given on the CPU and without gradient."""

    def __init__(self, tensors: Mapping[str, Tensor]):
        super().__init__({name: tensor.detach().to("meta") for name, tensor in tensors.items()})
        self._tensors = tensors

    def __getitem__(self, name: str) -> Tensor:
        return self._tensors[name].detach().cpu()


class CastTensors(LazyTensors):
    """The tensors of a mapping, rounded to one dtype when they are read, except those `kept`.

    A tensor that is kept may be of the mapping's old dtype; float32 holds any, so there it is cast.
    """

    def __init__(self, tensors: LazyTensors, dtype: torch.dtype, kept: Collection[str]):
        stay = set(kept) if dtype != torch.float32 else set()
        super().__init__(
            {n: t if n in stay else t.to(dtype) for n, t in tensors.meta().items()},
        )
        self._tensors = tensors

    def __getitem__(self, name: str) -> Tensor:
        return self._tensors[name].to(self._meta[name].dtype)


def same_bits(a: Tensor, b: Tensor) -> bool:
    """Whether two tensors have one shape, one dtype and equal bits (-0 is not +0; NaN is NaN)."""
    if a.shape != b.shape or a.dtype != b.dtype:
        return False
    integer = _INTEGERS[a.element_size()]
    return torch.equal(a.contiguous().view(integer), b.contiguous().view(integer))


def dtype_name(dtype: torch.dtype) -> str:
    """`torch.bfloat16` -> "bfloat16"."""
    return str(dtype).removeprefix("torch.")


def printable(text: str) -> str:
    """Text of a file for a message: on one line, not endless, and without codes for a terminal."""
    shown = text if text.isprintable() else text.encode("unicode_escape").decode()
    return shown if len(shown) <= _LONGEST else f"{shown[:_LONGEST]}..."


def shorten(names: Collection[str]) -> str:
    """A list of names for a message: the first few, and how many more there are."""
    ordered = [printable(name) for name in sorted(names)]
    more = len(ordered) - _SHOWN
    return ", ".join(ordered[:_SHOWN]) + (f" and {more} more" if more > 0 else "")
