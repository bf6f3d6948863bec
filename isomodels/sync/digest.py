"""A digest of a tensor's bits that its own device computes at the speed of its memory."""

from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

# Words at a time on the CPU: their 64-bit terms stay in its cache.
_CHUNK = 1 << 17

Array = npt.NDArray[np.int64]
ArrayLike = Array | Sequence[int]


class Spans(NamedTuple):
    """Where tensors lie, as the GPU's kernel takes them: arrays of int64, one entry a tensor.

    Attributes:
        device: number of the GPU; -1 for what the kernel does not take: what is in host memory, not
            contiguous, or no whole vectors of 16 bytes (one or more).
        address, nbytes: multiples of 16 where there is a GPU.
    """

    device: Array
    address: Array
    nbytes: Array

    @classmethod
    def of(cls, tensors: Sequence[Tensor]) -> "Spans":
        """Of tensors."""
        device = [x.get_device() if x.is_contiguous() else -1 for x in tensors]
        return cls.at(device, [x.data_ptr() for x in tensors], [x.nbytes for x in tensors])

    @classmethod
    def at(cls, device: ArrayLike, address: ArrayLike, nbytes: ArrayLike) -> "Spans":
        """Of contiguous bytes."""
        address, nbytes = np.asarray(address, np.int64), np.asarray(nbytes, np.int64)
        taken = ((address | nbytes) % 16 == 0) & (nbytes > 0)
        return cls(np.where(taken, device, -1), address, nbytes)


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
    spans = Spans.of(flat)
    begun = _begin(spans, spans, copy=False)
    found = {i: _by_torch(flat[i]) for i in np.flatnonzero(spans.device < 0).tolist()}

    def finish() -> list[int]:
        found.update(begun())
        del flat[:]  # until here the GPU reads the copies
        return [found[i] for i in range(len(spans.device))]

    return finish


def copy_and_digest(sources: Sequence[Tensor], targets: Sequence[Tensor]) -> list[int]:
    """Copy tensors in place and digest what then lies at the targets.

    On a GPU the kernel that copies reads each word back, in one pass over memory: no target
    overlaps another, so nothing changes a word after that.

    Args:
        sources: of the targets' shapes and dtypes, on any device.
        targets: no two of which overlap.

    Returns:
        The `digest` of each target.
    """
    pair = zip(sources, targets, strict=True)
    return copy_spans(Spans.of(sources), Spans.of(targets), list(pair).__getitem__)


def copy_spans(
    sources: Spans, targets: Spans, tensors: Callable[[int], tuple[Tensor, Tensor]]
) -> list[int]:
    """As `copy_and_digest`.

    Args:
        sources, targets: where they lie.
        tensors: gives source and target of an entry that the kernel does not take.
    """
    fused = (sources.device == targets.device) & (targets.device >= 0)
    begun = _begin(sources, targets._replace(device=np.where(fused, targets.device, -1)))
    rest = {i: tensors(i) for i in np.flatnonzero(~fused).tolist()}
    for source, target in rest.values():
        target.copy_(source)
    others = digests([target for _, target in rest.values()]) if rest else []
    found = dict(zip(rest, others, strict=True)) | dict(begun())
    return [found[i] for i in range(len(fused))]


def _begin(
    sources: Spans, targets: Spans, copy: bool = True
) -> Callable[[], Iterator[tuple[int, int]]]:
    """Launch what lies on GPUs by the targets; (entry, digest) of it when it is called for."""
    begun = []
    for number in set(targets.device.tolist()) - {-1}:
        from isomodels.sync.digest_triton import launch

        rows = np.flatnonzero(targets.device == number)
        words = targets.nbytes[rows] // 4
        device = torch.device("cuda", number)
        sums = launch(device, sources.address[rows], targets.address[rows], words, copy)
        begun.append((rows, words, sums))

    def finish() -> Iterator[tuple[int, int]]:
        for rows, words, sums in begun:
            values = sums.cpu().numpy() + words * words  # what the ones of (w_i + 1) sum up to
            yield from zip(rows.tolist(), values.tolist(), strict=True)

    return finish


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
