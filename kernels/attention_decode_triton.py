"""Triton backend of paged attention and of the copy into pages.

A sequence with one new token runs its KV segments in parallel, several to a program if there are
many, with the query heads of one kv head packed into the rows of a tile; their states are merged in
ascending order. Longer runs of new tokens go to the tile kernel of `attention_triton`.
"""

# mypy: disable-error-code="no-untyped-def"

import torch
import triton
import triton.language as tl
from torch import Tensor

from isomodels.kernels.attention_triton import (
    LOG2E,
    SEGMENT,
    check,
    empty_state,
    finish,
    kv_block,
    merge,
    paged_prefill,
    unit_rows,
    walk_blocks,
)

_PROGRAMS = 1024  # tuning: about how many programs keep the device busy


def decode_config(head_dim: int, dtype: torch.dtype) -> dict[str, int]:
    """Tuning of the decode kernel."""
    if dtype == torch.float32:
        return {"BLOCK_M": 16, "num_warps": 4, "num_stages": 1}
    return {"BLOCK_M": 16, "num_warps": 4, "num_stages": 2}


@triton.jit(do_not_specialize=["num_tokens", "num_seqs", "num_splits", "max_segments"])
def _decode(
    q_ptr, k_ptr, v_ptr, out_ptr, part_m, part_norm, part_acc, cu_seqlens, seq_lens, block_table,
    scale_log2, num_tokens, num_seqs, num_heads, num_splits, max_segments,
    stride_qt, stride_qh, stride_page, stride_row, stride_kh, stride_table,
    GROUP: tl.constexpr, PAGE: tl.constexpr, SEGMENT: tl.constexpr,
    BLOCK_M: tl.constexpr, N: tl.constexpr, D: tl.constexpr,
):  # fmt: skip
    seq = tl.program_id(0) // num_splits
    split = tl.program_id(0) % num_splits
    kv_head = tl.program_id(1)
    token = tl.load(cu_seqlens + seq).to(tl.int64)
    num_new = tl.load(cu_seqlens + seq + 1) - token
    group_row = tl.arange(0, BLOCK_M)
    heads = kv_head * GROUP + group_row
    dim = tl.arange(0, D)
    valid = (group_row < GROUP)[:, None]
    # A padded batch: rows past the last sequence are zero.
    first_row = tl.where(split == 0, tl.load(cu_seqlens + num_seqs) + seq, num_tokens)
    for row in range(first_row, num_tokens, num_seqs):
        rows = (row + tl.zeros_like(heads)).to(tl.int64)
        out_at = (rows * num_heads + heads)[:, None] * D + dim[None, :]
        zeros = tl.zeros([BLOCK_M, D], tl.float32).to(out_ptr.dtype.element_ty)
        tl.store(out_ptr + out_at, zeros, mask=valid)
    if num_new != 1:
        return

    length = tl.load(seq_lens + seq)
    num_blocks = tl.cdiv(length, N)
    BLOCKS: tl.constexpr = SEGMENT // N
    num_segments = tl.cdiv(num_blocks, BLOCKS)
    q_at = token * stride_qt + heads[:, None] * stride_qh + dim[None, :]
    q = tl.load(q_ptr + q_at, mask=valid, other=0.0)
    positions = tl.zeros([BLOCK_M], tl.int32) + (length - 1)
    k_ptr += kv_head * stride_kh
    v_ptr += kv_head * stride_kh
    block_table += seq.to(tl.int64) * stride_table
    for segment in range(split, num_segments, num_splits):
        first = segment * BLOCKS
        last = tl.minimum(first + BLOCKS, num_blocks)
        turn = tl.minimum(last, length // N)
        m, norm, acc = empty_state(BLOCK_M, D)
        m, norm, acc = walk_blocks(
            q, m, norm, acc, positions, k_ptr, v_ptr, None, None, 0, 0, block_table, length,
            first, turn, scale_log2, stride_page, stride_row, PAGE, True, False, N, D, False,
        )  # fmt: skip
        m, norm, acc = walk_blocks(
            q, m, norm, acc, positions, k_ptr, v_ptr, None, None, 0, 0, block_table, length,
            turn, last, scale_log2, stride_page, stride_row, PAGE, True, False, N, D, True,
        )  # fmt: skip
        norm_row = tl.max(norm, 1)
        if num_segments == 1:
            # Merging one segment into the empty state would change nothing.
            out = finish(norm_row, acc).to(out_ptr.dtype.element_ty)
            out_at = (token * num_heads + heads)[:, None] * D + dim[None, :]
            tl.store(out_ptr + out_at, out, mask=valid)
        else:
            at = (seq.to(tl.int64) * max_segments + segment) * num_heads + heads
            tl.store(part_m + at, m, mask=group_row < GROUP)
            tl.store(part_norm + at, norm_row, mask=group_row < GROUP)
            tl.store(part_acc + at[:, None] * D + dim[None, :], acc, mask=valid)


@triton.jit(do_not_specialize=["max_segments"])
def _merge_segments(
    part_m, part_norm, part_acc, out_ptr, cu_seqlens, seq_lens, num_heads, max_segments,
    SEGMENT: tl.constexpr, D: tl.constexpr,
):  # fmt: skip
    seq = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1)
    token = tl.load(cu_seqlens + seq).to(tl.int64)
    num_segments = tl.cdiv(tl.load(seq_lens + seq), SEGMENT)
    if (tl.load(cu_seqlens + seq + 1) - token != 1) | (num_segments <= 1):
        return
    row = tl.arange(0, 1)
    dim = tl.arange(0, D)
    m, _, acc = empty_state(1, D)
    norm = tl.zeros([1], tl.float32)
    for segment in range(0, num_segments):
        at = (seq * max_segments + segment) * num_heads + head + row
        m_next, norm_next = tl.load(part_m + at), tl.load(part_norm + at)
        acc_next = tl.load(part_acc + at[:, None] * D + dim[None, :])
        m, norm, acc = merge(m, norm, acc, m_next, norm_next, acc_next)
    out_at = (token * num_heads + head + row)[:, None] * D + dim[None, :]
    tl.store(out_ptr + out_at, finish(norm, acc).to(out_ptr.dtype.element_ty))


