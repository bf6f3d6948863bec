"""Latent attention, whole and over an engine's pages of latents."""

from collections.abc import Iterable

import torch
from torch import Tensor

from isomodels.kernels.mla_attention import (
    mla_attention,
    paged_mla_attention,
    write_latent_cache,
)
from isomodels.validate.accuracy import assert_close
from isomodels.validate.battery import GRAPH, Place, operation
from isomodels.validate.bits import Fault, assert_same_bits
from isomodels.validate.cases import Inputs
from isomodels.validate.inputs import KINDS, numbers
from isomodels.validate.pages import Pages
from isomodels.validate.rows import assert_same_in_a_graph
from isomodels.validate.sequences import ORDERS
from isomodels.validate.streams import Engine, Stream, Tokens, stream_operation


# (heads, nope, rope, value size, rank)
@stream_operation(
    "mla_attention",
    "paged_mla_attention",
    "mla_attention_backward",
    sizes=((4, 24, 8, 40, 48), (1, 32, 16, 32, 128)),
    kinds=("normal", "subnormal", "zeros", "ties", "tiny"),
    gradient_roundings=4,
)
def latent(draw: Inputs, heads: int, nope: int, rope: int, value: int, rank: int) -> Stream:
    """One latent and one rotated key a token, shared by all heads."""
    count, scale = draw.num_rows, (nope + rope) ** -0.5
    shapes = ((count, heads, nope), (count, heads, rope), (count, rank), (count, rope))
    tokens = [draw.floats(*shape, seed=i) for i, shape in enumerate(shapes)]
    if draw.kind == "numbers":  # scores within a few units
        tokens = [x.clamp(-2.0, 2.0) for x in tokens]
    kv_b = draw.floats(heads * (nope + value), rank, seed=9, kind="normal").clamp(-4.0, 4.0) / 8

    def run(*arguments: Tensor) -> Tensor:
        return mla_attention(*arguments, scale)[0]

    def exact(
        q_nope: Tensor, q_rope: Tensor, latent: Tensor, k_rope: Tensor, kv_b: Tensor
    ) -> Tensor:
        expanded = (latent @ kv_b.t()).view(len(latent), heads, -1)
        keys = torch.cat((expanded[..., :nope], k_rope[:, None].expand(-1, heads, -1)), 2)
        q, k, v = (
            x.transpose(0, 1) for x in (torch.cat((q_nope, q_rope), 2), keys, expanded[..., nope:])
        )
        scores = q @ k.transpose(1, 2) * scale
        hidden = torch.ones(scores.shape[1:], dtype=torch.bool, device=q.device).triu(1)
        return (scores.masked_fill(hidden, -torch.inf).softmax(-1) @ v).transpose(0, 1)

    def engine(lengths: list[int]) -> Engine:
        width = (rank + rope) // 2
        pages = Pages(lengths, 1, width, 16, kv_b.dtype, order=ORDERS[1], device=kv_b.device)

        def step(who: list[int], new: Tokens, counts: list[int], done: list[int]) -> Tensor:
            edges = zip(who, counts, done, strict=True)
            slots = torch.cat([pages.slots(i, end - n, end) for i, n, end in edges])
            write_latent_cache(new[2], new[3], pages.cache, slots)
            bounds = torch.tensor([0, *counts], dtype=torch.int32, device=kv_b.device)
            ends = torch.tensor(done, dtype=torch.int32, device=kv_b.device)
            args = (pages.block_table[who], bounds.cumsum(0).int(), ends, scale)
            return paged_mla_attention(*new[:2], pages.cache, kv_b, *args, max(counts), max(done))

        return step

    return Stream(run, exact, tuple(tokens), (kv_b,), engine)


_whole, _steps = latent
# (heads, nope, rope, value size, rank)
_SMALL, _GLM, _DEEPSEEK = (2, 16, 8, 16, 32), (20, 192, 64, 256, 512), (128, 128, 64, 128, 512)


