"""Attention's walk over tiles for Hopper, in Gluon: the schedule and the bits of
`attention_triton`, faster.

A program holds one processor and takes tile after tile. One warp sends for queries, keys and
values through tensor maps; two warpgroups take half of a tile's rows each and meet at memory
barriers only, so that one computes exponentials while the other's products run. Within a warpgroup
the product with V trails the scores by one block and runs under the next block's exponentials.

Two things decide about speed, and none about bits:
  * Registers stay as they are at launch. Triton moves them between warps (`setmaxnreg`), and then
    ptxas finds too few for products in flight and runs them one at a time (warning C7512).
  * What is merged lies in global memory meanwhile: shared memory is for blocks under way.
"""

# mypy: disable-error-code="no-untyped-def"

import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
import triton
from torch import Tensor
from triton import knobs
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, mbarrier, tma
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from isomodels.kernels.attention_hopper_walk import (
    ROWS,
    STAGES,
    VALUES,
    WIDE,
    D,
    M,
    N,
    arrived,
    segment_of,
)
from isomodels.kernels.attention_triton import LOG2E, SEGMENT, use_tma
from isomodels.kernels.common_triton import processors

HEAD_DIM = D.value
TILE = 2 * M.value  # rows: two warpgroups
NUM_WARPS = 4  # of each of the two: the first is the warps of the launch
_BOX = 64  # columns of a copy: what the swizzle takes

