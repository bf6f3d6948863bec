"""Triton backend of attention: the arithmetic of one KV block, shared by every kernel, and the
kernel that walks whole rows of tiles (packed training sequences, prefill over pages).

A row's keys are cut into segments of `SEGMENT` and each segment into blocks of `kv_block`, both
counted from position 0. Within a segment: online softmax in fp32, the probabilities rounded to the
input dtype, their sum and their product with V both taken by the tensor core in block order.
Segments are merged in ascending order. Query tile, warps and stages are tuning.

Mathematics: Dao et al., FlashAttention (2022); merging of partial softmaxes, Rabe and Staats
(2021).
"""

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor

SEGMENT = 2048
HEAD_DIMS = (32, 64, 128, 256)
LOG2E = 1.4426950408889634
_LN2 = tl.constexpr(0.6931471805599453)
_ONES = tl.constexpr(16)  # columns of the product that sums the rows; all equal


def kv_block(head_dim: int) -> int:
    """Keys in one block: part of the schedule."""
    return 64 if head_dim > 128 else 128


def tile_config(head_dim: int, dtype: torch.dtype, rows: int) -> dict[str, int]:
    """Tuning of the tile kernel; `rows` bounds the new tokens of a sequence."""
    if dtype == torch.float32:
        return {"BLOCK_M": 32, "num_warps": 8, "num_stages": 1}
    if rows <= 64:
        return {"BLOCK_M": 64, "num_warps": 4, "num_stages": 2}
    return {"BLOCK_M": 128, "num_warps": 8, "num_stages": 2}


def mapped_config(head_dim: int) -> dict[str, int]:
    """Tuning of the tile kernel with tensor maps."""
    # Triton 3.7.1 cannot split the rows of this loop between groups of warps.
    if triton.__version__.startswith("3.6.") and head_dim <= 128:
        return {"SPECIALIZED": 1, "BLOCK_M": 128, "num_warps": 4, "num_stages": 2}
    return {"SPECIALIZED": 0, "BLOCK_M": 128, "num_warps": 8, "num_stages": 2}


@triton.jit
def attend(q, k, v, m, norm, acc, scale_log2, first_key, positions, MASKED: tl.constexpr):
    """One KV block of the online softmax, its keys counted from `first_key`.

    q [M, D], k and v [N, D], positions [M]; the state is the maximum m [M] (in powers
    of two), the sum norm [M, 16] (equal columns) and acc [M, D], all fp32. Masking a block that
    all rows see whole changes nothing, so MASKED may be False there.
    """
    s = tl.dot(q, tl.trans(k), input_precision="ieee")
    if MASKED:
        columns = tl.arange(0, k.shape[0])
        s = tl.where(columns[None, :] <= (positions - first_key)[:, None], s, float("-inf"))
    m_new = tl.maximum(m, tl.max(s, 1) * scale_log2)
    # A row that has seen no key yet: no inf - inf.
    base = tl.where(m_new == float("-inf"), 0.0, m_new)
    p = tl.exp2(tl.fma(s, scale_log2, -base[:, None])).to(v.dtype)
    alpha = tl.exp2(m - base)[:, None]
    # A sum over the tensor core does not follow the layout of threads; tl.sum would.
    ones = tl.full([v.shape[0], _ONES], 1.0, tl.float32).to(v.dtype)
    norm = tl.dot(p, ones, norm * alpha, input_precision="ieee")
    acc = tl.dot(p, v, acc * alpha, input_precision="ieee")
    return m_new, norm, acc


@triton.jit
def empty_state(M: tl.constexpr, D: tl.constexpr):
    """The state before any key."""
    m = tl.full([M], float("-inf"), tl.float32)
    return m, tl.zeros([M, _ONES], tl.float32), tl.zeros([M, D], tl.float32)