class _History:
    """Sequences in pages, and the output of every row of theirs by the packed operation."""

    def __init__(
        self, place: Place, lengths: list[int], sizes: tuple[int, ...], block_size: int = 16,
        order: int = 1,
    ):  # fmt: skip
        heads, nope, rope, value, rank = sizes
        count, self.scale = sum(lengths), (nope + rope) ** -0.5
        shapes = ((count, heads, nope), (count, heads, rope), (count, rank), (count, rope))
        drawn = [place.hard(*x, seed=i, dtype=place.sharp) for i, x in enumerate(shapes)]
        self.tokens = [x.clamp(-2.0, 2.0) for x in drawn]
        weight = place.hard(heads * (nope + value), rank, seed=9, dtype=place.sharp)
        self.kv_b = weight / 8
        self.lengths, self.place = lengths, place
        self.starts = [sum(lengths[:i]) for i in range(len(lengths))]
        self.pages = Pages(
            lengths, 1, (rank + rope) // 2, block_size, place.sharp, order=ORDERS[order],
            device=place.device,
        )  # fmt: skip
        slots = torch.cat([self.pages.slots(i, 0, n) for i, n in enumerate(lengths)])
        write_latent_cache(self.tokens[2], self.tokens[3], self.pages.cache, slots)

    def int32(self, values: list[int]) -> Tensor:
        return torch.tensor(values, dtype=torch.int32, device=self.place.device)

    def packed(self) -> Tensor:
        bounds = self.int32([*self.starts, sum(self.lengths)])
        return mla_attention(*self.tokens, self.kv_b, bounds, self.scale)[0]

    def step(self, runs: list[tuple[int, int, int]]) -> tuple[Tensor, Tensor]:
        """Runs of (sequence, first new position, end) -> their rows, and which of all they are."""
        parts = [torch.arange(self.starts[s] + a, self.starts[s] + b) for s, a, b in runs]
        at = torch.cat(parts).to(self.place.device)
        counts, ends = [b - a for _, a, b in runs], [b for _, _, b in runs]
        table = self.pages.block_table[[s for s, _, _ in runs]]
        bounds = self.int32([0, *counts]).cumsum(0).int()
        args = (self.pages.cache, self.kv_b, table, bounds, self.int32(ends), self.scale)
        out = paged_mla_attention(
            self.tokens[0][at], self.tokens[1][at], *args, max(counts), max(ends)
        )
        return out, at