_LN2 = gl.constexpr(0.6931471805599453)
_BLOCKS = gl.constexpr(SEGMENT // N.value)


@gluon.jit
def _find_tile(cu_seqlens, tile, num_seqs):
    """`find_tile` of `attention_triton`, 32 sequences at once."""
    lanes: gl.constexpr = gl.BlockedLayout([1], [32], [gl.num_warps()], [0])
    found = 0
    for start in range(0, num_seqs, 32):
        i = start + gl.arange(0, 32, lanes)
        bound = gl.load(cu_seqlens + i, mask=i < num_seqs, other=0x3FFFFFFF)
        found += gl.sum((bound // (2 * M) + i <= tile).to(gl.int32), 0)
    seq = found - 1
    return seq, tile - (gl.load(cu_seqlens + seq) // (2 * M) + seq)


@gluon.jit
def _tile(turn, cu_seqlens, seq_lens, num_tiles, num_seqs, num_heads, PAGED: gl.constexpr):
    """The program's tile of this turn: whether there is one, its head, sequence, first token of the
    sequence, new tokens and length of it, and the tile's first row among the new tokens.

    Long tiles come first, and programs take them there and back, so that all get the same work.
    """
    pid = gl.program_id(0)
    programs = gl.num_programs(0)
    unit = turn * programs + gl.where(turn % 2 == 0, pid, programs - 1 - pid)
    tile = gl.maximum(num_tiles - 1 - unit // num_heads, 0)
    seq, tile = _find_tile(cu_seqlens, tile, num_seqs)
    first_token = gl.load(cu_seqlens + seq)
    num_rows = gl.load(cu_seqlens + seq + 1) - first_token
    row = tile * (2 * M)
    exists = (unit < num_tiles * num_heads) & (row < num_rows)
    length = num_rows
    if PAGED:
        length = gl.load(seq_lens + seq)
        exists = exists & (num_rows > 1)  # the decode kernel's
    return exists, unit % num_heads, seq, first_token, num_rows, length, row


@gluon.jit
def _blocks(position, rows: gl.constexpr, length):
    """Blocks of keys that `rows` rows from a position on see."""
    return gl.cdiv(gl.minimum(position + rows, length), N)


@gluon.jit
def _fetch(
    desc, first_token, block, length, column, table, block_rows, head_row, boxes, stage, bar,
    wanted, PAGE: gl.constexpr, PAGED: gl.constexpr,
):  # fmt: skip
    """Send for one block, in boxes that lie in one page each."""
    HEIGHT: gl.constexpr = boxes.shape[1]
    PARTS: gl.constexpr = N // HEIGHT
    for part in gl.static_range(PARTS):
        key = block * N + part * HEIGHT
        row = first_token + key
        if PAGED:
            page = gl.load(table + key // PAGE, mask=wanted & (key < length), other=0)
            row = page * block_rows + head_row + key % PAGE
        for half in gl.static_range(2):
            box = boxes.index((stage * 2 + half) * PARTS + part)
            tma.async_copy_global_to_shared(desc, [row, column + half * 64], bar, box, pred=wanted)


@gluon.jit
def _produce(
    q_desc, k_desc, v_desc, cu_seqlens, seq_lens, block_table, stride_table, block_rows, head_rows,
    head_columns, num_tiles, num_seqs, num_heads, turns,
    q_s, k_boxes, v_boxes, q_full, q_empty, full, empty,
    GROUP: gl.constexpr, PAGE: gl.constexpr, PAGED: gl.constexpr,
):  # fmt: skip
    """Send for a tile's queries, then for pairs: keys of one block and values of the block before
    it, which are needed at the same time."""
    BYTES: gl.constexpr = N * D * 2
    pair = 0
    tiles = 0
    for turn in range(turns):
        exists, head, seq, first_token, num_rows, length, row = _tile(
            turn, cu_seqlens, seq_lens, num_tiles, num_seqs, num_heads, PAGED
        )
        if exists:
            for half in gl.static_range(2):
                mbarrier.wait(q_empty.index(half), (tiles & 1) ^ 1)
                mbarrier.expect(q_full.index(half), M * D * 2)
                tma.async_copy_global_to_shared(
                    q_desc, [first_token + row + half * M, head * D], q_full.index(half),
                    q_s.index(half),
                )  # fmt: skip
            tiles += 1
            head_row = (head // GROUP) * head_rows
            column = (head // GROUP) * head_columns
            table = block_table
            if PAGED:
                table += seq.to(gl.int64) * stride_table
            blocks = _blocks(length - num_rows + row, 2 * M, length)
            for block in range(blocks + 1):
                stage = pair % STAGES
                bar = full.index(stage)
                has_k = block < blocks
                has_v = block > 0
                mbarrier.wait(empty.index(stage), ((pair // STAGES) & 1) ^ 1)
                mbarrier.expect(bar, 2 * BYTES, pred=has_k & has_v)
                mbarrier.expect(bar, BYTES, pred=has_k != has_v)
                _fetch(
                    k_desc, first_token, block, length, column, table, block_rows, head_row,
                    k_boxes, stage, bar, has_k, PAGE, PAGED,
                )  # fmt: skip
                _fetch(
                    v_desc, first_token, block - 1, length, column, table, block_rows, head_row,
                    v_boxes, stage, bar, has_v, PAGE, PAGED,
                )  # fmt: skip
                pair += 1


@gluon.jit
def _consume(
    half: gl.constexpr, out_ptr, lse_ptr, parked_ptr, cu_seqlens, seq_lens, scale_log2, num_tiles,
    num_seqs, num_heads, turns, q_all, k_s, v_s, ones_s, q_full, q_empty, full, empty,
    PAGED: gl.constexpr,
):  # fmt: skip
    """One warpgroup: its half of the rows of each tile."""
    q_s = q_all.index(half)
    parked_rows = (gl.program_id(0) * 2 + half) * M + gl.arange(0, M, gl.SliceLayout(1, VALUES))
    columns = gl.arange(0, D, gl.SliceLayout(0, VALUES))
    parked_ptr += parked_rows[:, None] * D + columns[None, :]
    tiles = 0
    start = 0  # the tile's first pair
    for turn in range(turns):
        exists, head, _, first_token, num_rows, length, row = _tile(
            turn, cu_seqlens, seq_lens, num_tiles, num_seqs, num_heads, PAGED
        )
        if exists:
            position = length - num_rows + row
            pairs = _blocks(position, 2 * M, length) + 1
            position += half * M
            row += half * M
            num_full = (position + 1) // N  # blocks that all rows see whole
            num_blocks = gl.where(row < num_rows, _blocks(position, M, length), 0)
            segments = gl.cdiv(num_blocks, _BLOCKS)
            m = gl.full([M], float("-inf"), gl.float32, ROWS)
            norm = gl.zeros([M], gl.float32, ROWS)
            acc = gl.zeros([M, D], gl.float32, VALUES)
            mbarrier.wait(q_full.index(half), tiles & 1)
            for segment in range(0, segments):
                first = segment * _BLOCKS
                last = gl.minimum(first + _BLOCKS, num_blocks)
                m_next, norm_next, acc_next = segment_of(
                    q_s, k_s, v_s, ones_s, full, empty, start, position, length, num_full,
                    scale_log2, first, last,
                )  # fmt: skip
                if segment > 0:  # as `merge` of `attention_triton`
                    m_new = gl.maximum(m, m_next)
                    base = gl.where(m_new == float("-inf"), 0.0, m_new)
                    old, new = gl.exp2(m - base), gl.exp2(m_next - base)
                    m = m_new
                    norm = gl.fma(norm_next, new, norm * old)
                    old = gl.convert_layout(old, gl.SliceLayout(1, VALUES))[:, None]
                    new = gl.convert_layout(new, gl.SliceLayout(1, VALUES))[:, None]
                    acc = gl.fma(acc_next, new, gl.load(parked_ptr) * old)
                else:
                    m, norm, acc = m_next, norm_next, acc_next
                if segment < segments - 1:
                    gl.store(parked_ptr, acc)
            mbarrier.arrive(q_empty.index(half), count=1)
            for pair in range(start + num_blocks, start + pairs):
                arrived(full, pair)
                mbarrier.arrive(empty.index(pair % STAGES), count=1)
            start += pairs
            tiles += 1
            _store(out_ptr, lse_ptr, m, norm, acc, first_token, row, num_rows, head, num_heads)


@gluon.jit
def _store(out_ptr, lse_ptr, m, norm, acc, first_token, row, num_rows, head, num_heads):
    """As `finish` of `attention_triton`."""
    out = acc / gl.convert_layout(norm, gl.SliceLayout(1, VALUES))[:, None] + 0.0
    out = gl.convert_layout(out.to(gl.bfloat16), WIDE)
    rows = row + gl.arange(0, M, gl.SliceLayout(1, WIDE))
    at = ((first_token + rows).to(gl.int64) * num_heads + head) * D
    at = at[:, None] + gl.arange(0, D, gl.SliceLayout(0, WIDE))[None, :]
    gl.store(out_ptr + at, out, mask=(rows < num_rows)[:, None])
    if lse_ptr is not None:
        rows = row + gl.arange(0, M, ROWS)
        at = (first_token + rows).to(gl.int64) * num_heads + head
        gl.store(lse_ptr + at, (m + gl.log2(norm)) * _LN2, mask=rows < num_rows)


@gluon.jit(
    do_not_specialize=[  # none of them decides about a copy's width: they would only compile more
        "stride_table", "block_rows", "head_rows", "head_columns", "num_tiles", "num_seqs", "turns",
    ]
)  # fmt: skip
def _attention_tiles(
    q_desc, k_desc, v_desc, out_ptr, lse_ptr, parked_ptr, cu_seqlens, seq_lens, block_table,
    stride_table, block_rows, head_rows, head_columns, scale_log2, num_tiles, num_seqs, num_heads,
    turns, GROUP: gl.constexpr, PAGE: gl.constexpr, PAGED: gl.constexpr, HEIGHT: gl.constexpr,
):  # fmt: skip
    BF16: gl.constexpr = gl.bfloat16
    BOXES: gl.constexpr = STAGES * 2 * (N // HEIGHT)
    WHOLE: gl.constexpr = gl.NVMMASharedLayout.get_default_for([N, D], BF16)
    # A block [N, D] lies in memory as its halves [N, 64], and each in boxes of rows.
    k_boxes = gl.allocate_shared_memory(BF16, [BOXES, HEIGHT, 64], k_desc.layout)
    v_boxes = gl.allocate_shared_memory(BF16, [BOXES, HEIGHT, 64], v_desc.layout)
    k_s = k_boxes._reinterpret(BF16, [STAGES, N, D], WHOLE)
    v_s = v_boxes._reinterpret(BF16, [STAGES, N, D], WHOLE)
    q_s = gl.allocate_shared_memory(BF16, [2, M, D], q_desc.layout)
    ones = gl.full([8, N], 1.0, gl.float32, gl.BlockedLayout([1, 8], [8, 4], [4, 1], [1, 0]))
    ones_s = gl.allocate_shared_memory(
        BF16, [8, N], gl.NVMMASharedLayout.get_default_for([8, N], BF16), ones.to(BF16)
    )
    full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    empty = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    q_full = gl.allocate_shared_memory(gl.int64, [2, 1], mbarrier.MBarrierLayout())
    q_empty = gl.allocate_shared_memory(gl.int64, [2, 1], mbarrier.MBarrierLayout())
    for i in gl.static_range(STAGES):
        mbarrier.init(full.index(i), count=1)
        mbarrier.init(empty.index(i), count=2)
    for i in gl.static_range(2):
        mbarrier.init(q_full.index(i), count=1)
        mbarrier.init(q_empty.index(i), count=1)
    fence_async_shared()
    gl.thread_barrier()
    ones_s = ones_s.permute((1, 0))  # [N, 8]
    gl.warp_specialize(
        [
            (_consume, (0, out_ptr, lse_ptr, parked_ptr, cu_seqlens, seq_lens, scale_log2,
                num_tiles, num_seqs, num_heads, turns, q_s, k_s, v_s, ones_s, q_full, q_empty,
                full, empty, PAGED)),
            (_consume, (1, out_ptr, lse_ptr, parked_ptr, cu_seqlens, seq_lens, scale_log2,
                num_tiles, num_seqs, num_heads, turns, q_s, k_s, v_s, ones_s, q_full, q_empty,
                full, empty, PAGED)),
            (_produce, (q_desc, k_desc, v_desc, cu_seqlens, seq_lens, block_table, stride_table,
                block_rows, head_rows, head_columns, num_tiles, num_seqs, num_heads, turns, q_s,
                k_boxes, v_boxes, q_full, q_empty, full, empty, GROUP, PAGE, PAGED)),
        ],
        [4, 1],
        [168, 168],
    )  # fmt: skip


def _keep_registers(
    backend: Any, stages: dict[str, Callable], options: Any, language: Any, capability: int
) -> None:
    """Take `setmaxnreg` out of what Triton gives to ptxas."""
    make = stages["ptx"]
    stages["ptx"] = lambda source, metadata: re.sub(
        r"\n\s*setmaxnreg[^\n]*", "", make(source, metadata)
    )


@contextmanager
def _registers_kept() -> Iterator[None]:
    before = knobs.runtime.add_stages_inspection_hook
    knobs.runtime.add_stages_inspection_hook = _keep_registers
    try:
        yield
    finally:
        knobs.runtime.add_stages_inspection_hook = before


def _map(x: Tensor, shape: list[int], pitch: int, block: list[int]) -> TensorDescriptor:
    """Tiles of a matrix [rows, columns] of that pitch that begins where x does."""
    layout = gl.NVMMASharedLayout.get_default_for(block, gl.bfloat16)
    return TensorDescriptor(x, shape, [pitch, 1], block, layout)


def _packed_map(x: Tensor, block: list[int]) -> TensorDescriptor:
    """Tiles of x [T, heads, D], read as [T, heads * D]."""
    return _map(x, [x.shape[0], x.shape[1] * x.shape[2]], x.stride(0), block)


def _fits(q: Tensor) -> bool:
    return q.dtype == torch.bfloat16 and q.shape[-1] == HEAD_DIM and use_tma(q)


def fits_packed(q: Tensor, k: Tensor, v: Tensor) -> bool:
    """Whether `packed` takes these."""
    return _fits(q) and use_tma(k) and use_tma(v)


def fits_paged(q: Tensor, kv_cache: Tensor) -> bool:
    """Whether `paged` takes these: the cache must be a matrix with a row for each slot."""
    _, num_kv_heads, page, _ = kv_cache.shape
    stride_block, stride_head, stride_slot, _ = kv_cache.stride()
    in_a_row = stride_head * (num_kv_heads - 1) + 2 * HEAD_DIM <= stride_slot
    return (
        _fits(q)
        and page % 16 == 0
        and stride_slot % 8 == 0
        and stride_block % stride_slot == 0
        and (in_a_row or stride_head % stride_slot == 0)
        and kv_cache.data_ptr() % 16 == 0
    )


def packed(
    q: Tensor, k: Tensor, v: Tensor, cu_seqlens: Tensor, scale: float, out: Tensor, lse: Tensor
) -> None:
    """Fill `out` [T, heads, 128] and `lse` [T, heads] of whole sequences."""
    maps = [_packed_map(x, [64, _BOX]) for x in (k, v)]
    no_pages = (None, None, 0, 0)
    _launch(q, maps, k.shape[1], (out, lse), cu_seqlens, no_pages, (0, HEAD_DIM), scale, 0)


def paged(
    q: Tensor, kv_cache: Tensor, block_table: Tensor, cu_seqlens_q: Tensor, seq_lens: Tensor,
    scale: float, out: Tensor,
) -> None:  # fmt: skip
    """Fill the rows of `out` whose sequences have two or more new tokens."""
    num_blocks, num_kv_heads, page, _ = kv_cache.shape
    stride_block, stride_head, pitch, _ = kv_cache.stride()
    across, down = divmod(stride_head, pitch)[1], stride_head // pitch
    if across:  # the heads of a slot lie in one row
        down = 0
    block_rows = stride_block // pitch
    rows = (num_blocks - 1) * block_rows + (num_kv_heads - 1) * down + page
    columns = (num_kv_heads - 1) * across + HEAD_DIM
    block = [16 if page % 32 else 32 if page % 64 else 64, _BOX]
    maps = [
        _map(x, [rows, columns], pitch, block)
        for x in (kv_cache[..., :HEAD_DIM], kv_cache[..., HEAD_DIM:])
    ]
    pages = (seq_lens, block_table, block_table.stride(0), block_rows)
    _launch(
        q, maps, num_kv_heads, (out, None), cu_seqlens_q, pages, (down, across), scale, page
    )  # fmt: skip


def _launch(
    q: Tensor, maps: list[TensorDescriptor], num_kv_heads: int, results: tuple, cu_seqlens: Tensor,
    pages: tuple, head_strides: tuple[int, int], scale: float, page: int,
) -> None:  # fmt: skip
    num_tokens, num_heads, _ = q.shape
    num_seqs = len(cu_seqlens) - 1
    num_tiles = num_tokens // TILE + num_seqs
    programs = min(processors(q), num_tiles * num_heads)
    parked = torch.empty(programs * TILE, HEAD_DIM, dtype=torch.float32, device=q.device)
    with _registers_kept():
        _attention_tiles[(programs,)](
            _packed_map(q, [64, HEAD_DIM]), *maps, *results, parked, cu_seqlens, *pages,
            *head_strides, scale * LOG2E, num_tiles, num_seqs, num_heads,
            triton.cdiv(num_tiles * num_heads, programs),
            GROUP=num_heads // num_kv_heads, PAGE=page, PAGED=page > 0,
            HEIGHT=maps[0].block_shape[0], num_warps=NUM_WARPS,
        )  # fmt: skip
