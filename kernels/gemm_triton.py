"""The matrix product under every linear operation: persistent, bulk copies, fp32 accumulation.

What defines a bit: operands as they are, K cut into `LEAVES` equal leaves, each summed in one
sequential pass on the matrix units in fp32, the leaves folded by a balanced binary tree of
neighbours in fp32, then the bias, then one rounding. Tiles, stages, warps, the place of a row in
the tile and which operand takes the place of the rows move no bit (Hopper; the tests check it).
"""

# Arguments of kernels have Triton's own types.
# mypy: disable-error-code="no-untyped-def"

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor

from isomodels.kernels.common_triton import processors
from isomodels.kernels.park_triton import park, parking_places, pop_asm, settled, unpark_all

_ALIGNMENT = 16  # bytes, of base and strides, that the bulk copy engine asks for
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
    LEAVES: tl.constexpr, HAS_BIAS: tl.constexpr, ADD_TO_C: tl.constexpr, OUT: tl.constexpr,
    REGISTERS: tl.constexpr, PARKED: tl.constexpr, POP: tl.constexpr,
    CONSTRAINTS: tl.constexpr, PACK: tl.constexpr,
):  # fmt: skip
    """One loop over all K blocks of all tiles of this program, so that loads run ahead of tiles."""
    tiles_m, tiles_n = tl.cdiv(M, BLOCK_M), tl.cdiv(N, BLOCK_N)
    tiles = tiles_m * tiles_n
    programs = tl.num_programs(0)
    tile = tl.program_id(0) - programs
    mine = tl.cdiv(tiles - tl.program_id(0), programs)
    step, leaf, m, n = leaf_steps - 1, LEAVES - 1, 0, 0
    if SWAP:
        acc = tl.zeros((BLOCK_N, BLOCK_M), tl.float32)
    else:
        acc = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
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
                tile_m, tile_n = place(tile, tiles_m, tiles_n, GROUP)
                m, n = tile_m * BLOCK_M, tile_n * BLOCK_N
        a = load_block(a_desc, leaf, m, step * BLOCK_K, LEAVES, BLOCK_M, BLOCK_K, A_T)
        b = load_block(b_desc, leaf, n, step * BLOCK_K, LEAVES, BLOCK_N, BLOCK_K, B_T)
        if SWAP:
            acc = tl.dot(b, tl.trans(a), acc, input_precision="ieee")
        else:
            acc = tl.dot(a, tl.trans(b), acc, input_precision="ieee")
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
                _store(
                    total, c_desc, bias_ptr, m, n, N,
                    BLOCK_M, BLOCK_N, SWAP, SUBTILES, HAS_BIAS, ADD_TO_C, OUT,
                )  # fmt: skip
            if SWAP:
                acc = tl.zeros((BLOCK_N, BLOCK_M), tl.float32)
            else:
                acc = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)


def bulk(x: Tensor) -> Tensor:
    """`x` [R, C] itself if the bulk copy engine can read it, else a padded copy's view."""
    unit = _ALIGNMENT // x.element_size()
    dense = x.stride(1) == 1 and x.stride(0) % unit == 0 and x.data_ptr() % _ALIGNMENT == 0
    if dense and x.stride(0) >= x.shape[1]:
        return x
    rows, columns = x.shape
    padded = x.new_empty(max(rows, 1), triton.cdiv(columns, unit) * unit)
    padded[:rows, :columns] = x
    return padded[:rows, :columns]


def _leaf_descriptor(x: Tensor, leaves: int, block: list[int]) -> TensorDescriptor:
    """[R, G * L] -> descriptor of [G, R, L]."""
    length = x.shape[1] // leaves
    if length % (_ALIGNMENT // x.element_size()):
        cut = x.reshape(len(x) * leaves, length)
        x_grl = bulk(cut).unflatten(0, (len(x), leaves)).transpose(0, 1)
    else:
        x_grl = bulk(x).unflatten(1, (leaves, length)).transpose(0, 1)
    return TensorDescriptor(x_grl, list(x_grl.shape), list(x_grl.stride()), [1, *block])


def descriptor(x: Tensor, block: list[int]) -> TensorDescriptor:
    """How the bulk copy engine sees a matrix that `bulk` returned."""
    return TensorDescriptor(x, list(x.shape), list(x.stride()), block)


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
        bias: [N], added in fp32.
        leaves: 1, 2, 4 or 8 parts of K; above 1 neither operand may be transposed.
        a_t: A is stored with K first.
        b_t: B is stored with K first.
        out: [M, N] of `out_dtype` to write to.
        add: add the product to what `out` holds, in fp32.

    Returns:
        [M, N]; `out` itself where it is given.
    """
    (k, m) = a.shape if a_t else a.shape[::-1]
    n = b.shape[1] if b_t else b.shape[0]
    if out is None:
        out = torch.empty(m, n, dtype=out_dtype, device=a.device)
    if m == 0 or n == 0 or k == 0:
        return out if add else out.zero_()
    block_m, block_n, block_k = config.block_m, config.block_n, config.block_k
    if leaves == 1:
        a_desc = descriptor(bulk(a), [block_k, block_m] if a_t else [block_m, block_k])
        b_desc = descriptor(bulk(b), [block_k, block_n] if b_t else [block_n, block_k])
    else:
        a_desc = _leaf_descriptor(a, leaves, [block_m, block_k])
        b_desc = _leaf_descriptor(b, leaves, [block_n, block_k])
    target = bulk(out)
    c_desc = descriptor(target, [block_m, block_n // config.subtiles])
    tiles = triton.cdiv(m, block_m) * triton.cdiv(n, block_n)
    programs = min(tiles, processors(a) * config.occupancy)
    each = block_m * block_n // (32 * config.warps)  # elements a thread
    registers = 3 if each <= 16 else 1 if each <= 64 else 0
    parks = leaves > 1 << registers
    parked = torch.empty(
        programs * 3 * block_m * block_n if parks else 0, dtype=torch.float32, device=a.device
    )
    pop, constraints = pop_asm(min(each, _PACK)) if a.is_cuda else ("", "")
    _gemm[(programs,)](
        a_desc, b_desc, c_desc, bias, parked, m, n, triton.cdiv(k // leaves, block_k),
        BLOCK_M=block_m, BLOCK_N=block_n, BLOCK_K=block_k, GROUP=8,
        A_T=a_t, B_T=b_t, SWAP=bool(config.swap), SUBTILES=config.subtiles, LEAVES=leaves,
        HAS_BIAS=bias is not None, ADD_TO_C=add, OUT=TRITON_DTYPES[out_dtype],
        REGISTERS=registers, PARKED=parks, POP=pop, CONSTRAINTS=constraints, PACK=min(each, _PACK),
        num_warps=config.warps, num_stages=config.stages,
    )  # fmt: skip
    return out if target is out else out.copy_(target)