@_steps.check("pages")
def sizes_orders_and_places_of_pages(place: Place) -> None:
    """Where latents lie moves no bit: sizes of pages and their strides, at the sizes of models."""
    lengths = [300, 2500] if place.on_gpu and not place.brief else [5, 70]
    # Each size of page is compiled anew on a GPU.
    shapes = [(_GLM, 16), (_GLM, 64), (_DEEPSEEK, 64)]
    if not place.on_gpu:
        shapes = [(_SMALL, size) for size in ((16, 64) if place.interpreted else (16, 48, 64, 128))]
    for sizes, block_size in shapes:
        for order in (1,) if place.interpreted else range(len(ORDERS)):
            one = _History(place, lengths, sizes, block_size, order)
            whole = one.packed()
            where = f"{list(sizes)}, pages of {block_size}, order {ORDERS[order]}"
            for what, first in (("prefix hit", lambda n: n // 2), ("decode", lambda n: n - 1)):
                out, at = one.step([(s, first(n), n) for s, n in enumerate(lengths)])
                place.same(out, whole[at], f"{where}: {what}")


@_steps.check("segments")
def a_long_history(place: Place) -> None:
    """Around the end of the segment that decode may run in parallel, and against fp64."""
    if place.interpreted:  # too slow there
        return
    sizes = _GLM if place.on_gpu else _SMALL
    one = _History(place, [2110], sizes)
    whole = one.packed()
    for position in (2046, 2047, 2048, 2049, 2109):
        out, at = one.step([(0, position, position + 1)])
        place.same(out, whole[at], f"decode at {position}")
    out, at = one.step([(0, 2040, 2110)])
    place.same(out, whole[at], "chunk from 2040")
    q_nope, q_rope, latent, k_rope, kv_b = (x.double() for x in (*one.tokens, one.kv_b))
    w_uk, w_uv = kv_b.view(sizes[0], -1, kv_b.shape[1]).split(sizes[1:4:2], 1)
    absorbed = torch.einsum("hn,hnr->hr", q_nope[-1], w_uk)
    scores = (absorbed @ latent.t() + q_rope[-1] @ k_rope.t()) * one.scale
    right = torch.einsum("hr,hvr->hv", scores.softmax(-1) @ latent, w_uv)
    limit = 2e-2 if place.sharp == torch.bfloat16 else 1e-5
    assert_close(whole[-1], right, limit, "the last row")


@_steps.check(GRAPH)
def decode_in_a_graph(place: Place) -> None:
    """One captured decode step, replayed for other sequences, lengths and padding."""
    one, size = _History(place, [2600, 700, 40], _GLM), 8
    whole, device = one.packed(), place.device
    queries = [
        torch.zeros(size, *x.shape[1:], dtype=x.dtype, device=device) for x in one.tokens[:2]
    ]
    all_tables = one.pages.block_table
    tables = torch.zeros(size, all_tables.shape[1], dtype=torch.int32, device=device)
    bounds, lengths = one.int32([0] * (size + 1)), one.int32([0] * size)

    def call() -> Tensor:
        args = (one.pages.cache, one.kv_b, tables, bounds, lengths, one.scale)
        return paged_mla_attention(*queries, *args, 1, 32768)

    call()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = call()
    for rows in ([(0, 2599), (1, 699), (2, 3)], [(0, p) for p in range(2044, 2052)], [(2, 0)]):
        count = len(rows)
        at = torch.tensor([one.starts[s] + p for s, p in rows], device=device)
        for held, x in zip(queries, one.tokens, strict=False):
            held[:count], held[count:] = x[at], torch.nan
        tables[:count] = all_tables[[s for s, _ in rows]]
        lengths.zero_()
        lengths[:count] = one.int32([p + 1 for _, p in rows])
        bounds.copy_(torch.arange(size + 1, device=device).clamp(max=count))
        graph.replay()
        assert_same_bits(out[:count], whole[at], f"replay of {rows}")
        if out[count:].any():
            raise Fault(f"replay of {rows}: rows of padding are not zero")


write = operation("write_latent_cache", trainable=False)
_TOKENS, _RANK, _ROPE = 37, 48, 8


def _write(place: Place, dtype: torch.dtype, kind: str, order: int, reverse: bool = False) -> None:
    """Latents and keys arrive as they are, and no other slot changes."""
    latent = place.hard(_TOKENS, _RANK, kind=kind, dtype=dtype)
    k_rope = place.hard(_TOKENS, _ROPE, kind=kind, seed=1, dtype=dtype)
    latent[3], k_rope[4] = torch.nan, -torch.inf
    width = (_RANK + _ROPE) // 2
    pages = Pages([_TOKENS], 1, width, 16, dtype, order=ORDERS[order], device=place.device)
    slots = pages.slots(0, 0, _TOKENS)
    expected = pages.cache.clone()
    expected[slots // 16, 0, slots % 16] = torch.cat((latent, k_rope), 1)
    if reverse:
        latent, k_rope, slots = (x.flip(0) for x in (latent, k_rope, slots))
    for part in (slice(0, 0), slice(0, 5), slice(5, _TOKENS)):
        write_latent_cache(latent[part], k_rope[part], pages.cache, slots[part])
    assert_same_bits(pages.cache, expected, f"{kind} {dtype}, order {ORDERS[order]}")


@write.check("invariance")
def any_order_and_cut(place: Place) -> None:
    """Tokens in any order and in several steps."""
    for reverse in (False, True):
        _write(place, place.sharp, "wide", 0, reverse)


@write.check("degenerate")
def strides(place: Place) -> None:
    """Caches of other strides; a step of no tokens is among those of every check."""
    for order in range(len(ORDERS)):
        _write(place, place.sharp, "wide", order)


@write.check("hazards")
def every_value(place: Place) -> None:
    """NaN, infinities, subnormals and signed zeros."""
    for kind in KINDS:
        _write(place, place.sharp, kind, 0)


@write.check("accuracy")
def every_dtype(place: Place) -> None:
    """A copy has no error."""
    for dtype in place.dtypes:
        _write(place, dtype, "normal", 0)


@write.check(GRAPH)
def same_in_a_graph(place: Place) -> None:
    """Replayed with other latents."""
    width = (_RANK + _ROPE) // 2
    pages = Pages([_TOKENS], 1, width, 16, torch.bfloat16, device=place.device)
    slots = pages.slots(0, 0, _TOKENS)
    parts = [place.hard(_TOKENS, n, seed=n, dtype=torch.bfloat16) for n in (_RANK, _ROPE)]

    def written(latent: Tensor, k_rope: Tensor) -> Tensor:
        write_latent_cache(latent, k_rope, pages.cache, slots)
        return pages.cache[slots // 16, 0, slots % 16]

    assert_same_in_a_graph(written, *parts)


def outputs(place: Place) -> Iterable[Tensor]:
    """The cache after a write of fixed values."""
    for dtype in (torch.float32, torch.bfloat16):
        cache = torch.zeros(4, 1, 16, _RANK + _ROPE, dtype=dtype, device=place.device)
        parts = [
            numbers(_TOKENS, n, seed=n, dtype=dtype, device=place.device) for n in (_RANK, _ROPE)
        ]
        write_latent_cache(*parts, cache, torch.arange(_TOKENS, device=place.device) + 3)
        yield cache


write.outputs = outputs
