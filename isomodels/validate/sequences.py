"""Packed sequences and the same tokens in an engine's pages: what attention's checks run on."""

import itertools

import torch
from torch import Tensor

from isomodels.kernels.attention import attention, paged_attention, write_kv_cache
from isomodels.validate.battery import Place
from isomodels.validate.pages import Pages

Heads = tuple[int, int, int]  # kv heads, query heads a kv head, head_dim
Run = tuple[int, int, int]  # sequence, first new position, end
# How [block, head, slot, channel] of a cache lie in memory.
ORDERS = [(0, 1, 2, 3), (0, 2, 1, 3), (1, 0, 2, 3)]


class Sequences:
    """Random sequences of given lengths.

    Attributes:
        q: [T, heads, D]; k, v: [T, kv_heads, D].
        bounds: [sequences + 1] int32.
        scale: of the scores.
    """

    def __init__(
        self,
        place: Place,
        lengths: list[int],
        heads: Heads,
        dtype: torch.dtype,
        *,
        kind: str = "normal",
        seed: int = 0,
    ):
        kv_heads, group, head_dim = heads
        self.place, self.lengths = place, lengths
        self.q, self.k, self.v = (
            place.hard(sum(lengths), count, head_dim, kind=kind, seed=seed + i, dtype=dtype)
            for i, count in enumerate((kv_heads * group, kv_heads, kv_heads))
        )
        self.scale = head_dim**-0.5
        self.starts = [0, *itertools.accumulate(lengths)]
        self.bounds = self.int32(self.starts)
        self.pages: Pages | None = None

    def int32(self, values: list[int]) -> Tensor:
        """On the device of the sequences."""
        return torch.tensor(values, dtype=torch.int32, device=self.place.device)

    def packed(self) -> Tensor:
        """Attention of whole sequences, as a trainer runs it: [T, heads, D]."""
        return attention(self.q, self.k, self.v, self.bounds, self.scale)[0]

    def of(self, order: list[int]) -> Tensor:
        """Attention of some of the sequences packed in another order, rows in that order."""
        at = self.rows(order)
        bounds = self.int32([0, *itertools.accumulate(self.lengths[i] for i in order)])
        return attention(self.q[at], self.k[at], self.v[at], bounds, self.scale)[0]

    def rows(self, order: list[int]) -> Tensor:
        """Indices of the tokens of some sequences, one after the other."""
        parts = [torch.arange(self.starts[i], self.starts[i + 1]) for i in order]
        return torch.cat([torch.empty(0, dtype=torch.int64), *parts]).to(self.place.device)

    def fill(
        self, block_size: int = 16, order: int = 0, seed: int = 0, *, by_kernel: bool = True
    ) -> None:
        """Put all keys and values into new pages."""
        kv_heads, head_dim = self.k.shape[1:]
        self.pages = Pages(
            self.lengths,
            kv_heads,
            head_dim,
            block_size,
            self.k.dtype,
            order=ORDERS[order],
            seed=seed,
            device=self.place.device,
        )
        slots = torch.cat([self.pages.slots(i, 0, n) for i, n in enumerate(self.lengths)])
        if by_kernel:
            write_kv_cache(self.k, self.v, self.pages.cache, slots)
            return
        kv = torch.cat((self.k, self.v), -1)
        self.pages.cache[slots // block_size, :, slots % block_size] = kv

    def step(
        self, runs: list[Run], *, padding: int = 0, bound_k: int | None = None
    ) -> tuple[Tensor, Tensor]:
        """One engine step over the pages.

        Args:
            runs: new tokens of sequences.
            padding: rows and sequences of no tokens that follow, as in a padded batch.
            bound_k: a looser upper bound of the lengths.

        Returns:
            (output [T, heads, D], the rows of `packed` that it must equal).
        """
        assert self.pages is not None
        parts = [torch.arange(self.starts[s] + a, self.starts[s] + b) for s, a, b in runs]
        at = torch.cat(parts).to(self.place.device)
        counts = [b - a for _, a, b in runs] + [0] * padding
        ends = [b for _, _, b in runs] + [0] * padding
        table = self.pages.block_table[[s for s, _, _ in runs] + [0] * padding]
        q = torch.cat((self.q[at], self.q.new_full((padding, *self.q.shape[1:]), torch.nan)))
        bounds = self.int32([0, *itertools.accumulate(counts)])
        out = paged_attention(
            q,
            self.pages.cache,
            table,
            bounds,
            self.int32(ends),
            self.scale,
            max(counts),
            bound_k or max(ends),
        )
        return out[: len(at)], at

    def exact(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """Attention by its definition in the dtype of q: [T, heads, D]."""
        return torch.cat([x for x, _ in _by_definition(q, k, v, self.lengths, self.scale)])

    def right(self) -> Tensor:
        """The output in fp64."""
        return self.exact(self.q.double(), self.k.double(), self.v.double())

    def right_lse(self) -> Tensor:
        """Log-sum-exp of the scores in fp64, [T, heads]."""
        arguments = (self.q.double(), self.k.double(), self.v.double())
        return torch.cat([x for _, x in _by_definition(*arguments, self.lengths, self.scale)])

    def whole_runs(self) -> list[Run]:
        """Every sequence from its start to its end."""
        return [(s, 0, n) for s, n in enumerate(self.lengths) if n]

    def single_rows(self, count: int) -> list[Run]:
        """About `count` decode steps a sequence, those at its end among them."""
        return [
            (s, p, p + 1)
            for s, n in enumerate(self.lengths)
            for p in sorted({*range(0, n, max(1, n // count)), *range(max(0, n - 2), n)})
        ]


def _by_definition(
    q: Tensor, k: Tensor, v: Tensor, lengths: list[int], scale: float
) -> list[tuple[Tensor, Tensor]]:
    """Causal attention in the dtype of q, by sequence: (output [n, heads, D], lse [n, heads])."""
    done = []
    for rows in zip(*(x.split(lengths) for x in (q, k, v)), strict=True):
        one, keys, values = (x.transpose(0, 1) for x in rows)  # [heads, n, D]
        group = len(one) // len(keys)
        keys, values = (x.repeat_interleave(group, 0) for x in (keys, values))
        scores = one @ keys.transpose(1, 2) * scale
        hidden = torch.ones(scores.shape[1:], dtype=torch.bool, device=q.device).triu(1)
        scores = scores.masked_fill(hidden, -torch.inf)
        out = (scores.softmax(-1) @ values).transpose(0, 1)
        done.append((out, scores.logsumexp(-1).t()))
    return done
