"""The gated delta rule on the CPU, one chunk of every sequence at a time.

Shapes: n sequences, M new rows of a chunk, HK key heads of K channels, HV value heads of V.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from isomodels.kernels.fixed_order import TILE_COLUMNS, TILE_ROWS, fold_sum, round_up

CHUNK = TILE_COLUMNS
NORM_EPS = 1e-6  # of the l2 norm of q and k: a constant of the architecture, in no config


@dataclass
class State:
    """Of the sequences of one call; rows past the open chunk's end are zero.

    boundary [n, HV, V, K], keys [n, CHUNK, HK, K], updates [n, CHUNK, HV, V],
    decays [n, CHUNK, HV].
    """

    boundary: Tensor
    keys: Tensor
    updates: Tensor
    decays: Tensor

    def tensors(self) -> tuple[Tensor, ...]:
        """In the order of `state_layout`."""
        return self.boundary, self.keys, self.updates, self.decays


def forget(state: State, history: list[int], filled: list[int]) -> None:
    """Zero what a sequence does not own: pages hold what was there before, NaN included."""
    begun = torch.tensor([length > 0 for length in history], device="cpu")
    rows = torch.tensor(filled, device="cpu")
    owned = torch.arange(CHUNK, device="cpu") < rows[:, None]  # [n, CHUNK]
    state.boundary = torch.where(begun[:, None, None, None], state.boundary, 0.0)
    state.keys = torch.where(owned[:, :, None, None], state.keys, 0.0)
    state.updates = torch.where(owned[:, :, None, None], state.updates, 0.0)
    state.decays = torch.where(owned[:, :, None], state.decays, 0.0)


def run_rows(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor,
    beta: Tensor,
    starts: list[int],
    counts: list[int],
    filled: list[int],
    state: State,
) -> Tensor:
    """Every new token of every sequence, chunk after chunk.

    Args:
        q, k: [T, HK, K]; v: [T, HV, V]; g, beta: [T, HV] fp32.
        starts, counts: sequence n has the tokens starts[n] to starts[n] + counts[n].
        filled: rows of its open chunk that are in `state` already.
        state: of the n sequences; becomes that after the last token.

    Returns:
        [T, HV, V] in the dtype of `v`, zero for tokens of no sequence.
    """
    out = v.new_zeros(v.shape)
    next_token, left, fill = list(starts), list(counts), list(filled)
    while any(left):
        who = [n for n, count in enumerate(left) if count]
        rows = [min(CHUNK - fill[n], left[n]) for n in who]
        index = torch.tensor(who, dtype=torch.int64, device="cpu")
        everyone = len(who) == len(left)
        chunk = state if everyone else State(*(tensor[index] for tensor in state.tensors()))
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
    q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, *, new: _New, chunk: State
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
    # 0 times what is not finite is NaN: a row that is to come must not reach those before it
    lost = ~updates.isfinite()
    known = _products(reads, updates.masked_fill(lost, 0.0), new.counts)
    out = torch.exp(sums) * read_q + known
    if lost.any():
        out = out.masked_fill((visible.unsqueeze(3) & lost.unsqueeze(2)).any(-1), torch.nan)
    return out.transpose(1, 2)


def _decay_sums(g: Tensor, new: _New, chunk: State) -> Tensor:
    """G of the new rows, [n, M, HV]: one addition after the other."""
    first = new.places[:, 0]
    last = chunk.decays[torch.arange(len(g), device="cpu"), (first - 1).clamp(min=0)]
    running = torch.where((first > 0)[:, None], last, 0.0)
    sums = torch.empty_like(g)
    for row in range(g.shape[1]):
        running = running + g[:, row]
        sums[:, row] = running
    return sums


def _substitute(right: Tensor, solve: Tensor, new: _New, chunk: State) -> None:
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


def _close(chunk: State, closed: Tensor) -> None:
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
