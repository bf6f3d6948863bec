"""The gated delta rule over packed sequences (`isomodels::gated_delta_rule`) and with a carried
state (`isomodels::paged_gated_delta_rule`), with one definition for both.

Per value head, with q and k normalised and S [V, K] zero at the start:

    S <- exp(g) S,    S <- S + beta (v - S k) k^T,    o = S q / sqrt(K)

It is computed in chunks of `CHUNK` tokens counted from position 0. With G the sum of g from the
chunk's first row, S the state before the chunk, and i, j rows of it:

    u_i = beta_i (v_i - exp(G_i) S k_i) - sum over j < i of beta_i exp(G_i - G_j) (k_i . k_j) u_j
    o_i = exp(G_i) S q_i + sum over j <= i of exp(G_i - G_j) (q_i . k_j) u_j
    S'  = exp(G_last) S + sum over j of exp(G_last - G_j) u_j k_j^T

Row i needs S and the rows before it alone. So a decode computes the one row that a prefill would
have, from the state before the chunk and the rows k, u and G of the open chunk. These four tensors
are the whole state: a sequence may be cut at any token. The state after a chunk is made when its
last row is there, by the same product in every case.

Mathematics: Yang et al., "Gated Delta Networks" (2024); the chunked form, Yang et al.,
"Parallelizing Linear Transformers with the Delta Rule" (2024).
"""

import itertools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from isomodels.kernels.cpu_only import refuse_gpu
from isomodels.kernels.fixed_order import TILE_COLUMNS, TILE_ROWS, fold_sum, one_thread, round_up
from isomodels.kernels.schedule import Schedule, declare

CHUNK = TILE_COLUMNS
NORM_EPS = 1e-6  # of the l2 norm of q and k: a constant of the architecture, in no config

_CONSTANTS: dict[str, int | str] = {
    "chunk": CHUNK,
    "accumulate": "float32",
    "norm": "x / sqrt(sum of squares + 1e-6), sum by halving",
    "decay_sum": "left to right from the chunk's first row",
    "rows": "forward substitution, sums over the chunk by halving",
    "state": "float32",
    "kept_rows": "k as given, u and decay sums float32",
    "product_rows": TILE_ROWS,
    "roundings": 1,
}
SCHEDULE = declare(Schedule("gated_delta_rule", "torch", 1, _CONSTANTS))
PAGED_SCHEDULE = declare(Schedule("paged_gated_delta_rule", "torch", 1, _CONSTANTS))

Layout = tuple[tuple[tuple[int, ...], torch.dtype], ...]


def state_layout(
    num_k_heads: int, num_v_heads: int, key_dim: int, value_dim: int, dtype: torch.dtype
) -> Layout:
    """Shape and dtype of each tensor of one sequence's state.

    Args:
        num_k_heads, num_v_heads, key_dim, value_dim: heads and their sizes.
        dtype: of the model.

    Returns:
        The state before the open chunk, then the open chunk's rows: keys, u, decay sums.
    """
    return (
        ((num_v_heads, value_dim, key_dim), torch.float32),
        ((CHUNK, num_k_heads, key_dim), dtype),
        ((CHUNK, num_v_heads, value_dim), torch.float32),
        ((CHUNK, num_v_heads), torch.float32),
    )


