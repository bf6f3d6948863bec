"""The matrix product under every linear operation: persistent, bulk copies, fp32 accumulation.

What defines a bit: operands as they are, K cut into `LEAVES` equal leaves, each summed in one
sequential pass on the matrix units in fp32, the leaves folded by a balanced binary tree of
neighbours in fp32, then the bias, then one rounding. Tiles, stages, warps, the place of a row in
the tile, which operand takes the place of the rows and how many programs share the leaves of a tile
move no bit (Hopper; the tests check it).
"""

# Arguments of kernels have Triton's own types.
# mypy: disable-error-code="no-untyped-def"

import functools
from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from isomodels.kernels.common_triton import processors
from isomodels.kernels.launch_triton import Launcher
from isomodels.kernels.park_triton import park, parking_places, pop_asm, settled, unpark_all
from isomodels.kernels.tensor_map_triton import bulk as bulk
from isomodels.kernels.tensor_map_triton import cdiv, leaf_descriptor
from isomodels.kernels.tensor_map_triton import descriptor as descriptor

TRITON_DTYPES = {torch.float32: tl.float32, torch.bfloat16: tl.bfloat16}


class Config(NamedTuple):
    """Tuning of one product; moves no bit."""

    block_m: int
    block_n: int
    block_k: int
    stages: int
    warps: int
    swap: int = 0  # the weight takes the place of the rows
    subtiles: int = 1  # parts in which the result tile is written
    occupancy: int = 1  # programs a multiprocessor
    beside: int = 0  # with `once`: columns of a second accumulator, for widths like 192
    parts: int = 1  # programs that share the leaves of one tile, each a whole subtree
    once: int = 0  # one tile of one leaf a program, without the loop over tiles


_PACK = 16  # loads of a parked sum that are under way before the first is added
FP32 = Config(64, 64, 32, 2, 4)


