"""A digest of a tensor's bits that its own device computes at the speed of its memory."""

import torch
from torch import Tensor

# Elements at a time: the 64-bit terms of a chunk take 8 bytes each.
_CHUNK = 1 << 24
_WORDS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


def digest(tensor: Tensor) -> int:
    """64 bits of a tensor's bit pattern, the same on every device.

    The sum of (w_i + 1) (2 i + 1) modulo 2^64, w_i the i-th element's bit pattern: an exchange of
    two elements, a shift and any single error move it. It guards against accidents, not attacks.

    Args:
        tensor: any shape, dtype, strides and device.

    Returns:
        A signed 64-bit integer.
    """
    flat = tensor.detach().contiguous().view(-1)
    words = flat.view(_WORDS[flat.element_size()])
    total = torch.zeros((), dtype=torch.int64, device=tensor.device)
    for start in range(0, len(words), _CHUNK):
        chunk = words[start : start + _CHUNK].to(torch.int64) + 1
        index = torch.arange(start, start + len(chunk), device=tensor.device)
        total += (chunk * (2 * index + 1)).sum()
    return int(total)
