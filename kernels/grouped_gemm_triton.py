"""Matrix products of groups of rows, an expert's weight a group: forward, and both gradients.

What defines a bit of the forward is what does so in `gemm_triton.py` with one leaf: K in one
sequential pass in fp32, one rounding. No tile is padded to the largest expert: a tile has rows of
one expert, the grid is the largest number of tiles that so many rows and experts can make, and each
program reads on the device which tiles there are. Tiles move no bit.
"""

# Arguments of kernels have Triton's own types.
# mypy: disable-error-code="no-untyped-def"

import functools
from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from isomodels.kernels.common_triton import log2_ceil, processors
from isomodels.kernels.gemm_triton import TRITON_DTYPES, _multiply, _zeros, place
from isomodels.kernels.launch_triton import Launcher
from isomodels.kernels.ragged_triton import load_rows, ragged_descriptor, store_rows
from isomodels.kernels.tensor_map_triton import bulk, cdiv, descriptor


class GroupedConfig(NamedTuple):
    """Tuning of one grouped product; moves no bit."""

    block_m: int
    block_n: int
    block_k: int
    stages: int
    warps: int
    swap: int = 0  # the weight takes the place of the rows
    subtiles: int = 1  # parts in which the result tile is written
    occupancy: int = 1  # programs a multiprocessor


FP32 = GroupedConfig(64, 64, 32, 2, 4)
_GROUP = 8  # tiles of rows that walk the columns together
_CHUNK = 128  # tiles that the plan writes at once


@triton.jit(do_not_specialize=["limit"])
def _plan(
    offsets_ptr, tiles_ptr, limit,
    EXPERTS: tl.constexpr, WIDTH: tl.constexpr, BLOCK_M: tl.constexpr, CHUNK: tl.constexpr,
):  # fmt: skip
    """One program an expert: offsets [E + 1] -> [number of tiles | expert | first row | rows]."""
    expert = tl.program_id(0)
    at = tl.arange(0, WIDTH)
    inside = at < EXPERTS
    start = tl.load(offsets_ptr + at, mask=inside, other=0)
    end = tl.load(offsets_ptr + at + 1, mask=inside, other=0)
    tiles = (end - start + BLOCK_M - 1) // BLOCK_M
    first = tl.sum(tl.where(at < expert, tiles, 0))
    mine = tl.sum(tl.where(at == expert, tiles, 0))
    start = tl.load(offsets_ptr + expert)
    end = tl.load(offsets_ptr + expert + 1)
    if expert == 0:
        tl.store(tiles_ptr, tl.sum(tiles))
    for begin in range(0, mine, CHUNK):
        tile = begin + tl.arange(0, CHUNK)
        row = start + tile * BLOCK_M
        to = tiles_ptr + 1 + first + tile
        tl.store(to, expert + tl.zeros_like(tile), mask=tile < mine)
        tl.store(to + limit, row, mask=tile < mine)
        tl.store(to + 2 * limit, tl.minimum(end - row, BLOCK_M), mask=tile < mine)


@triton.jit
def _load_weight(
    b_desc, expert, n, k, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, B_T: tl.constexpr
):
    """A block [BLOCK_N, BLOCK_K] of an expert's weight; B_T: it is stored [K, N].

    The expert is an axis of its own: past the end of its matrix the block is zero.
    """
    if B_T:
        b = tl.trans(tl.reshape(b_desc.load([expert, k, n]), (BLOCK_K, BLOCK_N)))
    else:
        b = tl.reshape(b_desc.load([expert, n, k]), (BLOCK_N, BLOCK_K))
    return b


@triton.jit
def _store_rows(
    acc, c_desc, row, rows, n,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, SWAP: tl.constexpr, SUBTILES: tl.constexpr,
    OUT: tl.constexpr,
):  # fmt: skip
    """Write `rows` rows of a tile; the copy engine leaves out the others."""
    if SWAP:
        acc = tl.trans(acc)
    if SUBTILES == 1:
        store_rows(c_desc, row, rows, n, acc.to(OUT), BLOCK_M, BLOCK_N)
    else:
        HALF: tl.constexpr = BLOCK_N // 2
        halves = tl.permute(tl.reshape(acc, (BLOCK_M, 2, HALF)), (0, 2, 1))
        left, right = tl.split(halves)
        store_rows(c_desc, row, rows, n, left.to(OUT), BLOCK_M, HALF)
        store_rows(c_desc, row, rows, n + HALF, right.to(OUT), BLOCK_M, HALF)


