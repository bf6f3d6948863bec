"""`isomodels::paged_attention`: the newest tokens of each sequence over an engine's pages.

What it must give is what `isomodels::attention` gives for the same tokens, so that the engine's
prefill, chunks, prefix hits and decode have the trainer's bits.
"""

from collections.abc import Iterable

import torch
from torch import Tensor

from isomodels.kernels.attention import paged_attention
from isomodels.validate.accuracy import assert_close
from isomodels.validate.battery import GRAPH, Place, operation
from isomodels.validate.bits import Fault, assert_same_bits
from isomodels.validate.operations.attention import (
    fixed_sequences,
    hard_sequences,
    layouts_of_heads,
    moderate,
)
from isomodels.validate.sequences import ORDERS, Sequences

checks = operation("paged_attention", trainable=False, long=True)


@checks.check("invariance")
def every_way_through_the_pages(place: Place) -> None:
    """Prefill in one step, in chunks, row by row; alone, mixed, padded, loosely bounded."""
    for heads, dtype, lengths in layouts_of_heads(place):
        one = Sequences(place, lengths, heads, dtype)
        whole = one.packed()
        one.fill()
        label = f"{str(dtype).removeprefix('torch.')} heads {list(heads)}"
        _prefill_and_chunks(place, one, whole, label)
        _decode_and_mixed(place, one, whole, label)


def _prefill_and_chunks(place: Place, one: Sequences, whole: Tensor, label: str) -> None:
    out, at = one.step(one.whole_runs())
    place.same(out, whole[at], f"{label}: prefill in one step")
    sizes = (100, 1000) if place.on_gpu else (50,) if place.brief else (7, 64, 100)
    for size in sizes[-1:] if place.brief else sizes:
        for turn in range(0, max(one.lengths), size):
            runs = [(s, turn, min(n, turn + size)) for s, n in enumerate(one.lengths) if n > turn]
            out, at = one.step(runs)
            place.same(out, whole[at], f"{label}: chunk of {size} from {turn}")