@triton.jit
def place(tile, tiles_m, tiles_n, GROUP: tl.constexpr):
    """Tiles in groups of rows, so that neighbours in time share operands in the cache."""
    per_group = GROUP * tiles_n
    first = (tile // per_group) * GROUP
    height = min(tiles_m - first, GROUP)
    inside = tile % per_group
    return first + inside % height, inside // height


@triton.jit
def locate(
    tile, M, N, BLOCK_M: tl.constexpr, WIDTH: tl.constexpr, GROUP: tl.constexpr, PARTS: tl.constexpr
):
    """The part of K, the first row and the first column of a tile."""
    tiles_m, tiles_n = tl.cdiv(M, BLOCK_M), tl.cdiv(N, WIDTH)
    part = 0
    if PARTS > 1:
        part = tile // (tiles_m * tiles_n)
        tile = tile % (tiles_m * tiles_n)
    tile_m, tile_n = place(tile, tiles_m, tiles_n, GROUP)
    return part, tile_m * BLOCK_M, tile_n * WIDTH


@triton.jit
def load_block(
    desc, leaf, row, k, LEAVES: tl.constexpr, ROWS: tl.constexpr, K: tl.constexpr, T: tl.constexpr
):
    """A block [ROWS, K] of an operand; T: the operand is stored [K, rows]."""
    if T:
        block = tl.trans(desc.load([k, row]))
    elif LEAVES == 1:
        block = desc.load([row, k])
    else:
        # The leaf is an axis of its own: past its end the block is zero, never the next leaf.
        block = tl.reshape(desc.load([leaf, row, k]), (ROWS, K))
    return block


@triton.jit
def _multiply(a, b, acc, SWAP: tl.constexpr):
    """acc + a b^T, or its transpose."""
    if SWAP:
        acc = tl.dot(b, tl.trans(a), acc, input_precision="ieee")
    else:
        acc = tl.dot(a, tl.trans(b), acc, input_precision="ieee")
    return acc


@triton.jit
def _zeros(BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, SWAP: tl.constexpr):
    if SWAP:
        acc = tl.zeros((BLOCK_N, BLOCK_M), tl.float32)
    else:
        acc = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
    return acc


@triton.jit
def _put(part, c_desc, m, n, ADD_TO_C: tl.constexpr, OUT: tl.constexpr):
    if ADD_TO_C:
        part = c_desc.load([m, n]) + part
    c_desc.store([m, n], part.to(OUT))


@triton.jit
def _store(
    acc, c_desc, bias_ptr, m, n, N,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, SWAP: tl.constexpr, SUBTILES: tl.constexpr,
    HAS_BIAS: tl.constexpr, ADD_TO_C: tl.constexpr, OUT: tl.constexpr,
):  # fmt: skip
    if SWAP:
        acc = tl.trans(acc)
    if HAS_BIAS:
        columns = n + tl.arange(0, BLOCK_N)
        bias = tl.load(bias_ptr + columns, mask=columns < N, other=0.0).to(tl.float32)
        acc = acc + bias[None, :]
    if SUBTILES == 1:
        _put(acc, c_desc, m, n, ADD_TO_C, OUT)
    else:
        halves = tl.permute(tl.reshape(acc, (BLOCK_M, 2, BLOCK_N // 2)), (0, 2, 1))
        left, right = tl.split(halves)
        _put(left, c_desc, m, n, ADD_TO_C, OUT)
        _put(right, c_desc, m, n + BLOCK_N // 2, ADD_TO_C, OUT)


# Not specialised by sizes: a batch of a new size compiles nothing.
@triton.jit(do_not_specialize=["M", "N", "leaf_steps"])
def _gemm(
    a_desc, b_desc, c_desc, bias_ptr, parked_ptr, M, N, leaf_steps,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, GROUP: tl.constexpr,
    A_T: tl.constexpr, B_T: tl.constexpr, SWAP: tl.constexpr, SUBTILES: tl.constexpr,
    PARTS: tl.constexpr, HAS_BIAS: tl.constexpr, ADD_TO_C: tl.constexpr, OUT: tl.constexpr,
    LEAVES: tl.constexpr, REGISTERS: tl.constexpr, PARKED: tl.constexpr, POP: tl.constexpr,
    CONSTRAINTS: tl.constexpr, PACK: tl.constexpr,
):  # fmt: skip
    """One loop over all K blocks of all tiles of this program, so that loads run ahead of tiles.

    LEAVES: of this program's part of K; every part of a tile has as many.
    """
    CUT: tl.constexpr = LEAVES * PARTS
    tiles = tl.cdiv(M, BLOCK_M) * tl.cdiv(N, BLOCK_N) * PARTS
    programs = tl.num_programs(0)
    tile = tl.program_id(0) - programs
    mine = tl.cdiv(tiles - tl.program_id(0), programs)
    step, leaf, part, m, n = leaf_steps - 1, LEAVES - 1, 0, 0, 0
    acc = _zeros(BLOCK_M, BLOCK_N, SWAP)
    # One waiting sum a level of the tree: the first REGISTERS levels in registers, others parked.
    if LEAVES >= 2 and REGISTERS >= 1:
        one = acc
    if LEAVES >= 4 and REGISTERS >= 2:
        two = acc
    if LEAVES >= 8 and REGISTERS >= 3:
        four = acc
    for _ in range(mine * leaf_steps * LEAVES):
        step = tl.where(step == leaf_steps - 1, 0, step + 1)
        if step == 0:
            leaf = tl.where(leaf == LEAVES - 1, 0, leaf + 1)
            if leaf == 0:
                tile += programs
                part, m, n = locate(tile, M, N, BLOCK_M, BLOCK_N, GROUP, PARTS)
        at = part * LEAVES + leaf
        k = step * BLOCK_K
        a = load_block(a_desc, at, m, k, CUT, BLOCK_M, BLOCK_K, A_T)
        b = load_block(b_desc, at, n, k, CUT, BLOCK_N, BLOCK_K, B_T)
        acc = _multiply(a, b, acc, SWAP)
        if step == leaf_steps - 1:
            total = acc
            if LEAVES >= 2:
                total = settled(acc, POP)
            # Selections, not branches: a branch would keep two versions of each sum in registers.
            if LEAVES >= 2 and REGISTERS >= 1:
                own = total
                total = tl.where(leaf % 2 == 0, own, one + own)
                one = tl.where(leaf % 2 == 0, own, one)
            if LEAVES >= 4 and REGISTERS >= 2:
                own = total
                total = tl.where(leaf % 4 == 3, two + own, own)
                two = tl.where(leaf % 4 == 1, own, two)
            if LEAVES >= 8 and REGISTERS >= 3:
                own = total
                total = tl.where(leaf % 8 == 7, four + own, own)
                four = tl.where(leaf % 8 == 3, own, four)
            if PARKED:
                level = parked_ptr + tl.program_id(0) * (3 * BLOCK_M * BLOCK_N)
                level += parking_places(BLOCK_M, BLOCK_N)
                total = unpark_all(
                    total, level, leaf, BLOCK_M * BLOCK_N, POP, CONSTRAINTS, PACK, REGISTERS
                )
                if (leaf < LEAVES - 1) & ((REGISTERS == 0) | (leaf % 2 == 1)):
                    park(total, level, leaf, BLOCK_M * BLOCK_N, POP)
            if leaf == LEAVES - 1:
                row = part * tl.cdiv(M, BLOCK_M) * BLOCK_M + m
                _store(
                    total, c_desc, bias_ptr, row, n, N,
                    BLOCK_M, BLOCK_N, SWAP, SUBTILES, HAS_BIAS, ADD_TO_C, OUT,
                )  # fmt: skip
            acc = _zeros(BLOCK_M, BLOCK_N, SWAP)


@triton.jit(do_not_specialize=["M", "N", "leaf_steps"])
def _gemm_once(
    a_desc, b_desc, b2_desc, c_desc, c2_desc, bias_ptr, M, N, leaf_steps,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, GROUP: tl.constexpr,
    A_T: tl.constexpr, B_T: tl.constexpr, SWAP: tl.constexpr, SUBTILES: tl.constexpr,
    PARTS: tl.constexpr, HAS_BIAS: tl.constexpr, ADD_TO_C: tl.constexpr, OUT: tl.constexpr,
    BESIDE: tl.constexpr,
):  # fmt: skip
    """One tile of one leaf: no loads run ahead of the tile, but no branch is in the loop, and the
    result takes the operands' place in shared memory."""
    # A path around the loop, with accumulators of plain zeros, would make the assembler run the
    # matrix instructions one at a time.
    tl.assume(leaf_steps > 0)
    part, m, n = locate(tl.program_id(0), M, N, BLOCK_M, BLOCK_N + BESIDE, GROUP, PARTS)
    acc = _zeros(BLOCK_M, BLOCK_N, SWAP)
    if BESIDE:
        acc2 = _zeros(BLOCK_M, BESIDE, SWAP)
    for step in range(leaf_steps):
        k = step * BLOCK_K
        a = load_block(a_desc, part, m, k, PARTS, BLOCK_M, BLOCK_K, A_T)
        b = load_block(b_desc, part, n, k, PARTS, BLOCK_N, BLOCK_K, B_T)
        if BESIDE:
            b2 = load_block(b2_desc, part, n + BLOCK_N, k, PARTS, BESIDE, BLOCK_K, B_T)
            acc2 = _multiply(a, b2, acc2, SWAP)
        acc = _multiply(a, b, acc, SWAP)
    row = part * tl.cdiv(M, BLOCK_M) * BLOCK_M + m
    _store(
        acc, c_desc, bias_ptr, row, n, N,
        BLOCK_M, BLOCK_N, SWAP, SUBTILES, HAS_BIAS, ADD_TO_C, OUT,
    )  # fmt: skip
    if BESIDE:
        _store(
            acc2, c2_desc, bias_ptr, row, n + BLOCK_N, N,
            BLOCK_M, BESIDE, SWAP, 1, HAS_BIAS, ADD_TO_C, OUT,
        )  # fmt: skip


@triton.jit
def _fold(parts_ptr, out_ptr, N, stride, space, PARTS: tl.constexpr, BLOCK: tl.constexpr):
    """parts [PARTS, rows, stride] fp32 -> out [M, N]: neighbours first, one rounding."""
    row, space = tl.program_id(0).to(tl.int64), tl.cast(space, tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = column < N
    total = _sum_pair(parts_ptr + row * stride + column, space, inside)
    if PARTS >= 4:
        total += _sum_pair(parts_ptr + (row * stride + 2 * space) + column, space, inside)
    if PARTS >= 8:
        low = _sum_pair(parts_ptr + (row * stride + 4 * space) + column, space, inside)
        total += low + _sum_pair(parts_ptr + (row * stride + 6 * space) + column, space, inside)
    tl.store(out_ptr + row * N + column, total.to(out_ptr.dtype.element_ty), mask=inside)


@triton.jit
def _sum_pair(at, space, inside):
    return tl.load(at, mask=inside) + tl.load(at + space, mask=inside)


def gemm(
    a: Tensor,
    b: Tensor,
    config: Config,
    *,
    out_dtype: torch.dtype,
    bias: Tensor | None = None,
    leaves: int = 1,
    a_t: bool = False,
    b_t: bool = False,
    out: Tensor | None = None,
    add: bool = False,
) -> Tensor:
    """C = A B^T (+ bias).

    Args:
        a: [M, K], or [K, M] with `a_t`.
        b: [N, K], or [K, N] with `b_t`; dtype of `a`.
        config: the tuning for these shapes.
        out_dtype: of the result.
        bias: [N], added in fp32; with one leaf only.
        leaves: 1, 2, 4 or 8 parts of K; above 1 neither operand may be transposed.
        a_t: A is stored with K first.
        b_t: B is stored with K first.
        out: [M, N] of `out_dtype` to write to; with one leaf only.
        add: add the product to what `out` holds, in fp32.

    Returns:
        [M, N]; `out` itself where it is given.

    Raises:
        ValueError: several leaves with what only one can have, or a configuration that no kernel
            has.
    """
    if leaves > 1 and (bias is not None or out is not None or a_t or b_t):
        raise ValueError("a product of several leaves has no bias, no `out`, nothing transposed")
    (k, m) = a.shape if a_t else a.shape[::-1]
    n = b.shape[1] if b_t else b.shape[0]
    if out is None:
        out = torch.empty(m, n, dtype=out_dtype, device=a.device)
    if m == 0 or n == 0 or k == 0:
        return out if add else out.zero_()
    parts = min(config.parts, leaves)
    if config.beside and not (config.once and parts == leaves):
        raise ValueError(f"columns beside need `once` and one leaf a program: {config}")
    if parts == 1:
        target = bulk(out)
        _products(a, b, target, config, bias, leaves, 1, a_t, b_t, add, m, n, k)
        return out if target is out else out.copy_(target)
    rows = cdiv(m, config.block_m) * config.block_m
    columns = cdiv(n, 4) * 4  # bulk copies want rows of 16 bytes
    sums = torch.empty(parts * rows, columns, dtype=torch.float32, device=a.device)
    _products(a, b, sums[:, :n], config, None, leaves, parts, a_t, b_t, False, m, n, k)
    block = min(1024, 1 << (n - 1).bit_length())
    space = rows * columns
    key = (out_dtype, n % 16 == 0, columns % 16 == 0, n == 1, space < 2**31)
    fold = _folding(parts, block)
    fold((m, cdiv(n, block), 1), sums, out, n, columns, space, key=key)
    return out


def _products(
    a: Tensor, b: Tensor, c: Tensor, config: Config, bias: Tensor | None, leaves: int, parts: int,
    a_t: bool, b_t: bool, add: bool, m: int, n: int, k: int,
) -> None:  # fmt: skip
    """Fill c [M, N], or c [parts * M rounded up to tiles, N] with the sums of parts of K."""
    block_m, block_n, block_k = config.block_m, config.block_n, config.block_k
    beside = config.beside
    widths = (block_n, beside) if beside else (block_n,)
    if leaves == 1:
        a, b = bulk(a), bulk(b)
        a_desc = descriptor(a, [block_k, block_m] if a_t else [block_m, block_k])
        b_descs = [descriptor(b, [block_k, w] if b_t else [w, block_k]) for w in widths]
    else:
        a_desc = leaf_descriptor(a, leaves, [block_m, block_k])
        b_descs = [leaf_descriptor(b, leaves, [w, block_k]) for w in widths]
    c_desc = descriptor(c, [block_m, block_n // config.subtiles])
    tiles = cdiv(m, block_m) * cdiv(n, block_n + beside) * parts
    steps = cdiv(k // leaves, block_k)
    flags = (leaves, parts, a_t, b_t, bias is not None, add, a.is_cuda)
    launcher, parking = _launcher(config, c.dtype, *flags)
    key = (a.dtype, bias is None or (bias.dtype, bias.data_ptr() % 16 == 0))
    if config.once and leaves == parts:
        b2_desc = b_descs[1] if beside else None
        c2_desc = descriptor(c, [block_m, beside]) if beside else None
        launcher(
            (tiles, 1, 1), a_desc, b_descs[0], b2_desc, c_desc, c2_desc, bias, m, n, steps, key=key
        )
        return
    programs = min(tiles, processors(a) * config.occupancy)
    parked = torch.empty(programs * parking, dtype=torch.float32, device=a.device)
    launcher((programs, 1, 1), a_desc, b_descs[0], c_desc, bias, parked, m, n, steps, key=key)


@functools.cache
def _folding(parts: int, block: int) -> Launcher:
    return Launcher(_fold, {"PARTS": parts, "BLOCK": block}, num_warps=4)


@functools.cache
def _launcher(
    config: Config, out_dtype: torch.dtype, leaves: int, parts: int, a_t: bool, b_t: bool,
    has_bias: bool, add: bool, real: bool,
) -> tuple[Launcher, int]:  # fmt: skip
    """What runs a configuration, and how many sums each program parks; `real`: on a GPU."""
    block_m, block_n = config.block_m, config.block_n
    constants = {
        "BLOCK_M": block_m, "BLOCK_N": block_n, "BLOCK_K": config.block_k, "GROUP": 8,
        "A_T": a_t, "B_T": b_t, "SWAP": bool(config.swap), "SUBTILES": config.subtiles,
        "PARTS": parts, "HAS_BIAS": has_bias, "ADD_TO_C": add, "OUT": TRITON_DTYPES[out_dtype],
    }  # fmt: skip
    options = {"num_warps": config.warps, "num_stages": config.stages}
    if config.once and leaves == parts:
        return Launcher(_gemm_once, {**constants, "BESIDE": config.beside}, **options), 0
    each = block_m * block_n // (32 * config.warps)  # elements a thread
    registers = 3 if each <= 16 else 1 if each <= 64 else 0
    parks = leaves // parts > 1 << registers
    pop, constraints = pop_asm(min(each, _PACK)) if real else ("", "")
    constants |= {
        "LEAVES": leaves // parts, "REGISTERS": registers, "PARKED": parks,
        "POP": pop, "CONSTRAINTS": constraints, "PACK": min(each, _PACK),
    }  # fmt: skip
    return Launcher(_gemm, constants, **options), 3 * block_m * block_n if parks else 0