# Not specialised by sizes: a batch of a new size compiles nothing.
@triton.jit(do_not_specialize=["limit", "N", "steps"])
def _grouped(
    a_desc, b_desc, c_desc, tiles_ptr, limit, N, steps,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, GROUP: tl.constexpr,
    B_T: tl.constexpr, SWAP: tl.constexpr, SUBTILES: tl.constexpr, OUT: tl.constexpr,
):  # fmt: skip
    """C[r] = B[e] A[r]: one loop over all K blocks of all tiles of this program."""
    tiles_m, tiles_n = tl.load(tiles_ptr), tl.cdiv(N, BLOCK_N)
    programs = tl.num_programs(0)
    tile = tl.program_id(0) - programs
    mine = tl.cdiv(tiles_m * tiles_n - tl.program_id(0), programs)
    step, expert, row, rows, n = steps - 1, 0, 0, 0, 0
    acc = _zeros(BLOCK_M, BLOCK_N, SWAP)
    for _ in range(mine * steps):
        step = tl.where(step == steps - 1, 0, step + 1)
        if step == 0:
            tile += programs
            tile_m, tile_n = place(tile, tiles_m, tiles_n, GROUP)
            entry = tiles_ptr + 1 + tile_m
            expert, row, rows = tl.load(entry), tl.load(entry + limit), tl.load(entry + 2 * limit)
            n = tile_n * BLOCK_N
        k = step * BLOCK_K
        a = a_desc.load([row, k])  # the last rows may be the next expert's: not written
        b = _load_weight(b_desc, expert, n, k, BLOCK_N, BLOCK_K, B_T)
        acc = _multiply(a, b, acc, SWAP)
        if step == steps - 1:
            _store_rows(acc, c_desc, row, rows, n, BLOCK_M, BLOCK_N, SWAP, SUBTILES, OUT)
            acc = _zeros(BLOCK_M, BLOCK_N, SWAP)