def _decode_and_mixed(place: Place, one: Sequences, whole: Tensor, label: str) -> None:
    rows = one.single_rows(2 if place.brief else 20)
    loose = (3, 40_000)
    for padding, bound in (loose,) if place.interpreted else ((0, None), loose):
        out, at = one.step(rows, padding=padding, bound_k=bound)
        place.same(out, whole[at], f"{label}: decode, {padding} rows of padding")
    for row in rows[-1:] if place.brief else rows[-4:]:
        out, at = one.step([row])
        place.same(out, whole[at], f"{label}: decode of one row {row}")
    mixed = [*rows[::3], *((s, n // 3, n) for s, n in enumerate(one.lengths) if n > 1)]
    out, at = one.step(mixed, padding=2)
    place.same(out, whole[at], f"{label}: decode rows among chunks")


@checks.check("pages")
def sizes_orders_and_places_of_pages(place: Place) -> None:
    """Where keys lie moves no bit: page sizes, strides, and other pages after a preemption."""
    heads = (2, 4, 128) if place.on_gpu else (1, 2, 32)
    lengths = [300, 2500] if place.on_gpu and not place.brief else [5, 70]
    one = Sequences(place, lengths, heads, place.sharp)
    whole = one.packed()
    sizes = (16,) if place.brief else (16, 48, 528) if place.on_gpu else (16, 48, 128)
    for block_size in sizes:
        for order in (1,) if place.interpreted else range(len(ORDERS)):
            for seed in (1,) if place.interpreted else (0, 1):
                one.fill(block_size, order, seed)
                where = f"pages of {block_size}, order {ORDERS[order]}, allocation {seed}"
                out, at = one.step([(s, n // 2, n) for s, n in enumerate(lengths)])
                place.same(out, whole[at], f"{where}: prefix hit")
                out, at = one.step([(s, n - 1, n) for s, n in enumerate(lengths)])
                place.same(out, whole[at], f"{where}: decode")


@checks.check("segments")
def a_long_history(place: Place) -> None:
    """Past the segment that decode may run in parallel: the last rows against fp64."""
    one = Sequences(place, [2100], (1, 4, 128) if place.on_gpu else (1, 2, 32), place.sharp)
    right = one.right()[-2:]
    one.fill(by_kernel=not place.interpreted)  # the interpreter runs one program a token
    limit = 1e-2 if place.sharp == torch.bfloat16 else 1e-5
    for first in (2098, 2099):  # a chunk, a decode step
        out, _ = one.step([(0, first, 2100)])
        assert_close(out, right[first - 2098 :], limit, f"rows {first} to 2099")


@checks.check("degenerate")
def no_tokens_and_strides(place: Place) -> None:
    """No new tokens, and queries that are a view of a fused projection."""
    dim = 128 if place.on_gpu else 32
    one = Sequences(place, [40, 20], (2, 4, dim), place.sharp)
    whole = one.packed()
    one.fill()
    assert one.pages is not None
    arguments = (one.pages.cache, one.pages.block_table)
    lengths, none = one.int32([40, 20]), one.int32([0, 0, 0])
    out = paged_attention(one.q[:0], *arguments, none, lengths, one.scale, 0, 40)
    if out.shape != (0, 8, dim):
        raise Fault(f"no new tokens: shape {list(out.shape)}")
    view = torch.cat((one.q, one.k, one.v), 1)[:, :8]
    out = paged_attention(view, *arguments, one.bounds, lengths, one.scale, 40, 40)
    place.same(out, whole, "a view of qkv")


@checks.check("hazards")
def hard_values(place: Place) -> None:
    """Each kind of values, row by row and in chunks, among pages of NaN."""
    for name, one in hard_sequences(place):
        whole = one.packed()
        one.fill()
        out, at = one.step(one.single_rows(10 if place.brief else 50))
        place.same(out, whole[at], f"{name}: decode")
        out, at = one.step([(0, 33, one.lengths[0])])
        place.same(out, whole[at], f"{name}: chunk")


@checks.check("accuracy")
def against_fp64(place: Place) -> None:
    """Prefill over pages and decode."""
    for one, limit, label in moderate(place):
        right = one.right()
        one.fill()
        for runs in (one.whole_runs(), one.single_rows(20)):
            out, at = one.step(runs)
            assert_close(out, right[at], limit, label)


@checks.check(GRAPH)
def decode_in_a_graph(place: Place) -> None:
    """One captured decode step, replayed for other sequences, lengths and padding."""
    one = Sequences(place, [2600, 700, 40], (2, 4, 128), torch.bfloat16)
    whole, size = one.packed(), 8
    one.fill()
    assert one.pages is not None
    cache, all_tables = one.pages.cache, one.pages.block_table
    q = torch.zeros(size, *one.q.shape[1:], dtype=torch.bfloat16, device=place.device)
    tables = torch.zeros(size, all_tables.shape[1], dtype=torch.int32, device=place.device)
    bounds, lengths = one.int32([0] * (size + 1)), one.int32([0] * size)

    def call() -> Tensor:
        return paged_attention(q, cache, tables, bounds, lengths, one.scale, 1, 32768)

    call()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = call()
    for rows in ([(0, 2599), (1, 699), (2, 3)], [(0, p) for p in range(2044, 2052)], [(2, 0)]):
        count = len(rows)
        at = torch.tensor([one.starts[s] + p for s, p in rows], device=place.device)
        q[:count], q[count:] = one.q[at], torch.nan
        tables[:count] = all_tables[[s for s, _ in rows]]
        lengths.zero_()
        lengths[:count] = one.int32([p + 1 for _, p in rows])
        bounds.copy_(torch.arange(size + 1, device=place.device).clamp(max=count))
        graph.replay()
        assert_same_bits(out[:count], whole[at], f"replay of {rows}")
        if out[count:].any():
            raise Fault(f"replay of {rows}: rows of padding are not zero")


def outputs(place: Place) -> Iterable[Tensor]:
    """Of the fixed sequences of `attention`, as a step of decode rows and a chunk."""
    for one in fixed_sequences(place):
        one.fill()
        yield one.step([(0, 0, 1), (1, 16, 17), (2, 50, 130)])[0]


checks.outputs = outputs
