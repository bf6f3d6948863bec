"""Triton backend of paged latent attention and of the copy into pages of latents.

A sequence with one new token runs its segments of keys in parallel, several to a program if there
are many; the heads that share the latents are the rows of a tile. Their states are merged in
ascending order. Longer runs of new tokens go to the tile kernel of `mla_triton`.
"""

# mypy: disable-error-code="no-untyped-def"

import torch
import triton
import triton.language as tl
from torch import Tensor

from isomodels.kernels.attention_triton import LOG2E, SEGMENT, finish, merge, unit_rows
from isomodels.kernels.mla_block_triton import (
    BLOCK,
    check,
    empty_latents,
    key_maps,
    load_queries,
    padded,
    page_rows,
    walk_latents,
)
from isomodels.kernels.mla_triton import paged_prefill

_PROGRAMS = 1024  # tuning: about how many programs keep the device busy
_PART_BYTES = 2**30  # tuning: memory for the states of segments


def decode_config(dtype: torch.dtype, rank: int, num_heads: int, mapped: bool) -> dict[str, int]:
    """Tuning of the decode kernel; see `mla_triton.tile_config`."""
    if dtype == torch.float32:
        return {"BLOCK_M": 16 if rank > 128 else 64, "num_warps": 8, "num_stages": 1}
    rows = min(64, padded(num_heads))
    warps = 8 if rank > 256 and rows == 64 else 4
    return {"BLOCK_M": rows, "num_warps": warps, "num_stages": 2 if mapped else 3}


