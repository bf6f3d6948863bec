"""A 64-bit digest of every row of a tensor, made where the tensor is."""

import functools
from collections.abc import Sequence

import torch
from torch import Tensor

# Of a column's multiplier; `digest_triton` has them too.
GOLDEN = 0x1E3779B97F4A7C15
MIXER = 0x3F58476D1CE4E5B9
TOGETHER = 12  # tensors of one launch at most

_WORDS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
_CHUNK = 1 << 21  # elements at a time: their 64-bit terms take 8 bytes each


def row_digests(x: Tensor, out: Tensor | None = None) -> Tensor:
    """The digest of each row's bits, equal on every device and for every layout in memory.

    The sum over a row's elements of (w_j + 1) m_j modulo 2^64: w_j is the j-th element's bit
    pattern and m_j an odd number drawn by j. Integers add to the same sum in any order. A single
    element that differs always moves it; several leave it with a chance of about 2^-48 at most
    for 16-bit elements. (Multilinear hashing: Lemire and Kaser, "Strongly universal string hashing
    is fast", 2014.) It guards against accidents, not attacks.

    Args:
        x: [T, ...], any dtype and strides.
        out: [T] int64 zeros of the same device, to which the digests are added; made if None.

    Returns:
        [T] int64.
    """
    if out is None:
        out = torch.zeros(len(x), dtype=torch.int64, device=x.device)
    add_digests([(x, out)])
    return out


def add_digests(pairs: Sequence[tuple[Tensor, Tensor]]) -> None:
    """`row_digests` of several tensors of as many rows: on a GPU in few launches.

    Args:
        pairs: x [T, ...] and [T] int64, to which its digests are added.
    """
    filled = [(_as_rows(x), out) for x, out in pairs if x.numel()]
    if filled and filled[0][0].is_cuda:
        from isomodels.trace.digest_triton import add_row_digests

        for first in range(0, len(filled), TOGETHER):
            add_row_digests(filled[first : first + TOGETHER])
        return
    for words, out in filled:
        factors = multipliers(words.shape[1])
        rows = max(1, _CHUNK // words.shape[1])
        for start in range(0, len(words), rows):
            part = slice(start, start + rows)
            out[part] += ((words[part].to(torch.int64) + 1) * factors).sum(1)


def tensor_digest(x: Tensor) -> Tensor:
    """The digest of a whole tensor, [1] int64: that of the digests of its rows."""
    rows = x if x.dim() > 1 else x.reshape(1, -1)
    return row_digests(row_digests(rows).unsqueeze(0))


@functools.lru_cache(maxsize=64)
def multipliers(width: int) -> Tensor:
    """The odd numbers [width] int64 of a row's columns."""
    mixed = (torch.arange(width, dtype=torch.int64) + 1) * GOLDEN
    mixed = (mixed ^ (mixed >> 32)) * MIXER
    return (mixed ^ (mixed >> 29)) | 1


def _as_rows(x: Tensor) -> Tensor:
    """[T, ...], not empty -> [T, N] integers of the same bits."""
    rows = x.detach().reshape(len(x), -1)
    if rows.stride(1) != 1:
        rows = rows.contiguous()
    return rows.view(_WORDS[x.element_size()])
