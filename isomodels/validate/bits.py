"""Comparison by bit pattern, as integers: `torch.equal(+0., -0.)` is True."""

import hashlib
from collections.abc import Iterable

import torch
from torch import Tensor

_INTEGERS = {torch.float32: torch.int32, torch.bfloat16: torch.int16, torch.float64: torch.int64}


class Fault(AssertionError):
    """A check that failed: names what was compared, the first difference and both patterns."""


def bits(x: Tensor) -> Tensor:
    """The bit patterns of floats, as integers of the same size and shape."""
    return x.detach().contiguous().view(_INTEGERS[x.dtype])


def assert_same_bits(actual: Tensor, expected: Tensor, what: str = "result") -> None:
    """Compare dtype, shape and every bit.

    Raises:
        Fault: naming `what`, how many differ, the first coordinate and both byte patterns.
    """
    if actual.dtype != expected.dtype:
        raise Fault(f"{what}: {actual.dtype} against {expected.dtype}")
    if actual.shape != expected.shape:
        raise Fault(f"{what}: {list(actual.shape)} against {list(expected.shape)}")
    differ = bits(actual) != bits(expected)
    if not differ.any():
        return
    at = tuple(differ.nonzero()[0].tolist())
    width = 2 * actual.element_size()
    patterns = [f"{int(bits(x)[at]) & (1 << 4 * width) - 1:0{width}x}" for x in (actual, expected)]
    raise Fault(
        f"{what}: {int(differ.sum())} of {differ.numel()} differ, first at {list(at)}: "
        f"{patterns[0]} ({actual[at].item():.9g}) against {patterns[1]} ({expected[at].item():.9g})"
    )


def digest(tensors: Iterable[Tensor]) -> str:
    """SHA-256 over dtype, shape and bits of each tensor in turn."""
    hashed = hashlib.sha256()
    for x in tensors:
        hashed.update(f"{x.dtype} {list(x.shape)}".encode())
        hashed.update(bits(x).cpu().numpy().tobytes())
    return hashed.hexdigest()