@triton.jit(do_not_specialize=["N", "K"])
def _weight_gradient(
    a_desc, b_desc, c_desc, offsets_ptr, N, K,
    EXPERTS: tl.constexpr, WIDTH: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
    BLOCK_R: tl.constexpr, GROUP: tl.constexpr, SUBTILES: tl.constexpr, OUT: tl.constexpr,
):  # fmt: skip
    """C[e] = A_e^T B_e: one loop over all blocks of rows of all tiles [N, K] of this program.

    An expert without rows has one block, of zeros.
    """
    tiles_n, tiles_k = tl.cdiv(N, BLOCK_N), tl.cdiv(K, BLOCK_K)
    tiles, programs = tiles_n * tiles_k, tl.num_programs(0)
    tile = tl.program_id(0)
    each = tl.arange(0, WIDTH)
    inside = each < EXPERTS
    sizes = tl.load(offsets_ptr + each + 1, mask=inside, other=0)
    sizes -= tl.load(offsets_ptr + each, mask=inside, other=0)
    # Tiles of each expert that are this program's: its number modulo `programs`.
    until = tl.maximum((each + 1) * tiles - tile + programs - 1, 0) // programs
    before = tl.maximum(each * tiles - tile + programs - 1, 0) // programs
    blocks = tl.maximum((sizes + BLOCK_R - 1) // BLOCK_R, 1)
    total = tl.sum(tl.where(inside, (until - before) * blocks, 0))
    tile -= programs
    step, steps, expert, start, size, n, k = 0, 1, 0, 0, 0, 0, 0
    acc = _zeros(BLOCK_N, BLOCK_K, False)
    for _ in range(total):
        step += 1
        if step >= steps:
            step = 0
            tile += programs
            expert = tile // tiles
            tile_n, tile_k = place(tile % tiles, tiles_n, tiles_k, GROUP)
            n, k = tile_n * BLOCK_N, tile_k * BLOCK_K
            start = tl.load(offsets_ptr + expert)
            size = tl.load(offsets_ptr + expert + 1) - start
            steps = tl.maximum((size + BLOCK_R - 1) // BLOCK_R, 1)
        # Both are zero past the last row of the expert: the next one's might not be finite.
        a = load_rows(a_desc, start, size, step * BLOCK_R, n, BLOCK_R, BLOCK_N)
        b = load_rows(b_desc, start, size, step * BLOCK_R, k, BLOCK_R, BLOCK_K)
        acc = _multiply(tl.trans(a), tl.trans(b), acc, False)
        if step == steps - 1:
            if SUBTILES == 1:
                c_desc.store([expert, n, k], tl.reshape(acc.to(OUT), (1, BLOCK_N, BLOCK_K)))
            else:
                HALF: tl.constexpr = BLOCK_K // 2
                halves = tl.permute(tl.reshape(acc, (BLOCK_N, 2, HALF)), (0, 2, 1))
                left, right = tl.split(halves)
                c_desc.store([expert, n, k], tl.reshape(left.to(OUT), (1, BLOCK_N, HALF)))
                c_desc.store([expert, n, k + HALF], tl.reshape(right.to(OUT), (1, BLOCK_N, HALF)))
            acc = _zeros(BLOCK_N, BLOCK_K, False)


def _bulk_experts(weight: Tensor) -> Tensor:
    """`weight` [E, N, K] itself if the bulk copy engine can read it, else a padded copy's view."""
    unit = 16 // weight.element_size()
    matrix, pitch, step = weight.stride()
    aligned = pitch % unit == 0 and matrix % unit == 0 and weight.data_ptr() % 16 == 0
    if step == 1 and pitch >= weight.shape[2] and aligned:
        return weight
    experts, n, k = weight.shape
    padded = weight.new_empty(experts, n, cdiv(k, unit) * unit)
    padded[:, :, :k] = weight
    return padded[:, :, :k]


def grouped_gemm(
    a: Tensor,
    b: Tensor,
    offsets: Tensor,
    config: GroupedConfig,
    *,
    b_t: bool = False,
) -> Tensor:
    """C[r] = B[e] A[r], for the expert e of place r.

    Args:
        a: [R, K].
        b: [E, N, K], or [E, K, N] with `b_t`; dtype of `a`.
        offsets: [E + 1] int32, from 0 to R.
        config: the tuning for these shapes.
        b_t: B is stored with K first.

    Returns:
        [R, N] in the dtype of `a`.
    """
    experts, n, k = b.shape if not b_t else (b.shape[0], b.shape[2], b.shape[1])
    num_rows = len(a)
    out = torch.empty(num_rows, n, dtype=a.dtype, device=a.device)
    if num_rows == 0 or n == 0 or k == 0:
        return out.zero_()
    block_m, block_n, block_k = config.block_m, config.block_n, config.block_k
    # The most tiles: every expert that has a row leaves all but one row of a tile empty.
    limit = (num_rows + min(num_rows, experts) * (block_m - 1)) // block_m
    tiles = torch.empty(1 + 3 * limit, dtype=torch.int32, device=a.device)
    offsets = offsets.contiguous()
    key = offsets.data_ptr() % 16 == 0
    _planner(experts, block_m)((experts, 1, 1), offsets, tiles, limit, key=key)
    a, b, target = bulk(a), _bulk_experts(b), bulk(out)
    programs = min(limit * cdiv(n, block_n), processors(a) * config.occupancy)
    _launcher(config, a.dtype, b_t)(
        (programs, 1, 1),
        descriptor(a, [block_m, block_k]),
        descriptor(b, [1, block_k, block_n] if b_t else [1, block_n, block_k]),
        ragged_descriptor(target, [block_m, block_n // config.subtiles]),
        tiles,
        limit,
        n,
        cdiv(k, block_k),
    )
    return out if target is out else out.copy_(target)


def grouped_weight_gradient(
    grad: Tensor, x: Tensor, offsets: Tensor, experts: int, config: GroupedConfig
) -> Tensor:
    """C[e] = sum over the places r of expert e of grad[r] x[r]^T.

    Args:
        grad: [R, N].
        x: [R, K], dtype of `grad`.
        offsets: [E + 1] int32, from 0 to R.
        experts: E.
        config: block_m of N, block_n of K, block_k of rows.

    Returns:
        [E, N, K] in the dtype of `grad`; zero for an expert without rows.
    """
    n, k = grad.shape[1], x.shape[1]
    unit = 16 // grad.element_size()
    out = torch.empty(experts, n, cdiv(k, unit) * unit, dtype=grad.dtype, device=grad.device)
    if len(grad) == 0 or out.numel() == 0:
        return out[:, :, :k].zero_().contiguous()
    offsets = offsets.contiguous()
    launcher = _gradient_launcher(config, grad.dtype, experts)
    tiles = experts * cdiv(n, config.block_m) * cdiv(k, config.block_n)
    target = out[:, :, :k]
    launcher(
        (min(tiles, processors(grad) * config.occupancy), 1, 1),
        ragged_descriptor(bulk(grad), [config.block_k, config.block_m]),
        ragged_descriptor(bulk(x), [config.block_k, config.block_n]),
        descriptor(target, [1, config.block_m, config.block_n // config.subtiles]),
        offsets,
        n,
        k,
        key=offsets.data_ptr() % 16 == 0,
    )
    return target.contiguous()


@functools.cache
def _planner(experts: int, block_m: int) -> Launcher:
    width = 1 << log2_ceil(experts)
    constants = {"EXPERTS": experts, "WIDTH": width, "BLOCK_M": block_m, "CHUNK": _CHUNK}
    return Launcher(_plan, constants, num_warps=1)


@functools.cache
def _launcher(config: GroupedConfig, dtype: torch.dtype, b_t: bool) -> Launcher:
    constants = {
        "BLOCK_M": config.block_m, "BLOCK_N": config.block_n, "BLOCK_K": config.block_k,
        "GROUP": _GROUP, "B_T": b_t, "SWAP": bool(config.swap), "SUBTILES": config.subtiles,
        "OUT": TRITON_DTYPES[dtype],
    }  # fmt: skip
    return Launcher(_grouped, constants, num_warps=config.warps, num_stages=config.stages)


@functools.cache
def _gradient_launcher(config: GroupedConfig, dtype: torch.dtype, experts: int) -> Launcher:
    constants = {
        "EXPERTS": experts, "WIDTH": 1 << log2_ceil(experts), "BLOCK_N": config.block_m,
        "BLOCK_K": config.block_n, "BLOCK_R": config.block_k, "GROUP": _GROUP,
        "SUBTILES": config.subtiles, "OUT": TRITON_DTYPES[dtype],
    }  # fmt: skip
    return Launcher(_weight_gradient, constants, num_warps=config.warps, num_stages=config.stages)
