"""Triton backend of attention: the arithmetic of one KV block, shared by every kernel, and the
kernel that walks whole rows of tiles (packed training sequences, prefill over pages).

A row's keys are cut into segments of `SEGMENT` and each segment into blocks of `kv_block`, both
counted from position 0. Within a segment: online softmax in fp32, the probabilities rounded to the
input dtype, their sum and their product with V both taken by the tensor core in block order.
Segments are merged in ascending order. Query tile, warps and stages are tuning.

On Hopper `attention_hopper_triton` walks the same schedule faster, for what it takes.

Mathematics: Dao et al., FlashAttention (2022); merging of partial softmaxes, Rabe and Staats
(2021).
"""

# mypy: disable-error-code="no-untyped-def"

from functools import cache
from types import ModuleType
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
    return 64


def tile_config(head_dim: int, dtype: torch.dtype, rows: int, mapped: bool) -> dict[str, int]:
    """Tuning of the tile kernel.

    `rows` bounds the new tokens of a sequence; `mapped`: K and V come through tensor maps.
    """
    if dtype == torch.float32:
        return {"BLOCK_M": 32, "num_warps": 8, "num_stages": 1}
    if head_dim > 128:
        return {"BLOCK_M": 128, "num_warps": 8, "num_stages": 2}
    if not mapped or rows <= 64:
        return {"BLOCK_M": 64, "num_warps": 4, "num_stages": 2}
    return {"BLOCK_M": 128, "num_warps": 8, "num_stages": 3}


