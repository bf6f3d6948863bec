"""A digest of a tensor's bits that its own device computes at the speed of its memory."""

from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

# Words at a time on the CPU: their 64-bit terms stay in its cache.
_CHUNK = 1 << 17
_WRAP = 1 << 64


class Span(NamedTuple):
    """Bytes as the GPU's kernel takes them: whole vectors of 16 bytes.

    Attributes:
        device: a GPU.
        address, nbytes: multiples of 16.
    """

    device: torch.device
    address: int
    nbytes: int

    @classmethod
    def at(cls, device: torch.device, address: int, nbytes: int) -> "Span | None":
        """These bytes, if the kernel takes them."""
        fits = device.type == "cuda" and not (address % 16 or nbytes % 16)
        return cls(device, address, nbytes) if fits else None

    @classmethod
    def of(cls, tensor: Tensor) -> "Span | None":
        """A tensor's bytes, if it is contiguous and the kernel takes them."""
        if not (tensor.is_cuda and tensor.is_contiguous()):
            return None
        return cls.at(tensor.device, tensor.data_ptr(), tensor.nbytes)


class Source(NamedTuple):
    """What is copied.

    Attributes:
        span: where it lies, if the kernel takes it from there.
        tensor: gives it.
    """

    span: Span | None
    tensor: Callable[[], Tensor]

    @classmethod
    def of(cls, tensor: Tensor) -> "Source":
        """A tensor."""
        return cls(Span.of(tensor), lambda: tensor)


def digest(tensor: Tensor) -> int:
    """64 bits of a tensor's bit pattern, the same on every device.

    The sum of (w_i + 1) (2 i + 1) modulo 2^64, w_i the i-th signed 32-bit word of the contiguous
    tensor's bytes, zeros appended to the last: an exchange of two words, a shift and any single
    error move it. It guards against accidents, not attacks; shape and dtype are compared beside it.

    Args:
        tensor: any shape, dtype, strides and device.

    Returns:
        A signed 64-bit integer.
    """
    return digests([tensor])[0]


def digests(tensors: Sequence[Tensor]) -> list[int]:
    """The `digest` of each; those of a GPU in one launch."""
    return begin_digests(tensors)()


def begin_digests(tensors: Sequence[Tensor]) -> Callable[[], list[int]]:
    """As `digests`, which the returned function waits for: a GPU computes them meanwhile."""
    flat = [x if x.is_contiguous() else x.detach().contiguous() for x in tensors]
    spans = [Span.of(x) for x in flat]
    fused = _begin([span for span in spans if span is not None])
    others = iter([_by_torch(x) for x, span in zip(flat, spans, strict=True) if span is None])

    def finish() -> list[int]:
        found = iter(fused())
        del flat[:]  # until here the GPU reads the copies
        return [next(others if span is None else found) for span in spans]

    return finish


def copy_and_digest(sources: Sequence[Source], targets: Sequence[Tensor]) -> list[int]:
    """Copy tensors in place and digest what then lies at the targets.

    On a GPU the kernel that copies reads each word back, in one pass over memory: no target
    overlaps another, so nothing changes a word after that.

    Args:
        sources: of the targets' shapes and dtypes, on any device.
        targets: no two of which overlap.

    Returns:
        The `digest` of each target.
    """
    pairs = [
        (source.span, span)
        if source.span and (span := Span.of(target)) and source.span.device == span.device
        else None
        for source, target in zip(sources, targets, strict=True)
    ]
    fused = [pair for pair in pairs if pair is not None]
    found = iter(_begin([source for source, _ in fused], [target for _, target in fused])())
    rest = [i for i, pair in enumerate(pairs) if pair is None]
    for i in rest:
        targets[i].copy_(sources[i].tensor())
    others = iter(digests([targets[i] for i in rest]))
    return [next(others if pair is None else found) for pair in pairs]


def signed(value: int) -> int:
    """An integer modulo 2^64, as a signed one."""
    return (value + _WRAP // 2) % _WRAP - _WRAP // 2


def _begin(
    sources: Sequence[Span], targets: Sequence[Span] | None = None
) -> Callable[[], list[int]]:
    if not sources:
        return list
    from isomodels.sync.digest_triton import begin

    return begin(sources, targets)


def _by_torch(flat: Tensor) -> int:
    data = flat.detach().view(-1).view(torch.uint8)
    if len(data) % 4 or data.data_ptr() % 4:
        padded = data.new_zeros(-(-len(data) // 4) * 4)
        padded[: len(data)] = data
        data = padded
    words = data.view(torch.int32)
    factors = 2 * torch.arange(min(len(words), _CHUNK), device=flat.device) + 1
    total = torch.zeros((), dtype=torch.int64, device=flat.device)
    for start in range(0, len(words), _CHUNK):
        chunk = words[start : start + _CHUNK].to(torch.int64) + 1
        # the factor of word start + j is 2 start + factors[j]
        total += (chunk * factors[: len(chunk)]).sum() + chunk.sum() * (2 * start)
    return int(total)