@torch.library.custom_op("isomodels::gated_delta_rule", mutates_args=(), device_types="cpu")
def gated_delta_rule(
    q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, cu_seqlens: Tensor
) -> Tensor:
    """The gated delta rule on whole sequences, packed along the token axis.

    Args:
        q, k: [T, num_k_heads, key_dim], float32 or bfloat16, not normalised, any strides.
        v: [T, num_v_heads, value_dim], dtype of `q`; value head j reads key head
            j // (num_v_heads / num_k_heads).
        g: [T, num_v_heads] fp32, logarithm of the decay, not above 0.
        beta: [T, num_v_heads] fp32.
        cu_seqlens: [num_seqs + 1] int32; sequence i holds tokens cu_seqlens[i] to cu_seqlens[i+1].

    Returns:
        [T, num_v_heads, value_dim] in the dtype of `q`.

    Raises:
        ValueError: naming shapes that do not fit.
        TypeError: for gates that are not float32.
    """
    _check(q, k, v, g, beta)
    bounds = cu_seqlens.tolist()
    counts = [end - start for start, end in itertools.pairwise(bounds)]
    layout = state_layout(k.shape[1], v.shape[1], k.shape[2], v.shape[2], k.dtype)
    with one_thread():
        fresh = _State(*(k.new_zeros(len(counts), *s, dtype=d) for s, d in layout))
        return _run(q, k, v, g, beta, bounds[:-1], counts, [0] * len(counts), fresh)


@torch.library.custom_op(
    "isomodels::paged_gated_delta_rule",
    mutates_args=("boundary", "keys", "updates", "decays"),
    device_types="cpu",
)
def paged_gated_delta_rule(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor,
    beta: Tensor,
    boundary: Tensor,
    keys: Tensor,
    updates: Tensor,
    decays: Tensor,
    slots: Tensor,
    cu_seqlens_q: Tensor,
    seq_lens: Tensor,
) -> Tensor:
    """The gated delta rule on the newest tokens of each sequence, from the state it kept.

    Args:
        q, k, v, g, beta: as in `gated_delta_rule`.
        boundary, keys, updates, decays: [num_slots, ...] with the shapes and dtypes of
            `state_layout`, any strides; changed. A sequence that starts reads none of them, and
            rows past the open chunk's end are never read.
        slots: [num_seqs] int32, where each sequence's state lies.
        cu_seqlens_q: [num_seqs + 1] int32 bounds of the new tokens in the token axis.
        seq_lens: [num_seqs] int32 lengths including the new tokens.

    Returns:
        [T, num_v_heads, value_dim] in the dtype of `q`.

    Raises:
        ValueError: naming shapes that do not fit.
        TypeError: for gates or a state of another dtype.
    """
    _check(q, k, v, g, beta)
    pages = (boundary, keys, updates, decays)
    _check_pages(k, v, pages)
    edges = list(itertools.pairwise(cu_seqlens_q.tolist()))
    lengths, all_slots = seq_lens.tolist(), slots.tolist()
    live = [i for i, (start, end) in enumerate(edges) if end > start]
    if not live:
        return v.new_zeros(v.shape)
    starts = [edges[i][0] for i in live]
    counts = [edges[i][1] - edges[i][0] for i in live]
    history = [lengths[i] - count for i, count in zip(live, counts, strict=True)]
    filled = [length % CHUNK for length in history]
    where = torch.tensor([all_slots[i] for i in live], dtype=torch.int64, device="cpu")
    with one_thread():
        state = _State(*(page[where] for page in pages))
        _forget(state, history, filled)
        out = _run(q, k, v, g, beta, starts, counts, filled, state)
        for page, tensor in zip(pages, state.tensors(), strict=True):
            page[where] = tensor
    return out


@dataclass
class _State:
    """Of the sequences of one call; rows past the open chunk's end are zero.

    boundary [n, HV, V, K], keys [n, CHUNK, HK, K], updates [n, CHUNK, HV, V],
    decays [n, CHUNK, HV].
    """

    boundary: Tensor
    keys: Tensor
    updates: Tensor
    decays: Tensor

    def tensors(self) -> tuple[Tensor, ...]:
        return self.boundary, self.keys, self.updates, self.decays