def paged_attention(
    q: Tensor, kv_cache: Tensor, block_table: Tensor, cu_seqlens_q: Tensor, seq_lens: Tensor,
    scale: float, max_seqlen_q: int, max_seqlen_k: int,
    tiles: dict | None = None, decode: dict | None = None,
) -> Tensor:  # fmt: skip
    """See `isomodels.kernels.attention.paged_attention`; `tiles` and `decode` override tuning."""
    check(q, kv_cache, scale)
    if kv_cache.shape[2] % 16 or kv_cache.stride(-1) != 1:
        raise ValueError(
            "paged attention needs pages of a multiple of 16 slots, each slot contiguous; "
            f"shape {tuple(kv_cache.shape)}, strides {kv_cache.stride()}"
        )
    q = unit_rows(q)
    num_tokens, num_seqs = len(q), len(seq_lens)
    # The kernels write every row, those of padding too.
    out = (torch.empty if num_seqs else torch.zeros)(q.shape, dtype=q.dtype, device=q.device)
    if not num_tokens or not num_seqs:
        return out
    if max_seqlen_q > 1:
        paged_prefill(
            q, kv_cache, block_table, cu_seqlens_q, seq_lens, scale, max_seqlen_q, out, tiles
        )
    _paged_decode(
        q, kv_cache, block_table, cu_seqlens_q, seq_lens, scale, max_seqlen_k, out, decode
    )
    return out


