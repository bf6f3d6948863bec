"""CPU primitives whose bits depend on one row and one column block only.

BLAS and vectorised reductions choose their code path by shape, thread count and alignment, and
each path sums in another order. So everything here is built from two things that leave no choice:

* matrix products of one shape, `[16, K] x [K, 64]`, contiguous, 64-byte aligned, on one thread;
* sums by halving, which are elementwise additions of a stated order.
"""

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor

TILE_ROWS = 16
TILE_COLUMNS = 64
_ALIGNMENT = 64  # bytes; what torch's CPU allocator gives, and what the BLAS paths look at
# Not torch.set_num_threads: vLLM's CPU worker replaces that name by a function that does nothing.
_set_num_threads = torch._C.set_num_threads


_SUBNORMAL = torch.tensor(1e-40, dtype=torch.float32, device="cpu")


@contextmanager
def one_thread() -> Iterator[None]:
    """Run on one thread: with more, BLAS may cut K among them.

    Raises:
        RuntimeError: if fp32 products were set to a lower precision, or subnormal numbers to zero:
            a host that does so has other bits than one that does not.
    """
    if not (_SUBNORMAL * 1.0).item():
        raise RuntimeError(
            "isomodels needs subnormal numbers: call torch.set_flush_denormal(False)"
        )
    if torch.get_float32_matmul_precision() != "highest":
        raise RuntimeError(
            'isomodels needs full fp32 products: call torch.set_float32_matmul_precision("highest")'
        )
    threads = torch.get_num_threads()
    _set_num_threads(1)
    try:
        yield
    finally:
        _set_num_threads(threads)


def round_up(n: int, multiple: int) -> int:
    """The next multiple at or above n."""
    return -(-n // multiple) * multiple


def aligned(x: Tensor) -> Tensor:
    """Contiguous fp32 with 64-byte aligned storage; copies only where needed."""
    x = x.float().contiguous()
    return x.clone() if x.data_ptr() % _ALIGNMENT else x


def pad_rows(x: Tensor, multiple: int) -> Tensor:
    """[M, K] any float dtype -> [round_up(M), K] fp32, aligned, zero rows at the end."""
    rows = x.shape[0]
    padded = round_up(rows, multiple)
    if padded == rows:
        return aligned(x)
    out = torch.zeros(padded, x.shape[1], dtype=torch.float32)
    out[:rows] = x
    return out


def matmul_nt(x: Tensor, w: Tensor) -> Tensor:
    """[M, K] times [N, K] transposed -> [M, N] fp32, accumulated in fp32.

    Element (m, n) depends on row m of `x` and row n of `w` alone: neither M, N nor the place in
    the tile picks another code path. K is one pass.
    """
    (m, k), n = x.shape, w.shape[0]
    if m == 0 or n == 0:
        return torch.zeros(m, n, dtype=torch.float32)
    x_tiles = pad_rows(x, TILE_ROWS).view(-1, TILE_ROWS, k)
    w_tiles = pad_rows(w, TILE_COLUMNS).view(-1, TILE_COLUMNS, k).transpose(1, 2)
    shape = (len(x_tiles), len(w_tiles), TILE_ROWS, TILE_COLUMNS)
    out = torch.empty(shape, dtype=torch.float32)  # hosts change the default dtype
    for column, w_tile in enumerate(w_tiles.unbind()):
        for x_tile, out_tile in zip(x_tiles.unbind(), out[:, column].unbind(), strict=True):
            torch.mm(x_tile, w_tile, out=out_tile)
    # [m tiles, n tiles, 16, 64] -> [M, N]
    return out.transpose(1, 2).reshape(len(x_tiles) * TILE_ROWS, -1)[:m, :n]


def fold_sum(x: Tensor) -> Tensor:
    """Sum over the last axis by halving: pad with zeros to a power of two, add the halves.

    Only elementwise additions, so the order is the same for every shape of the other axes.
    """
    length = x.shape[-1]
    size = 1 << max(length - 1, 0).bit_length()
    if size != length:
        x = torch.nn.functional.pad(x, (0, size - length))
    while size > 1:
        size //= 2
        x = x[..., :size] + x[..., size:]
    return x[..., 0]