@triton.jit
def merge(m, norm, acc, m_next, norm_next, acc_next):
    """Add the state of the next segment, m and norm [M], acc [M, D]: nothing if it is empty."""
    m_new = tl.maximum(m, m_next)
    base = tl.where(m_new == float("-inf"), 0.0, m_new)
    old, new = tl.exp2(m - base), tl.exp2(m_next - base)
    norm = tl.fma(norm_next, new, norm * old)
    acc = tl.fma(acc_next, new[:, None], acc * old[:, None])
    return m_new, norm, acc


@triton.jit
def finish(norm, acc):
    """The output rows. Adding zero takes the sign off zeros, which masked blocks could change."""
    return acc / norm[:, None] + 0.0


@triton.jit
def load_block(
    k_ptr, v_ptr, block_table, block, length, stride_page, stride_row,
    PAGE: tl.constexpr, PAGED: tl.constexpr, N: tl.constexpr, D: tl.constexpr,
    WHOLE: tl.constexpr,
):  # fmt: skip
    """K and V [N, D] of one block of a sequence. Unless all its keys exist (WHOLE), those past
    `length` are zero: a page's unused slots can hold NaN, and 0 * NaN is NaN."""
    keys = block * N + tl.arange(0, N)
    if PAGED:
        if WHOLE:
            page = tl.load(block_table + keys // PAGE)
        else:
            page = tl.load(block_table + keys // PAGE, mask=keys < length, other=0)
        rows = page.to(tl.int64) * stride_page + (keys % PAGE) * stride_row
    else:
        rows = keys.to(tl.int64) * stride_row
    at = rows[:, None] + tl.arange(0, D)[None, :]
    if WHOLE:
        return tl.load(k_ptr + at), tl.load(v_ptr + at)
    exists = (keys < length)[:, None]
    k = tl.load(k_ptr + at, mask=exists, other=0.0)
    v = tl.load(v_ptr + at, mask=exists, other=0.0)
    return k, v


@triton.jit
def store_rows(
    out_ptr, lse_ptr, m, norm, acc, rows, num_rows, first_row, end, num_tokens, head, num_heads,
    D: tl.constexpr,
):  # fmt: skip
    """Write a tile's rows of one head; tokens from `end` on belong to no sequence: zero."""
    tokens = (first_row + rows).to(tl.int64)
    exists = rows < num_rows
    written = exists | ((tokens >= end) & (tokens < num_tokens))
    at = tokens * num_heads + head
    out = tl.where(exists[:, None], finish(norm, acc), 0.0).to(out_ptr.dtype.element_ty)
    tl.store(out_ptr + at[:, None] * D + tl.arange(0, D)[None, :], out, mask=written[:, None])
    if lse_ptr is not None:
        lse = (m + tl.log2(norm)) * _LN2
        tl.store(lse_ptr + at, tl.where(exists, lse, 0.0), mask=written)


@triton.jit
def find_tile(cu_seqlens, tile, num_seqs, BLOCK: tl.constexpr):
    """Which sequence a tile of a flat grid belongs to, and which of its tiles it is.

    Sequence i owns the tiles from cu_seqlens[i] // BLOCK + i on, enough for any alignment.
    """
    low = 0
    high = num_seqs
    while high - low > 1:
        middle = (low + high) // 2
        if tl.load(cu_seqlens + middle) // BLOCK + middle <= tile:
            low = middle
        else:
            high = middle
    return low, tile - (tl.load(cu_seqlens + low) // BLOCK + low)


@triton.jit
def _tiles(
    q_ptr, k_ptr, v_ptr, out_ptr, lse_ptr, cu_seqlens, seq_lens, block_table,
    scale_log2, num_tokens, num_tiles, num_seqs, num_heads,
    stride_qt, stride_qh, stride_page, stride_row, stride_kh, stride_table,
    GROUP: tl.constexpr, PAGE: tl.constexpr, PAGED: tl.constexpr, SEGMENT: tl.constexpr,
    BLOCK_M: tl.constexpr, N: tl.constexpr, D: tl.constexpr,
):  # fmt: skip
    # Heads vary fastest and long tiles come first: they share K and V in the cache, and the last
    # tiles to run are short.
    pid = tl.program_id(0)
    head = pid % num_heads
    seq, tile = find_tile(cu_seqlens, num_tiles - 1 - pid // num_heads, num_seqs, BLOCK_M)
    first_row = tl.load(cu_seqlens + seq)
    num_rows = tl.load(cu_seqlens + seq + 1) - first_row
    if PAGED:
        if num_rows == 1:  # the decode kernel's
            return
        length = tl.load(seq_lens + seq)
        block_table += seq.to(tl.int64) * stride_table
    else:
        length = num_rows
        k_ptr += first_row.to(tl.int64) * stride_row
        v_ptr += first_row.to(tl.int64) * stride_row
    k_ptr += (head // GROUP) * stride_kh
    v_ptr += (head // GROUP) * stride_kh

    rows = tile * BLOCK_M + tl.arange(0, BLOCK_M)
    q_at = (first_row + rows).to(tl.int64)[:, None] * stride_qt + tl.arange(0, D)[None, :]
    q = tl.load(q_ptr + head * stride_qh + q_at, mask=(rows < num_rows)[:, None], other=0.0)
    first_position = length - num_rows + tile * BLOCK_M
    positions = length - num_rows + rows
    num_full = (first_position + 1) // N  # blocks that all rows see whole
    num_blocks = tl.cdiv(tl.minimum(first_position + BLOCK_M, length), N)
    num_blocks = tl.where(tile * BLOCK_M < num_rows, num_blocks, 0)
    BLOCKS: tl.constexpr = SEGMENT // N

    m_all, _, acc_all = empty_state(BLOCK_M, D)
    norm_all = tl.zeros([BLOCK_M], tl.float32)
    for segment in range(0, tl.cdiv(num_blocks, BLOCKS)):
        first = segment * BLOCKS
        last = tl.minimum(first + BLOCKS, num_blocks)
        turn = tl.maximum(first, tl.minimum(last, num_full))
        m, norm, acc = empty_state(BLOCK_M, D)
        for block in range(first, turn):
            k, v = load_block(
                k_ptr, v_ptr, block_table, block, length, stride_page, stride_row,
                PAGE, PAGED, N, D, True,
            )  # fmt: skip
            m, norm, acc = attend(q, k, v, m, norm, acc, scale_log2, block * N, positions, False)
        for block in range(turn, last):
            k, v = load_block(
                k_ptr, v_ptr, block_table, block, length, stride_page, stride_row,
                PAGE, PAGED, N, D, False,
            )  # fmt: skip
            m, norm, acc = attend(q, k, v, m, norm, acc, scale_log2, block * N, positions, True)
        m_all, norm_all, acc_all = merge(m_all, norm_all, acc_all, m, tl.max(norm, 1), acc)
    store_rows(
        out_ptr, lse_ptr, m_all, norm_all, acc_all, rows, num_rows, first_row,
        tl.load(cu_seqlens + num_seqs), num_tokens, head, num_heads, D,
    )  # fmt: skip


@triton.jit
def _list_tiles(cu_seqlens, tiles_ptr, num_seqs, BLOCK: tl.constexpr):
    """tiles [num_tiles, 2]: what `find_tile` says of each."""
    pid = tl.program_id(0)
    seq, tile = find_tile(cu_seqlens, pid, num_seqs, BLOCK)
    tl.store(tiles_ptr + 2 * pid, seq)
    tl.store(tiles_ptr + 2 * pid + 1, tile)


@triton.jit
def _mapped_tiles(
    q_desc, k_desc, v_desc, out_ptr, lse_ptr, cu_seqlens, tiles_ptr,
    scale_log2, num_tokens, num_tiles, num_seqs, num_heads,
    GROUP: tl.constexpr, SEGMENT: tl.constexpr, SPECIALIZED: tl.constexpr,
    BLOCK_M: tl.constexpr, N: tl.constexpr, D: tl.constexpr,
):  # fmt: skip
    """`_tiles` for packed sequences on Hopper, through tensor maps.

    SPECIALIZED: one warp loads, and two groups of warps have half of the rows each, so that the
    softmax of one runs beside the products of the other. The compiler does that to one loop with
    one body alone: every block is masked, and tiles are found beforehand.
    Keys past a sequence's end are those of its neighbour, with probability 0.
    """
    pid = tl.program_id(0)
    head = pid % num_heads
    at = tiles_ptr + 2 * (num_tiles - 1 - pid // num_heads)
    seq, tile = tl.load(at), tl.load(at + 1)
    first_row = tl.load(cu_seqlens + seq)
    num_rows = tl.load(cu_seqlens + seq + 1) - first_row
    column = (head // GROUP) * D
    q = q_desc.load([first_row + tile * BLOCK_M, head * D])
    rows = tile * BLOCK_M + tl.arange(0, BLOCK_M)
    num_blocks = tl.cdiv(tl.minimum((tile + 1) * BLOCK_M, num_rows), N)
    num_blocks = tl.where(tile * BLOCK_M < num_rows, num_blocks, 0)
    BLOCKS: tl.constexpr = SEGMENT // N

    m_all, _, acc_all = empty_state(BLOCK_M, D)
    norm_all = tl.zeros([BLOCK_M], tl.float32)
    for segment in range(0, tl.cdiv(num_blocks, BLOCKS)):
        first = segment * BLOCKS
        last = tl.minimum(first + BLOCKS, num_blocks)
        m, norm, acc = empty_state(BLOCK_M, D)
        # All rows see the blocks before `turn` whole.
        turn = tl.maximum(first, tl.minimum(last, (tile * BLOCK_M + 1) // N))
        if SPECIALIZED:
            turn = first
        else:
            for block in range(first, turn):
                k = k_desc.load([first_row + block * N, column])
                v = v_desc.load([first_row + block * N, column])
                m, norm, acc = attend(q, k, v, m, norm, acc, scale_log2, block * N, rows, False)
        for block in tl.range(turn, last, warp_specialize=SPECIALIZED):
            k = k_desc.load([first_row + block * N, column])
            v = v_desc.load([first_row + block * N, column])
            m, norm, acc = attend(q, k, v, m, norm, acc, scale_log2, block * N, rows, True)
        m_all, norm_all, acc_all = merge(m_all, norm_all, acc_all, m, tl.max(norm, 1), acc)
    store_rows(
        out_ptr, lse_ptr, m_all, norm_all, acc_all, rows, num_rows, first_row,
        tl.load(cu_seqlens + num_seqs), num_tokens, head, num_heads, D,
    )  # fmt: skip


def check(q: Tensor, k: Tensor, scale: float) -> None:
    """Refuse what the kernels do not have."""
    if q.dtype not in (torch.bfloat16, torch.float32) or k.dtype != q.dtype:
        raise TypeError(
            f"attention takes bfloat16 or float32 in q, k and v alike, not {q.dtype} and {k.dtype}"
        )
    if q.shape[-1] not in HEAD_DIMS:
        raise ValueError(f"attention has no kernel for head_dim {q.shape[-1]}: only {HEAD_DIMS}")
    if not scale > 0:
        raise ValueError(f"the scale of attention scores must be positive, not {scale}")


def unit_rows(x: Tensor) -> Tensor:
    """The kernels step through the last dimension by one."""
    return x if x.stride(-1) == 1 else x.contiguous()


def use_tma(x: Tensor) -> bool:
    """Whether tiles of x [T, heads, D] can come through a tensor map: a matter of speed alone."""
    return (
        x.dtype == torch.bfloat16
        and x.is_cuda
        and torch.cuda.get_device_capability(x.device) >= (9, 0)
        and x.stride(1) == x.shape[2]
        and x.stride(0) * x.element_size() % 16 == 0
        and x.data_ptr() % 16 == 0
    )


def tensor_map(x: Tensor, rows: int) -> Any:
    """Tiles [rows, D] of x [T, heads, D], read as [T, heads * D]."""
    num_tokens, num_heads, head_dim = x.shape
    return TensorDescriptor(
        x, [num_tokens, num_heads * head_dim], [x.stride(0), 1], [rows, head_dim]
    )


def attention(
    q: Tensor, k: Tensor, v: Tensor, cu_seqlens: Tensor, scale: float, config: dict | None = None
) -> tuple[Tensor, Tensor]:
    """See `isomodels.kernels.attention.attention`; `config` overrides the tuning."""
    check(q, k, scale)
    q, k, v = unit_rows(q), unit_rows(k), unit_rows(v)
    num_tokens, num_heads, head_dim = q.shape
    out = torch.empty(q.shape, dtype=q.dtype, device=q.device)
    lse = torch.empty(q.shape[:2], dtype=torch.float32, device=q.device)
    num_seqs = len(cu_seqlens) - 1
    if not num_tokens or num_seqs <= 0:
        return out.zero_(), lse.zero_()
    group, block = num_heads // k.shape[1], kv_block(head_dim)
    mapped = config is None and all(map(use_tma, (q, k, v)))
    if mapped or (config and "SPECIALIZED" in config):
        config = config or mapped_config(head_dim)
        num_tiles = num_tokens // config["BLOCK_M"] + num_seqs
        tiles = torch.empty(num_tiles, 2, dtype=torch.int32, device=q.device)
        _list_tiles[(num_tiles,)](cu_seqlens, tiles, num_seqs, config["BLOCK_M"], num_warps=1)
        _mapped_tiles[(num_tiles * num_heads,)](
            tensor_map(q, config["BLOCK_M"]), tensor_map(k, block), tensor_map(v, block), out, lse,
            cu_seqlens, tiles, scale * LOG2E, num_tokens, num_tiles, num_seqs, num_heads,
            GROUP=group, SEGMENT=SEGMENT, N=block, D=head_dim, **config,
        )  # fmt: skip
        return out, lse
    if k.stride() != v.stride():
        k, v = k.contiguous(), v.contiguous()
    config = config or tile_config(head_dim, q.dtype, num_tokens)
    num_tiles = num_tokens // config["BLOCK_M"] + num_seqs
    _tiles[(num_tiles * num_heads,)](
        q, k, v, out, lse, cu_seqlens, None, None, scale * LOG2E, num_tokens, num_tiles, num_seqs,
        num_heads, q.stride(0), q.stride(1), 0, k.stride(0), k.stride(1), 0,
        GROUP=group, PAGE=1, PAGED=False, SEGMENT=SEGMENT, N=block, D=head_dim, **config,
    )  # fmt: skip
    return out, lse


def paged_prefill(
    q: Tensor, kv_cache: Tensor, block_table: Tensor, cu_seqlens_q: Tensor, seq_lens: Tensor,
    scale: float, max_seqlen_q: int, out: Tensor, config: dict | None = None,
) -> None:  # fmt: skip
    """Fill the rows of `out` whose sequences have two or more new tokens."""
    num_tokens, num_heads, head_dim = q.shape
    num_seqs = len(seq_lens)
    config = config or tile_config(head_dim, q.dtype, max_seqlen_q)
    num_tiles = num_tokens // config["BLOCK_M"] + num_seqs
    k, v = kv_cache[..., :head_dim], kv_cache[..., head_dim:]
    _tiles[(num_tiles * num_heads,)](
        q, k, v, out, None, cu_seqlens_q, seq_lens, block_table, scale * LOG2E, num_tokens,
        num_tiles, num_seqs, num_heads, q.stride(0), q.stride(1), k.stride(0), k.stride(2),
        k.stride(1), block_table.stride(0),
        GROUP=num_heads // k.shape[1], PAGE=k.shape[2], PAGED=True, SEGMENT=SEGMENT,
        N=kv_block(head_dim), D=head_dim, **config,
    )  # fmt: skip