def _paged_decode(
    q: Tensor, kv_cache: Tensor, block_table: Tensor, cu_seqlens_q: Tensor, seq_lens: Tensor,
    scale: float, max_seqlen_k: int, out: Tensor, config: dict | None,
) -> None:  # fmt: skip
    """Fill the rows of `out` whose sequences have one new token, and padding rows with zeros."""
    num_tokens, num_heads, head_dim = q.shape
    num_seqs, num_kv_heads = len(seq_lens), kv_cache.shape[1]
    group = num_heads // num_kv_heads
    config = dict(config or decode_config(head_dim, q.dtype))
    config["BLOCK_M"] = max(config["BLOCK_M"], triton.next_power_of_2(group))
    max_segments = max(1, triton.cdiv(max_seqlen_k, SEGMENT))
    wanted = triton.cdiv(config.pop("PROGRAMS", _PROGRAMS), num_seqs * num_kv_heads)
    num_splits = min(max_segments, wanted)
    parts = (num_seqs, max_segments, num_heads) if max_segments > 1 else (0,)
    part_m = torch.empty(parts, dtype=torch.float32, device=q.device)
    part_norm = torch.empty_like(part_m)
    part_acc = torch.empty(*parts, head_dim, dtype=torch.float32, device=q.device)
    k, v = kv_cache[..., :head_dim], kv_cache[..., head_dim:]
    _decode[(num_seqs * num_splits, num_kv_heads)](
        q, k, v, out, part_m, part_norm, part_acc, cu_seqlens_q, seq_lens, block_table,
        scale * LOG2E, num_tokens, num_seqs, num_heads, num_splits, max_segments,
        q.stride(0), q.stride(1), k.stride(0), k.stride(2), k.stride(1), block_table.stride(0),
        GROUP=group, PAGE=k.shape[2], SEGMENT=SEGMENT, N=kv_block(head_dim), D=head_dim, **config,
    )  # fmt: skip
    if max_segments > 1:
        _merge_segments[(num_seqs, num_heads)](
            part_m, part_norm, part_acc, out, cu_seqlens_q, seq_lens, num_heads, max_segments,
            SEGMENT=SEGMENT, D=head_dim, num_warps=1,
        )  # fmt: skip


@triton.jit
def _copy_rows(
    k_ptr, v_ptr, cache_ptr, slots, stride_kt, stride_kh, stride_vt, stride_vh,
    stride_page, stride_head, stride_slot, num_kv_heads,
    PAGE: tl.constexpr, HEADS: tl.constexpr, D: tl.constexpr,
):  # fmt: skip
    token = tl.program_id(0).to(tl.int64)
    slot = tl.load(slots + token)
    if slot < 0:  # a padding token
        return
    heads = tl.arange(0, HEADS)[:, None]
    dim = tl.arange(0, D)[None, :]
    valid = heads < num_kv_heads
    k = tl.load(k_ptr + token * stride_kt + heads * stride_kh + dim, mask=valid)
    v = tl.load(v_ptr + token * stride_vt + heads * stride_vh + dim, mask=valid)
    page = cache_ptr + (slot // PAGE) * stride_page + (slot % PAGE) * stride_slot
    tl.store(page + heads * stride_head + dim, k, mask=valid)
    tl.store(page + heads * stride_head + D + dim, v, mask=valid)


def write_kv_cache(k: Tensor, v: Tensor, kv_cache: Tensor, slot_mapping: Tensor) -> None:
    """See `isomodels.kernels.attention.write_kv_cache`."""
    num_tokens, num_kv_heads, head_dim = k.shape
    if kv_cache.dtype != k.dtype:
        raise TypeError(f"the KV cache holds {kv_cache.dtype}, the model computes {k.dtype}")
    if not num_tokens:
        return
    k, v = unit_rows(k), unit_rows(v)
    _copy_rows[(num_tokens,)](
        k, v, kv_cache, slot_mapping, k.stride(0), k.stride(1), v.stride(0), v.stride(1),
        kv_cache.stride(0), kv_cache.stride(1), kv_cache.stride(2), num_kv_heads,
        PAGE=kv_cache.shape[2], HEADS=triton.next_power_of_2(num_kv_heads), D=head_dim,
    )  # fmt: skip