def _check(q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor) -> None:
    fits = q.dim() == v.dim() == 3 and q.shape == k.shape and len(v) == len(k)
    if not fits or v.shape[1] % k.shape[1] or not g.shape == beta.shape == v.shape[:2]:
        raise ValueError(
            "gated_delta_rule needs q and k [T, k_heads, K], v [T, v_heads, V] with a multiple of "
            f"k_heads, g and beta [T, v_heads], got {list(q.shape)}, {list(k.shape)}, "
            f"{list(v.shape)}, {list(g.shape)} and {list(beta.shape)}"
        )
    if g.dtype != torch.float32 or beta.dtype != torch.float32:
        raise TypeError(f"g and beta must be float32, got {g.dtype} and {beta.dtype}")


def _check_pages(k: Tensor, v: Tensor, pages: Sequence[Tensor]) -> None:
    layout = state_layout(k.shape[1], v.shape[1], k.shape[2], v.shape[2], k.dtype)
    for name, page, (shape, dtype) in zip(
        ("boundary", "keys", "updates", "decays"), pages, layout, strict=True
    ):
        if page.shape[1:] != shape:
            raise ValueError(f"{name} must be [slots, {list(shape)}], got {list(page.shape)}")
        if page.dtype != dtype:
            raise TypeError(f"the state's {name} must be {dtype}, got {page.dtype}")


def _forget(state: _State, history: list[int], filled: list[int]) -> None:
    """Zero what a sequence does not own: pages hold what was there before, NaN included."""
    begun = torch.tensor([length > 0 for length in history], device="cpu")
    rows = torch.tensor(filled, device="cpu")
    owned = torch.arange(CHUNK, device="cpu") < rows[:, None]  # [n, CHUNK]
    state.boundary = torch.where(begun[:, None, None, None], state.boundary, 0.0)
    state.keys = torch.where(owned[:, :, None, None], state.keys, 0.0)
    state.updates = torch.where(owned[:, :, None, None], state.updates, 0.0)
    state.decays = torch.where(owned[:, :, None], state.decays, 0.0)


def _run(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor,
    beta: Tensor,
    starts: list[int],
    counts: list[int],
    filled: list[int],
    state: _State,
) -> Tensor:
    """Sequence n gets tokens starts[n] .. + counts[n] after filled[n] rows of its open chunk."""
    out = v.new_zeros(v.shape)
    next_token, left, fill = list(starts), list(counts), list(filled)
    while any(left):
        who = [n for n, count in enumerate(left) if count]
        rows = [min(CHUNK - fill[n], left[n]) for n in who]
        index = torch.tensor(who, dtype=torch.int64, device="cpu")
        everyone = len(who) == len(left)
        chunk = state if everyone else _State(*(tensor[index] for tensor in state.tensors()))
        new = _new_rows([next_token[n] for n in who], [fill[n] for n in who], rows)
        tokens = new.tokens[new.valid]
        made = _chunk_rows(*(x[new.tokens] for x in (q, k, v, g, beta)), new=new, chunk=chunk)
        out[tokens] = made[new.valid].to(out.dtype)
        for n, count in zip(who, rows, strict=True):
            next_token[n], left[n], fill[n] = (
                next_token[n] + count,
                left[n] - count,
                fill[n] + count,
            )
        closed = [place for place, n in enumerate(who) if fill[n] == CHUNK]
        if closed:
            _close(chunk, torch.tensor(closed, dtype=torch.int64, device="cpu"))
        if not everyone:
            for tensor, part in zip(state.tensors(), chunk.tensors(), strict=True):
                tensor[index] = part
        fill = [count % CHUNK for count in fill]
    return out


@dataclass
class _New:
    """The new rows of a chunk: tokens and places (row of the chunk) [n, M], valid [n, M]."""

    tokens: Tensor
    places: Tensor
    valid: Tensor
    counts: list[int]


def _new_rows(tokens: list[int], fills: list[int], counts: list[int]) -> _New:
    steps = torch.arange(max(counts), device="cpu")
    first, fill, count = (torch.tensor(x, device="cpu")[:, None] for x in (tokens, fills, counts))
    valid = steps < count
    # rows that are not there repeat the first one; nothing of theirs is kept
    return _New(
        torch.where(valid, first + steps, first),
        torch.where(valid, fill + steps, fill),
        valid,
        counts,
    )


