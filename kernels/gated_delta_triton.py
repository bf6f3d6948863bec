"""Triton backend of `isomodels::gated_delta_rule` and `isomodels::paged_gated_delta_rule`.

Launches alone; the kernels are in the files that are imported.
"""

from dataclasses import dataclass
from typing import NamedTuple

import torch
import triton
from torch import Tensor

from isomodels.kernels.common_triton import log2_ceil, rows_of
from isomodels.kernels.gated_delta_chunk import CHUNK, NORM_EPS
from isomodels.kernels.gated_delta_chunk_triton import (
    chunk_matrices,
    decay_sums,
    plan_chunks,
    solve_blocks,
)
from isomodels.kernels.gated_delta_decode_triton import decode_rows
from isomodels.kernels.gated_delta_walk_triton import keep_rows, walk_chunks


class Tiles(NamedTuple):
    """Tuning: value channels of a program, warps, stages of loads."""

    channels: int
    warps: int
    stages: int = 1


WALK = Tiles(64, 4, 2)
DECODE = Tiles(128, 4)
# Bits do not depend on it, but on products and additions being rounded apart.
_EXACT = {"enable_fp_fusion": False}


@dataclass(frozen=True)
class Shape:
    """Heads and sizes; KP is K as the matrix units take it."""

    num_k_heads: int
    num_v_heads: int
    key_dim: int
    value_dim: int

    @staticmethod
    def of(k: Tensor, v: Tensor) -> "Shape":
        """That of k [T, HK, K] and v [T, HV, V]."""
        return Shape(k.shape[1], v.shape[1], k.shape[2], v.shape[2])

    @property
    def log2_key(self) -> int:
        """KP as its exponent."""
        return max(4, log2_ceil(self.key_dim))

    @property
    def scale(self) -> float:
        """Of the queries."""
        return self.key_dim**-0.5

    def channels(self, tiles: Tiles) -> Tiles:
        """Tiles no wider than the value channels."""
        width = max(16, min(tiles.channels, 2 ** log2_ceil(self.value_dim)))
        return Tiles(width, max(1, tiles.warps * width // tiles.channels), tiles.stages)


class Pages(NamedTuple):
    """State tensors, and where each sequence's lies."""

    boundary: Tensor
    keys: Tensor
    updates: Tensor
    decays: Tensor
    slots: Tensor
    lengths: Tensor


class Chunks(NamedTuple):
    """What the chunk kernels leave for each other."""

    table: Tensor
    first: Tensor
    sums: Tensor
    betas: Tensor
    queries: Tensor
    units: Tensor
    solve: Tensor
    reads: Tensor
    open_t: Tensor


def plain(x: Tensor) -> Tensor:
    """`x`, or a copy of it where its storage would need kernels of its own.

    Views of a model's projections have rows and heads at multiples of 16 bytes.
    """
    x = rows_of(x)
    strides = [s for s, n in zip(x.stride()[:-1], x.shape[:-1], strict=True) if n > 1]
    aligned = x.is_contiguous() or all(s * x.element_size() % 16 == 0 for s in strides)
    if aligned and x.data_ptr() % 16 == 0:
        return x
    return x.clone(memory_format=torch.contiguous_format)


def prepare(
    q: Tensor, k: Tensor, g: Tensor, beta: Tensor, bounds: Tensor, out: Tensor, shape: Shape,
    pages: Pages | None = None,
) -> Chunks:  # fmt: skip
    """Everything that does not wait for a state, all chunks at once; clears rows of no sequence."""
    tokens, sequences = len(q), len(bounds) - 1
    count = tokens // CHUNK + sequences * (1 if pages is None else 2)
    heads, kp = shape.num_v_heads, 2**shape.log2_key

    def empty(*size: int, dtype: torch.dtype = torch.float32) -> Tensor:
        return torch.empty(*size, dtype=dtype, device=q.device)

    paged = pages is not None
    table, first = (empty(n, dtype=torch.int32) for n in (count * 4, sequences + 1))
    sums, betas = (empty(count, heads, CHUNK) for _ in range(2))
    queries, units = (empty(count * CHUNK, shape.num_k_heads, kp, dtype=k.dtype) for _ in range(2))
    solve, reads = (empty(count, heads, CHUNK * CHUNK, dtype=k.dtype) for _ in range(2))
    corner = empty(count, heads, 1024)
    open_t = empty(sequences if paged else 0, heads, 256)
    slots, lengths = (pages.slots, pages.lengths) if pages else (bounds, bounds)
    decays, keys = (pages.decays, pages.keys) if pages else (sums, units)
    plan_chunks[(sequences + 1,)](
        bounds, lengths, slots, table, first, out, sequences, tokens,
        WIDTH=heads * shape.value_dim, LEAST=2 if paged else 1, PAGED=paged, MANY=256, num_warps=1,
    )  # fmt: skip
    decay_sums[(count,)](
        g, beta, decays, slots, table, first, sums, betas,
        sequences, g.stride(0), beta.stride(0), decays.stride(0),
        HV=heads, HEADS=2 ** log2_ceil(heads), PAGED=paged, num_warps=1, **_EXACT,
    )  # fmt: skip
    chunk_matrices[(count, shape.num_k_heads)](
        q, k, keys, slots, table, first, sums, betas, queries, units, solve, reads, corner,
        sequences, q.stride(0), q.stride(1), k.stride(0), k.stride(1), keys.stride(0),
        shape.scale, NORM_EPS,
        HK=shape.num_k_heads, GROUP=heads // shape.num_k_heads, K=shape.key_dim,
        LOG2K=shape.log2_key, PAGED=paged, num_warps=4, **_EXACT,
    )  # fmt: skip
    solve_blocks[(count, heads)](
        corner, decays, slots, table, first, solve, open_t, sequences, decays.stride(0),
        HV=heads, PAGED=paged, num_warps=2, **_EXACT,
    )  # fmt: skip
    return Chunks(table, first, sums, betas, queries, units, solve, reads, open_t)


def walk(
    v: Tensor, bounds: Tensor, chunks: Chunks, out: Tensor, shape: Shape,
    pages: Pages | None = None, kept: tuple[Tensor, Tensor] | None = None, tiles: Tiles = WALK,
) -> None:  # fmt: skip
    """The states, chunk after chunk, and with them the outputs.

    Args:
        kept: for a backward, places of the states before each chunk and of u; no outputs then.
    """
    sequences, heads = len(bounds) - 1, shape.num_v_heads
    paged = pages is not None
    open_u = out
    boundary, updates, slots, lengths = chunks.sums, out, bounds, bounds
    if pages:
        boundary, updates, slots, lengths = (
            pages.boundary,
            pages.updates,
            pages.slots,
            pages.lengths,
        )
        open_u = torch.empty(
            sequences, CHUNK, heads, shape.value_dim, dtype=v.dtype, device=v.device
        )
    states, rows = kept or (out, out)
    tiles = shape.channels(tiles)
    parts = triton.cdiv(shape.value_dim, tiles.channels)
    kp = 2**shape.log2_key
    walk_chunks[(sequences * heads * parts,)](
        v, bounds, lengths, slots, chunks.first, chunks.sums, chunks.betas,
        chunks.queries, chunks.units, chunks.solve, chunks.reads, boundary, updates,
        out, open_u, states, rows,
        sequences, v.stride(0), v.stride(1), boundary.stride(0), updates.stride(0),
        HK=shape.num_k_heads, HV=heads, K=shape.key_dim, KP=kp, V=shape.value_dim,
        BV=tiles.channels, PAGED=paged, OUT=kept is None, KEEP=kept is not None,
        STAGES=tiles.stages, num_warps=tiles.warps, **_EXACT,
    )  # fmt: skip
    if pages:
        keep_rows[(sequences, heads)](
            chunks.units, chunks.sums, chunks.open_t, open_u, bounds, lengths, slots, chunks.first,
            pages.keys, pages.updates, pages.decays,
            sequences, pages.keys.stride(0), pages.updates.stride(0), pages.decays.stride(0),
            HK=shape.num_k_heads, HV=heads, K=shape.key_dim, KP=kp, V=shape.value_dim,
            VP=2 ** log2_ceil(shape.value_dim), num_warps=4,
        )  # fmt: skip


def gated_delta_rule(
    q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, bounds: Tensor
) -> Tensor:
    """Packed whole sequences, as `isomodels::gated_delta_rule`."""
    q, k, v, g, beta = (plain(x) for x in (q, k, v, g, beta))
    shape = Shape.of(k, v)
    out = torch.empty(v.shape, dtype=v.dtype, device=v.device)
    if out.numel() and len(bounds) > 1:
        chunks = prepare(q, k, g, beta, bounds, out, shape)
        walk(v, bounds, chunks, out, shape)
    return out


def paged_gated_delta_rule(
    q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, pages: Pages, bounds: Tensor,
    max_seqlen_q: int,
) -> Tensor:  # fmt: skip
    """New tokens after kept states, as `isomodels::paged_gated_delta_rule`.

    Sequences of one new token are decoded, those of more go by chunks: both give the same bits.
    """
    q, k, v, g, beta = (plain(x) for x in (q, k, v, g, beta))
    shape = Shape.of(k, v)
    make = torch.empty if max_seqlen_q > 1 else torch.zeros  # rows of padding are zero
    out = make(v.shape, dtype=v.dtype, device=v.device)
    if out.numel() and len(bounds) > 1:
        if max_seqlen_q > 1:
            chunks = prepare(q, k, g, beta, bounds, out, shape, pages)
            walk(v, bounds, chunks, out, shape, pages)
        decode(q, k, v, g, beta, pages, bounds, out, shape)
    return out


def decode(
    q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, pages: Pages, bounds: Tensor,
    out: Tensor, shape: Shape, tiles: Tiles = DECODE,
) -> None:  # fmt: skip
    """Sequences of one new token."""
    tiles = shape.channels(tiles)
    parts = triton.cdiv(shape.value_dim, tiles.channels)
    grid = ((len(bounds) - 1) * shape.num_v_heads * parts,)
    decode_rows[grid](
        q, k, v, g, beta, pages.boundary, pages.keys, pages.updates, pages.decays,
        pages.slots, bounds, pages.lengths, out,
        q.stride(0), q.stride(1), k.stride(0), k.stride(1), v.stride(0), v.stride(1),
        g.stride(0), beta.stride(0), pages.boundary.stride(0), pages.keys.stride(0),
        pages.updates.stride(0), pages.decays.stride(0), shape.scale, NORM_EPS,
        HK=shape.num_k_heads, HV=shape.num_v_heads, K=shape.key_dim, LOG2K=shape.log2_key,
        V=shape.value_dim, BV=tiles.channels, PIECE=min(32, 2**shape.log2_key),
        num_warps=tiles.warps, num_stages=tiles.stages, maxnreg=128, **_EXACT,
    )  # fmt: skip