@triton.jit
def attend_block(q, k, v, m, norm, acc, scale_log2, keys, positions, MASKED: tl.constexpr):
    """One KV block of the online softmax.

    q [M, D], k and v [N, D], keys [N], positions [M]; the state is the maximum m [M] (in powers
    of two), the sum norm [M, 16] (equal columns) and acc [M, D], all fp32.
    """
    s = tl.dot(q, tl.trans(k), input_precision="ieee")
    if MASKED:
        s = tl.where(keys[None, :] <= positions[:, None], s, float("-inf"))
    m_new = tl.maximum(m, tl.max(s, 1) * scale_log2)
    base = m_new
    if MASKED:  # a row that has seen no key yet: no inf - inf
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
def walk_blocks(
    q, m, norm, acc, positions,
    k_ptr, v_ptr, k_desc, v_desc, first_row, column, block_table, length, first, last, scale_log2,
    stride_page, stride_row, PAGE: tl.constexpr, PAGED: tl.constexpr, TMA: tl.constexpr,
    N: tl.constexpr, D: tl.constexpr, MASKED: tl.constexpr,
):  # fmt: skip
    """Blocks [first, last) of one segment. Without MASKED, all rows must see them whole (only
    these may come through tensor maps: past a sequence's end lies another one)."""
    dim = tl.arange(0, D)
    for block in range(first, last):
        keys = block * N + tl.arange(0, N)
        if TMA and not MASKED:
            k = k_desc.load([first_row + block * N, column])
            v = v_desc.load([first_row + block * N, column])
        else:
            if PAGED:
                if MASKED:
                    page = tl.load(block_table + keys // PAGE, mask=keys < length, other=0)
                else:
                    page = tl.load(block_table + keys // PAGE)
                rows = page.to(tl.int64) * stride_page + (keys % PAGE) * stride_row
            else:
                rows = keys.to(tl.int64) * stride_row
            at = rows[:, None] + dim[None, :]
            if MASKED:
                # A page's unused slots can hold NaN, and 0 * NaN is NaN.
                k = tl.load(k_ptr + at, mask=(keys < length)[:, None], other=0.0)
                v = tl.load(v_ptr + at, mask=(keys < length)[:, None], other=0.0)
            else:
                k = tl.load(k_ptr + at)
                v = tl.load(v_ptr + at)
        m, norm, acc = attend_block(q, k, v, m, norm, acc, scale_log2, keys, positions, MASKED)
    return m, norm, acc


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


# Counts that differ from step to step of an engine: a value of 1 or a multiple of 16 would each be
# compiled anew, while requests wait.
@triton.jit(do_not_specialize=["num_tiles", "num_seqs"])
def _tiles(
    q_ptr, k_ptr, v_ptr, k_desc, v_desc, out_ptr, lse_ptr, cu_seqlens, seq_lens, block_table,
    scale_log2, num_tiles, num_seqs, num_heads,
    stride_qt, stride_qh, stride_page, stride_row, stride_kh, stride_table,
    GROUP: tl.constexpr, PAGE: tl.constexpr, PAGED: tl.constexpr, TMA: tl.constexpr,
    SEGMENT: tl.constexpr, BLOCK_M: tl.constexpr, N: tl.constexpr, D: tl.constexpr,
):  # fmt: skip
    # Heads vary fastest and long tiles come first: they share K and V in the cache, and the last
    # tiles to run are short.
    pid = tl.program_id(0)
    head = pid % num_heads
    seq, tile = find_tile(cu_seqlens, num_tiles - 1 - pid // num_heads, num_seqs, BLOCK_M)
    first_row = tl.load(cu_seqlens + seq)
    num_rows = tl.load(cu_seqlens + seq + 1) - first_row
    if tile * BLOCK_M >= num_rows:
        return
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
    dim = tl.arange(0, D)
    valid = rows < num_rows
    tokens = (first_row + rows).to(tl.int64)
    q_at = tokens[:, None] * stride_qt + head * stride_qh + dim[None, :]
    q = tl.load(q_ptr + q_at, mask=valid[:, None], other=0.0)

    first_position = length - num_rows + tile * BLOCK_M
    positions = length - num_rows + rows
    num_full = (first_position + 1) // N  # blocks that all rows see whole
    num_blocks = tl.cdiv(tl.minimum(first_position + BLOCK_M, length), N)
    BLOCKS: tl.constexpr = SEGMENT // N
    column = (head // GROUP) * D

    m_all, _, acc_all = empty_state(BLOCK_M, D)
    norm_all = tl.zeros([BLOCK_M], tl.float32)
    for segment in range(0, tl.cdiv(num_blocks, BLOCKS)):
        first = segment * BLOCKS
        last = tl.minimum(first + BLOCKS, num_blocks)
        turn = tl.maximum(first, tl.minimum(last, num_full))
        m, norm, acc = empty_state(BLOCK_M, D)
        m, norm, acc = walk_blocks(
            q, m, norm, acc, positions, k_ptr, v_ptr, k_desc, v_desc, first_row, column,
            block_table, length, first, turn, scale_log2, stride_page, stride_row,
            PAGE, PAGED, TMA, N, D, False,
        )  # fmt: skip
        m, norm, acc = walk_blocks(
            q, m, norm, acc, positions, k_ptr, v_ptr, k_desc, v_desc, first_row, column,
            block_table, length, turn, last, scale_log2, stride_page, stride_row,
            PAGE, PAGED, TMA, N, D, True,
        )  # fmt: skip
        m_all, norm_all, acc_all = merge(m_all, norm_all, acc_all, m, tl.max(norm, 1), acc)

    out_at = (tokens[:, None] * num_heads + head) * D + dim[None, :]
    out = finish(norm_all, acc_all).to(out_ptr.dtype.element_ty)
    tl.store(out_ptr + out_at, out, mask=valid[:, None])
    if lse_ptr is not None:
        lse = (m_all + tl.log2(norm_all)) * _LN2
        tl.store(lse_ptr + tokens * num_heads + head, lse, mask=valid)


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
        x.stride(1) == x.shape[2]
        and x.stride(0) * x.element_size() % 16 == 0
        and x.data_ptr() % 16 == 0
        and (not x.is_cuda or torch.cuda.get_device_capability(x.device) >= (9, 0))
    )


def tensor_map(x: Tensor, rows: int) -> Any:
    """Tiles [rows, D] of x [T, heads, D], read as [T, heads * D]."""
    num_tokens, num_heads, head_dim = x.shape
    return TensorDescriptor(
        x, [num_tokens, num_heads * head_dim], [x.stride(0), 1], [rows, head_dim]
    )


@cache
def _hopper(device: torch.device) -> ModuleType | None:
    """The form for Hopper: Gluon is experimental, so only for Triton 3.6, where it was checked."""
    if device.type != "cuda" or torch.cuda.get_device_capability(device) != (9, 0):
        return None
    if not triton.__version__.startswith("3.6."):
        return None
    from isomodels.kernels import attention_hopper_triton

    return attention_hopper_triton


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
        return out, lse
    hopper = None if config else _hopper(q.device)
    if hopper and hopper.fits_packed(q, k, v):
        hopper.packed(q, k, v, cu_seqlens, scale, out, lse)
        return out, lse
    if k.stride() != v.stride():
        k, v = k.contiguous(), v.contiguous()
    config = dict(config or {})
    tma = config.pop("TMA", q.dtype == torch.bfloat16) and use_tma(k) and use_tma(v)
    config = config or tile_config(head_dim, q.dtype, num_tokens, tma)
    block = kv_block(head_dim)
    num_tiles = num_tokens // config["BLOCK_M"] + num_seqs
    _tiles[(num_tiles * num_heads,)](
        q, k, v, tensor_map(k, block) if tma else None, tensor_map(v, block) if tma else None,
        out, lse, cu_seqlens, None, None, scale * LOG2E, num_tiles, num_seqs, num_heads,
        q.stride(0), q.stride(1), 0, k.stride(0), k.stride(1), 0,
        GROUP=num_heads // k.shape[1], PAGE=1, PAGED=False, TMA=tma,
        SEGMENT=SEGMENT, N=block, D=head_dim, **config,
    )  # fmt: skip
    return out, lse


def paged_prefill(
    q: Tensor, kv_cache: Tensor, block_table: Tensor, cu_seqlens_q: Tensor, seq_lens: Tensor,
    scale: float, max_seqlen_q: int, out: Tensor, config: dict | None = None,
) -> None:  # fmt: skip
    """Fill the rows of `out` whose sequences have two or more new tokens."""
    num_tokens, num_heads, head_dim = q.shape
    num_seqs = len(seq_lens)
    hopper = None if config or max_seqlen_q <= 64 else _hopper(q.device)
    if hopper and hopper.fits_paged(q, kv_cache):
        hopper.paged(q, kv_cache, block_table, cu_seqlens_q, seq_lens, scale, out)
        return
    config = config or tile_config(head_dim, q.dtype, max_seqlen_q, False)
    num_tiles = num_tokens // config["BLOCK_M"] + num_seqs
    k, v = kv_cache[..., :head_dim], kv_cache[..., head_dim:]
    _tiles[(num_tiles * num_heads,)](
        q, k, v, None, None,
        out, None, cu_seqlens_q, seq_lens, block_table, scale * LOG2E, num_tiles, num_seqs,
        num_heads, q.stride(0), q.stride(1), k.stride(0), k.stride(2), k.stride(1),
        block_table.stride(0),
        GROUP=num_heads // k.shape[1], PAGE=k.shape[2], PAGED=True, TMA=False,
        SEGMENT=SEGMENT, N=kv_block(head_dim), D=head_dim, **config,
    )  # fmt: skip