def _chunk_rows(
    q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, *, new: _New, chunk: _State
) -> Tensor:
    """The new rows of one chunk of each of n sequences; they are added to `chunk`.

    q and k [n, M, HK, K], v [n, M, HV, V], g and beta [n, M, HV] -> o [n, M, HV, V] fp32.
    """
    sequence, row = new.valid.nonzero(as_tuple=True)
    place = new.places[sequence, row]
    chunk.keys[sequence, place] = k[sequence, row]
    sums = _decay_sums(g, new, chunk)  # [n, M, HV]
    chunk.decays[sequence, place] = sums[sequence, row]

    group = v.shape[2] // k.shape[2]
    heads_first = [x.transpose(1, 2) for x in (_unit(q) * q.shape[-1] ** -0.5, _unit(k))]
    q, k = heads_first  # [n, HK, M, K]
    keys = _unit(chunk.keys).transpose(1, 2)  # [n, HK, CHUNK, K]
    kk, qk = (_products(x, keys, new.counts).repeat_interleave(group, 1) for x in (k, q))
    read_k, read_q = (
        _products(x.repeat_interleave(group, 1), chunk.boundary, new.counts) for x in (k, q)
    )  # [n, HV, M, V]

    sums = sums.transpose(1, 2).unsqueeze(-1)  # [n, HV, M, 1]
    beta = beta.transpose(1, 2).unsqueeze(-1)
    behind = sums - chunk.decays.transpose(1, 2).unsqueeze(2)  # [n, HV, M, CHUNK]
    column = torch.arange(CHUNK, device="cpu")
    visible = (column <= new.places[:, :, None])[:, None]  # [n, 1, M, CHUNK]
    before = (column < new.places[:, :, None])[:, None]
    decay = torch.exp(torch.where(visible, behind, -torch.inf))
    reads = torch.where(visible, qk * decay, 0.0)
    solve = torch.where(before, beta * (kk * decay), 0.0)
    right = beta * (v.transpose(1, 2).float() - torch.exp(sums) * read_k)
    _substitute(right, solve, new, chunk)
    updates = chunk.updates.permute(0, 2, 3, 1)  # [n, HV, V, CHUNK]
    out = torch.exp(sums) * read_q + _products(reads, updates, new.counts)
    return out.transpose(1, 2)


def _decay_sums(g: Tensor, new: _New, chunk: _State) -> Tensor:
    """G of the new rows, [n, M, HV]: one addition after the other."""
    first = new.places[:, 0]
    last = chunk.decays[torch.arange(len(g), device="cpu"), (first - 1).clamp(min=0)]
    running = torch.where((first > 0)[:, None], last, 0.0)
    sums = torch.empty_like(g)
    for row in range(g.shape[1]):
        running = running + g[:, row]
        sums[:, row] = running
    return sums


def _substitute(right: Tensor, solve: Tensor, new: _New, chunk: _State) -> None:
    """Forward substitution, row by row; right [n, HV, M, V], solve [n, HV, M, CHUNK]."""
    everyone = torch.arange(len(right), device="cpu")
    updates = chunk.updates.permute(0, 2, 3, 1).contiguous()  # [n, HV, V, CHUNK]
    for row in range(right.shape[2]):
        # the rows that are not there yet are zero in `updates`
        known = fold_sum(solve[:, :, row].unsqueeze(2) * updates)
        made = right[:, :, row] - known  # [n, HV, V]
        valid = new.valid[:, row]
        here = everyone[valid]
        updates[here, :, :, new.places[here, row]] = made[valid]
    chunk.updates = updates.permute(0, 3, 1, 2)