@triton.jit(do_not_specialize=["num_tokens", "num_seqs", "num_splits", "max_segments"])
def _decode(
    q_ptr, q_rope_ptr, latent_ptr, k_rope_ptr, latent_desc, k_rope_desc, out_ptr,
    part_m, part_norm, part_acc, cu_seqlens, seq_lens, block_table,
    scale_log2, num_tokens, num_seqs, num_heads, num_splits, max_segments,
    stride_qt, stride_qh, stride_page, stride_row, stride_table,
    PAGE: tl.constexpr, TMA: tl.constexpr, SEGMENT: tl.constexpr, BLOCK_M: tl.constexpr,
    N: tl.constexpr, R: tl.constexpr, P: tl.constexpr, WIDTH: tl.constexpr, ROPE: tl.constexpr,
):  # fmt: skip
    # The tiles of a token are neighbours in time: they share its latents in the cache.
    tiles = tl.cdiv(num_heads, BLOCK_M)
    tile = tl.program_id(0) % tiles
    seq = tl.program_id(0) // tiles // num_splits
    split = tl.program_id(0) // tiles % num_splits
    token = tl.load(cu_seqlens + seq).to(tl.int64)
    num_new = tl.load(cu_seqlens + seq + 1) - token
    heads = tile * BLOCK_M + tl.arange(0, BLOCK_M)
    dim = tl.arange(0, WIDTH)
    valid = heads < num_heads
    stored = valid[:, None] & (dim < R)[None, :]
    # A padded batch: rows past the last sequence are zero.
    first_row = tl.where(split == 0, tl.load(cu_seqlens + num_seqs) + seq, num_tokens)
    for row in range(first_row, num_tokens, num_seqs):
        rows = (row + tl.zeros_like(heads)).to(tl.int64)
        out_at = (rows * num_heads + heads)[:, None] * R + dim[None, :]
        zeros = tl.zeros([BLOCK_M, WIDTH], tl.float32).to(out_ptr.dtype.element_ty)
        tl.store(out_ptr + out_at, zeros, mask=stored)
    if num_new != 1:
        return

    length = tl.load(seq_lens + seq)
    num_blocks = tl.cdiv(length, N)
    BLOCKS: tl.constexpr = SEGMENT // N
    num_segments = tl.cdiv(num_blocks, BLOCKS)
    tokens = tl.zeros([BLOCK_M], tl.int64) + token
    q, q_rope = load_queries(
        q_ptr, q_rope_ptr, tokens, heads, valid, num_heads, stride_qt, stride_qh, R, P, WIDTH, ROPE
    )
    positions = tl.zeros([BLOCK_M], tl.int32) + (length - 1)
    block_table += seq.to(tl.int64) * stride_table
    for segment in range(split, num_segments, num_splits):
        first = segment * BLOCKS
        last = tl.minimum(first + BLOCKS, num_blocks)
        turn = tl.maximum(first, tl.minimum(last, length // N))
        m, norm, acc = empty_latents(BLOCK_M, WIDTH)
        m, norm, acc = walk_latents(
            q, q_rope, m, norm, acc, positions, latent_ptr, k_rope_ptr, latent_desc, k_rope_desc, 0,
            block_table, length, first, turn, scale_log2, stride_page, stride_row, stride_row,
            PAGE, True, TMA, N, R, P, WIDTH, ROPE, False,
        )  # fmt: skip
        m, norm, acc = walk_latents(
            q, q_rope, m, norm, acc, positions, latent_ptr, k_rope_ptr, latent_desc, k_rope_desc, 0,
            block_table, length, turn, last, scale_log2, stride_page, stride_row, stride_row,
            PAGE, True, TMA, N, R, P, WIDTH, ROPE, True,
        )  # fmt: skip
        norm_row = tl.max(norm, 1)
        if num_segments == 1:
            # Merging one segment into the empty state would change nothing.
            out = finish(norm_row, acc).to(out_ptr.dtype.element_ty)
            out_at = (token * num_heads + heads)[:, None] * R + dim[None, :]
            tl.store(out_ptr + out_at, out, mask=stored)
        else:
            at = (seq.to(tl.int64) * max_segments + segment) * num_heads + heads
            tl.store(part_m + at, m, mask=valid)
            tl.store(part_norm + at, norm_row, mask=valid)
            tl.store(part_acc + at[:, None] * R + dim[None, :], acc, mask=stored)


@triton.jit(do_not_specialize=["max_segments"])
def _merge_segments(
    part_m, part_norm, part_acc, out_ptr, cu_seqlens, seq_lens, num_heads, max_segments,
    SEGMENT: tl.constexpr, R: tl.constexpr, WIDTH: tl.constexpr,
):  # fmt: skip
    seq = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1)
    token = tl.load(cu_seqlens + seq).to(tl.int64)
    num_segments = tl.cdiv(tl.load(seq_lens + seq), SEGMENT)
    if (tl.load(cu_seqlens + seq + 1) - token != 1) | (num_segments <= 1):
        return
    row = tl.arange(0, 1)
    dim = tl.arange(0, WIDTH)
    real = (dim < R)[None, :]
    m = tl.full([1], float("-inf"), tl.float32)
    norm = tl.zeros([1], tl.float32)
    acc = tl.zeros([1, WIDTH], tl.float32)
    for segment in range(0, num_segments):
        at = (seq * max_segments + segment) * num_heads + head + row
        m_next, norm_next = tl.load(part_m + at), tl.load(part_norm + at)
        acc_next = tl.load(part_acc + at[:, None] * R + dim[None, :], mask=real, other=0.0)
        m, norm, acc = merge(m, norm, acc, m_next, norm_next, acc_next)
    out_at = (token * num_heads + head + row)[:, None] * R + dim[None, :]
    tl.store(out_ptr + out_at, finish(norm, acc).to(out_ptr.dtype.element_ty), mask=real)


def paged_mla_attention(
    q: Tensor, q_rope: Tensor, latent_cache: Tensor, block_table: Tensor, cu_seqlens_q: Tensor,
    seq_lens: Tensor, scale: float, max_seqlen_q: int, max_seqlen_k: int,
    tiles: dict | None = None, decode: dict | None = None,
) -> Tensor:  # fmt: skip
    """Latents of the output [T, heads, R]; rows of no sequence are zero.

    q [T, heads, R], dense, and q_rope [T, heads, P]; the other arguments are those of
    `isomodels.kernels.mla_attention.paged_mla_attention`. `tiles` and `decode` override tuning.
    """
    check(q, q_rope, scale)
    if latent_cache.shape[2] % 16 or latent_cache.stride(-1) != 1:
        raise ValueError(
            "paged latent attention needs pages of a multiple of 16 slots, each slot contiguous; "
            f"shape {tuple(latent_cache.shape)}, strides {latent_cache.stride()}"
        )
    q_rope = unit_rows(q_rope)
    num_tokens, num_heads, rank = q.shape
    num_seqs = len(seq_lens)
    max_segments = triton.cdiv(max_seqlen_k, SEGMENT)
    # States of so many long sequences would not fit: their segments run one after the other.
    serial = max_segments > 1 and num_seqs * max_segments * num_heads * rank * 4 > _PART_BYTES
    # The decode kernel writes zeros into padding rows, which may follow the last sequence.
    zeros = serial or not num_seqs
    out = (torch.zeros_like if zeros else torch.empty_like)(q)
    if not num_tokens or not num_seqs:
        return out
    pages = (latent_cache, block_table, cu_seqlens_q, seq_lens)
    if max_seqlen_q > 1 or serial:
        paged_prefill(q, q_rope, *pages, scale, out, 1 if serial else 2, tiles)
    if not serial:
        _paged_decode(q, q_rope, *pages, scale, max_seqlen_k, out, decode)
    return out


def _paged_decode(
    q: Tensor, q_rope: Tensor, latent_cache: Tensor, block_table: Tensor, cu_seqlens_q: Tensor,
    seq_lens: Tensor, scale: float, max_seqlen_k: int, out: Tensor, config: dict | None,
) -> None:  # fmt: skip
    """Fill the rows of `out` whose sequences have one new token, and padding rows with zeros."""
    num_tokens, num_heads, rank = q.shape
    rope, num_seqs = q_rope.shape[2], len(seq_lens)
    config = dict(config or {})
    # Tiles of few rows wait less with two programs a multiprocessor than with tensor maps.
    mapped, rows = config.pop("TMA", num_heads > 32), page_rows(latent_cache)
    maps = (None, None)
    if mapped and rows is not None:
        maps = key_maps(rows[:, :rank], rows[:, rank:])
    config = {**decode_config(q.dtype, rank, num_heads, maps[0] is not None), **config}
    num_tiles = triton.cdiv(num_heads, config["BLOCK_M"])
    max_segments = max(1, triton.cdiv(max_seqlen_k, SEGMENT))
    splits = triton.cdiv(config.pop("PROGRAMS", _PROGRAMS), num_seqs * num_tiles)
    num_splits = min(max_segments, splits)
    shape = (num_seqs, max_segments, num_heads) if max_segments > 1 else (0,)
    part_m = torch.empty(shape, dtype=torch.float32, device=q.device)
    parts = (part_m, torch.empty_like(part_m), part_m.new_empty(*shape, rank))
    shapes = {"SEGMENT": SEGMENT, "R": rank, "WIDTH": padded(rank)}
    latent, k_rope = latent_cache[..., :rank], latent_cache[..., rank:]
    stride_page, _, stride_row, _ = latent_cache.stride()
    _decode[(num_seqs * num_splits * num_tiles,)](
        q, q_rope, latent, k_rope, *maps, out, *parts, cu_seqlens_q, seq_lens, block_table,
        scale * LOG2E, num_tokens, num_seqs, num_heads, num_splits, max_segments,
        q_rope.stride(0), q_rope.stride(1), stride_page, stride_row, block_table.stride(0),
        PAGE=latent_cache.shape[2], TMA=maps[0] is not None, N=BLOCK, P=rope, ROPE=padded(rope),
        **shapes, **config,
    )  # fmt: skip
    if max_segments > 1:
        _merge_segments[(num_seqs, num_heads)](
            *parts, out, cu_seqlens_q, seq_lens, num_heads, max_segments,
            **shapes, num_warps=1,
        )  # fmt: skip


@triton.jit
def _copy_rows(
    latent_ptr, k_rope_ptr, cache_ptr, slots, stride_t, stride_rope, stride_page, stride_slot,
    stride_channel, PAGE: tl.constexpr, R: tl.constexpr, P: tl.constexpr, WIDTH: tl.constexpr,
    ROPE: tl.constexpr,
):  # fmt: skip
    token = tl.program_id(0).to(tl.int64)
    slot = tl.load(slots + token)
    if slot < 0:  # a padding token
        return
    dim = tl.arange(0, WIDTH)
    rope_dim = tl.arange(0, ROPE)
    row = cache_ptr + (slot // PAGE) * stride_page + (slot % PAGE) * stride_slot
    latent = tl.load(latent_ptr + token * stride_t + dim, mask=dim < R)
    k_rope = tl.load(k_rope_ptr + token * stride_rope + rope_dim, mask=rope_dim < P)
    tl.store(row + dim * stride_channel, latent, mask=dim < R)
    tl.store(row + (R + rope_dim) * stride_channel, k_rope, mask=rope_dim < P)


def write_latent_cache(
    latent: Tensor, k_rope: Tensor, latent_cache: Tensor, slot_mapping: Tensor
) -> None:
    """See `isomodels.kernels.mla_attention.write_latent_cache`."""
    num_tokens, rank = latent.shape
    rope = k_rope.shape[1]
    if not num_tokens:
        return
    latent, k_rope = unit_rows(latent), unit_rows(k_rope)
    stride_page, _, stride_slot, stride_channel = latent_cache.stride()
    _copy_rows[(num_tokens,)](
        latent, k_rope, latent_cache, slot_mapping, latent.stride(0), k_rope.stride(0),
        stride_page, stride_slot, stride_channel,
        PAGE=latent_cache.shape[2], R=rank, P=rope, WIDTH=padded(rank), ROPE=padded(rope),
        num_warps=1,
    )  # fmt: skip
