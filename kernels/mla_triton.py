"""Triton backend of latent attention: the kernel that walks whole rows of tiles (packed training
sequences, prefill over pages).

A tile's rows are (token, head) pairs of one sequence, heads fastest: all share the one latent row
of a key. Of the two states that a merge of segments needs, one is parked in memory: the registers
hold one accumulator of 512 columns. Tile, warps and stages are tuning.
"""

# mypy: disable-error-code="no-untyped-def"

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from isomodels.kernels.attention_triton import LOG2E, SEGMENT, finish, unit_rows
from isomodels.kernels.common_triton import processors
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
from isomodels.kernels.park_triton import parking_places

_LN2 = tl.constexpr(0.6931471805599453)


def tile_config(dtype: torch.dtype, rank: int, mapped: bool) -> dict[str, int]:
    """Tuning of the tile kernel.

    `rank`: numbers of a latent; `mapped`: keys come through tensor maps. Through a page table
    they arrive a stage later.
    """
    if dtype == torch.float32:
        return {"BLOCK_M": 16 if rank > 128 else 64, "num_warps": 8, "num_stages": 1}
    return {
        "BLOCK_M": 64,
        "num_warps": 8 if rank > 256 else 4,
        "num_stages": 2 if mapped else 3,
    }


@triton.jit
def _find_tile(cu_seqlens, tile, num_seqs, num_heads, BLOCK: tl.constexpr):
    """Which sequence a tile of a flat grid belongs to, and which of its tiles it is.

    Sequence i owns the tiles from cu_seqlens[i] * num_heads // BLOCK + i on, enough for any
    alignment.
    """
    low = 0
    high = num_seqs
    while high - low > 1:
        middle = (low + high) // 2
        if tl.load(cu_seqlens + middle) * num_heads // BLOCK + middle <= tile:
            low = middle
        else:
            high = middle
    return low, tile - (tl.load(cu_seqlens + low) * num_heads // BLOCK + low)


@triton.jit
def _add_parked(place, x, old, new, there, ASM: tl.constexpr):
    """x * new + parked * old, or x * new + 0 where nothing is parked yet: element by element by
    the thread that owns it (see `park_triton`)."""
    if ASM:
        x = tl.inline_asm_elementwise(
            """
            { .reg .pred p; .reg .f32 t;
              setp.ne.s32 p, $5, 0;
              mov.f32 t, 0f00000000;
              @p ld.global.f32 t, [$1];
              mul.rn.f32 t, t, $3;
              fma.rn.f32 $0, $2, $4, t; }
            """,
            "=f,l,f,f,f,r",
            [place.to(tl.int64), x, old, new, there],
            dtype=tl.float32,
            is_pure=False,
            pack=1,
        )
    else:
        x = tl.fma(
            x, new, tl.load(place, mask=tl.zeros(x.shape, tl.int32) + there > 0, other=0.0) * old
        )
    return x


@triton.jit
def _park(place, x, wanted, ASM: tl.constexpr):
    if ASM:
        tl.inline_asm_elementwise(
            "{ .reg .pred p; setp.ne.s32 p, $3, 0; @p st.global.f32 [$1], $2; mov.b32 $0, 0; }",
            "=r,l,f,r",
            [place.to(tl.int64), x, wanted],
            dtype=tl.int32,
            is_pure=False,
            pack=1,
        )
    else:
        tl.store(place, x, mask=tl.zeros(x.shape, tl.int32) + wanted > 0)


# Counts that differ from step to step of an engine: a value of 1 or a multiple of 16 would each be
# compiled anew, while requests wait.
@triton.jit(do_not_specialize=["num_tiles", "num_seqs"])
def _latent_tiles(
    q_ptr, q_rope_ptr, latent_ptr, k_rope_ptr, latent_desc, k_rope_desc, out_ptr, lse_ptr,
    parked_ptr, cu_seqlens, seq_lens, block_table, scale_log2, num_tiles, num_seqs, num_heads,
    stride_qt, stride_qh, stride_page, stride_row, stride_rope, stride_table,
    PAGE: tl.constexpr, PAGED: tl.constexpr, TMA: tl.constexpr, SEGMENT: tl.constexpr,
    BLOCK_M: tl.constexpr, N: tl.constexpr, R: tl.constexpr, P: tl.constexpr,
    WIDTH: tl.constexpr, ROPE: tl.constexpr, ASM: tl.constexpr, LEAST: tl.constexpr,
):  # fmt: skip
    BLOCKS: tl.constexpr = SEGMENT // N
    dim = tl.arange(0, WIDTH)
    parked_ptr += tl.program_id(0).to(tl.int64) * (BLOCK_M * (WIDTH + 2))
    parked_at = parked_ptr + parking_places(BLOCK_M, WIDTH)
    factor_at = parked_ptr + BLOCK_M * WIDTH + tl.arange(0, BLOCK_M)
    # Long tiles come first: the last tiles to run are short.
    for turn in range(tl.program_id(0), num_tiles, tl.num_programs(0)):
        seq, tile = _find_tile(cu_seqlens, num_tiles - 1 - turn, num_seqs, num_heads, BLOCK_M)
        first_token = tl.load(cu_seqlens + seq)
        num_new = tl.load(cu_seqlens + seq + 1) - first_token
        length = num_new
        if PAGED:
            length = tl.load(seq_lens + seq)
        own = tile * BLOCK_M < num_new * num_heads
        if PAGED:
            own &= num_new >= LEAST
        if own:
            table = block_table
            keys_ptr, ropes_ptr = latent_ptr, k_rope_ptr
            if PAGED:
                table += seq.to(tl.int64) * stride_table
            else:
                keys_ptr += first_token.to(tl.int64) * stride_row
                ropes_ptr += first_token.to(tl.int64) * stride_rope
            rows = tile * BLOCK_M + tl.arange(0, BLOCK_M)
            valid = rows < num_new * num_heads
            tokens = (first_token + rows // num_heads).to(tl.int64)
            q, q_rope = load_queries(
                q_ptr, q_rope_ptr, tokens, rows % num_heads, valid, num_heads, stride_qt, stride_qh,
                R, P, WIDTH, ROPE,
            )  # fmt: skip
            past = length - num_new
            positions = past + rows // num_heads
            last_row = tl.minimum(tile * BLOCK_M + BLOCK_M, num_new * num_heads) - 1
            # Blocks that all rows see whole, and blocks that any sees.
            num_full = (past + tile * BLOCK_M // num_heads + 1) // N
            num_blocks = tl.cdiv(past + last_row // num_heads + 1, N)
            num_segments = tl.cdiv(num_blocks, BLOCKS)

            m_all, norm_all = (
                tl.full([BLOCK_M], float("-inf"), tl.float32),
                tl.zeros([BLOCK_M], tl.float32),
            )
            for segment in range(0, num_segments):
                first = segment * BLOCKS
                last = tl.minimum(first + BLOCKS, num_blocks)
                turning = tl.maximum(first, tl.minimum(last, num_full))
                m, norm, acc = empty_latents(BLOCK_M, WIDTH)
                m, norm, acc = walk_latents(
                    q, q_rope, m, norm, acc, positions, keys_ptr, ropes_ptr, latent_desc,
                    k_rope_desc, first_token, table, length, first, turning, scale_log2,
                    stride_page, stride_row, stride_rope, PAGE, PAGED, TMA, N, R, P, WIDTH, ROPE,
                    False,
                )  # fmt: skip
                m, norm, acc = walk_latents(
                    q, q_rope, m, norm, acc, positions, keys_ptr, ropes_ptr, latent_desc,
                    k_rope_desc, first_token, table, length, turning, last, scale_log2,
                    stride_page, stride_row, stride_rope, PAGE, PAGED, TMA, N, R, P, WIDTH, ROPE,
                    True,
                )  # fmt: skip
                # The merge of `attention_triton`, its first accumulator out of the registers.
                m_new = tl.maximum(m_all, m)
                base = tl.where(m_new == float("-inf"), 0.0, m_new)
                # Through memory: the factors come in the layout of the scores, in which the
                # accumulator would not fit the registers.
                tl.store(factor_at, tl.exp2(m_all - base))
                tl.store(factor_at + BLOCK_M, tl.exp2(m - base))
                tl.debug_barrier()
                old, new = tl.load(factor_at), tl.load(factor_at + BLOCK_M)
                norm_all = tl.fma(tl.max(norm, 1), new, norm_all * old)
                m_all = m_new
                acc = _add_parked(parked_at, acc, old[:, None], new[:, None], segment, ASM)
                _park(parked_at, acc, num_segments - 1 - segment, ASM)
                tl.debug_barrier()
                if segment == num_segments - 1:
                    at = (tokens * num_heads + rows % num_heads)[:, None] * R + dim[None, :]
                    out = finish(norm_all, acc).to(out_ptr.dtype.element_ty)
                    tl.store(out_ptr + at, out, mask=valid[:, None] & (dim < R)[None, :])
                    if lse_ptr is not None:
                        lse = (m_all + tl.log2(norm_all)) * _LN2
                        at = tokens * num_heads + rows % num_heads
                        tl.store(lse_ptr + at, lse, mask=valid)


def mla_attention(
    q: Tensor, q_rope: Tensor, latent: Tensor, k_rope: Tensor, cu_seqlens: Tensor, scale: float,
    config: dict | None = None,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """Latents of the output [T, heads, R] and log-sum-exp of the scores [T, heads] fp32.

    q [T, heads, R], dense, and q_rope [T, heads, P], latent [T, R], k_rope [T, P]; `config`
    overrides the tuning.
    """
    check(q, q_rope, scale)
    latent, k_rope, q_rope = unit_rows(latent), unit_rows(k_rope), unit_rows(q_rope)
    num_tokens, num_heads, rank = q.shape
    out = torch.empty_like(q)
    lse = torch.empty(num_tokens, num_heads, dtype=torch.float32, device=q.device)
    if not num_tokens or len(cu_seqlens) <= 1:
        return out, lse
    config = dict(config or {})
    maps = key_maps(latent, k_rope, config.pop("TMA", True))
    config = {**tile_config(q.dtype, rank, maps[0] is not None), **config}
    _launch(
        q, q_rope, latent, k_rope, out, lse, cu_seqlens, None, None, scale, config, maps,
        page=1, strides=(0, latent.stride(0), k_rope.stride(0), 0),
    )  # fmt: skip
    return out, lse


def paged_prefill(
    q: Tensor, q_rope: Tensor, latent_cache: Tensor, block_table: Tensor, cu_seqlens_q: Tensor,
    seq_lens: Tensor, scale: float, out: Tensor, least: int, config: dict | None = None,
) -> None:  # fmt: skip
    """Fill the rows of `out` [T, heads, R] whose sequences have `least` or more new tokens."""
    rank, config = q.shape[2], dict(config or {})
    rows, page = page_rows(latent_cache), latent_cache.shape[2]
    maps: tuple[Any, Any] = (None, None)
    if rows is not None:
        maps = key_maps(rows[:, :rank], rows[:, rank:], config.pop("TMA", True))
    config.pop("TMA", None)
    config = {**tile_config(q.dtype, rank, maps[0] is not None), **config}
    stride_page, _, stride_row, _ = latent_cache.stride()
    latent, k_rope = latent_cache[..., :rank], latent_cache[..., rank:]
    _launch(
        q, q_rope, latent, k_rope, out, None, cu_seqlens_q, seq_lens, block_table, scale, config,
        maps, page=page, least=least,
        strides=(stride_page, stride_row, stride_row, block_table.stride(0)),
    )  # fmt: skip


def _launch(
    q: Tensor, q_rope: Tensor, latent: Tensor, k_rope: Tensor, out: Tensor, lse: Tensor | None,
    cu_seqlens: Tensor, seq_lens: Tensor | None, block_table: Tensor | None, scale: float,
    config: dict[str, int], maps: tuple[Any, Any], page: int, strides: tuple[int, ...],
    least: int = 1,
) -> None:  # fmt: skip
    num_tokens, num_heads, rank = q.shape
    rope, num_seqs, rows = q_rope.shape[2], len(cu_seqlens) - 1, config["BLOCK_M"]
    width = padded(rank)
    num_tiles = num_tokens * num_heads // rows + num_seqs
    programs = min(num_tiles, processors(q))
    parked = torch.empty(programs * rows * (width + 2), dtype=torch.float32, device=q.device)
    _latent_tiles[(programs,)](
        q, q_rope, latent, k_rope, *maps, out, lse, parked, cu_seqlens, seq_lens, block_table,
        scale * LOG2E, num_tiles, num_seqs, num_heads, q_rope.stride(0), q_rope.stride(1),
        *strides,
        PAGE=page, PAGED=block_table is not None, TMA=maps[0] is not None, SEGMENT=SEGMENT, N=BLOCK,
        R=rank, P=rope, WIDTH=width, ROPE=padded(rope), ASM=q.is_cuda, LEAST=least,
        **config,
    )  # fmt: skip