def _close(chunk: _State, closed: Tensor) -> None:
    """The state after a full chunk, of the sequences `closed`; their next chunk is empty."""
    decays = chunk.decays[closed].transpose(1, 2)  # [n, HV, CHUNK]
    last = decays[..., -1:]
    updates = chunk.updates[closed].permute(0, 2, 3, 1)  # [n, HV, V, CHUNK]
    written = updates * torch.exp(last - decays).unsqueeze(2)
    keys = _unit(chunk.keys[closed]).permute(0, 2, 3, 1)  # [n, HK, K, CHUNK]
    keys = keys.repeat_interleave(updates.shape[1] // keys.shape[1], 1)
    kept = torch.exp(last).unsqueeze(-1) * chunk.boundary[closed]
    chunk.boundary[closed] = kept + _products(written, keys)
    for rows in (chunk.keys, chunk.updates, chunk.decays):
        rows[closed] = 0.0


def _unit(x: Tensor) -> Tensor:
    """x / sqrt(|x|^2 + eps) over the last axis, fp32."""
    x = x.float()
    return x * (1.0 / torch.sqrt(fold_sum(x * x) + NORM_EPS)).unsqueeze(-1)


def _products(rows: Tensor, columns: Tensor, counts: Sequence[int] | None = None) -> Tensor:
    """[n, H, M, K] times [n, H, N, K] transposed -> [n, H, M, N], in tiles [16, K] x [K, 64].

    As `fixed_order.matmul_nt`, for many small matrices. Rows past counts[n] are left zero.
    """
    (n, heads, m, k), width = rows.shape, columns.shape[2]
    x = rows.new_zeros(n, heads, round_up(m, TILE_ROWS), k)
    x[:, :, :m] = rows
    w = rows.new_zeros(n, heads, round_up(width, TILE_COLUMNS), k)
    w[:, :, :width] = columns
    x_tiles = x.view(-1, TILE_ROWS, k).unbind()
    w_tiles = w.view(-1, TILE_COLUMNS, k).transpose(1, 2).unbind()
    down, across = x.shape[2] // TILE_ROWS, w.shape[2] // TILE_COLUMNS
    out = rows.new_zeros(n * heads, down, across, TILE_ROWS, TILE_COLUMNS)
    out_tiles = out.view(-1, TILE_ROWS, TILE_COLUMNS).unbind()
    for matrix in range(n * heads):
        used = -(-counts[matrix // heads] // TILE_ROWS) if counts else down
        for row in range(matrix * down, matrix * down + used):
            for column in range(across):
                w_tile = w_tiles[matrix * across + column]
                torch.mm(x_tiles[row], w_tile, out=out_tiles[row * across + column])
    # a masked term is +0 or -0 by the sign of what it hides: + 0.0 leaves one zero
    out = out.transpose(2, 3).reshape(n, heads, x.shape[2], w.shape[2]) + 0.0
    return out[:, :, :m, :width]


refuse_gpu("gated delta rule models", gated_delta_rule, paged_gated_delta_rule)


@gated_delta_rule.register_fake
def _(q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, cu_seqlens: Tensor) -> Tensor:
    return v.new_empty(v.shape)


@paged_gated_delta_rule.register_fake
def _(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor,
    beta: Tensor,
    boundary: Tensor,
    keys: Tensor,
    updates: Tensor,
    decays: Tensor,
    slots: Tensor,
    cu_seqlens_q: Tensor,
    seq_lens: Tensor,
) -> Tensor:
    return v.new_empty(v.shape)


def _setup_context(ctx: Any, inputs: tuple, output: Any) -> None:
    ctx.save_for_backward(*inputs)


def _backward(ctx: Any, grad: Tensor) -> tuple:
    from isomodels.kernels.gated_delta_backward import gated_delta_rule_backward

    return *gated_delta_rule_backward(grad, *ctx.saved_tensors), None


gated_delta_rule.register_autograd(_backward, setup_context=_setup_context)
