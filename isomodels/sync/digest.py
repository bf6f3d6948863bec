"""A digest of a tensor's bits that its own device computes at the speed of its memory."""

from collections.abc import Sequence

import torch
from torch import Tensor

# Words at a time on the CPU: their 64-bit terms stay in its cache.
_CHUNK = 1 << 17
_WRAP = 1 << 64


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
    flat = [tensor.detach().contiguous() for tensor in tensors]
    found: dict[int, int] = {}
    if fitting := [i for i, tensor in enumerate(flat) if fits_kernel(tensor)]:
        from isomodels.sync.digest_triton import digest_all

        found = dict(zip(fitting, digest_all([flat[i] for i in fitting]), strict=True))
    return [found[i] if i in found else _by_torch(tensor) for i, tensor in enumerate(flat)]


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
    sources = [source.detach().contiguous() for source in sources]
    fused = [
        i
        for i, (source, target) in enumerate(zip(sources, targets, strict=True))
        if target.is_contiguous() and source.device == target.device
        and fits_kernel(source) and fits_kernel(target)
    ]  # fmt: skip
    found: dict[int, int] = {}
    if fused:
        from isomodels.sync.digest_triton import digest_all

        pairs = [sources[i] for i in fused], [targets[i] for i in fused]
        found = dict(zip(fused, digest_all(*pairs), strict=True))
    rest = [i for i in range(len(targets)) if i not in found]
    for i in rest:
        targets[i].copy_(sources[i])
    found |= zip(rest, digests([targets[i] for i in rest]), strict=True)
    return [found[i] for i in range(len(targets))]


def fits_kernel(tensor: Tensor) -> bool:
    """Whether the GPU's kernel takes it: whole vectors of 16 bytes."""
    return tensor.is_cuda and not (tensor.nbytes % 16 or tensor.data_ptr() % 16)


def signed(value: int) -> int:
    """An integer modulo 2^64, as a signed one."""
    return (value + _WRAP // 2) % _WRAP - _WRAP // 2


def _by_torch(flat: Tensor) -> int:
    data = flat.view(-1).view(torch.uint8)
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
