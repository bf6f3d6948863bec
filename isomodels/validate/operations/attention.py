"""`isomodels::attention`: whole sequences, packed, as a trainer runs them."""

from collections.abc import Iterable, Iterator

import torch
from torch import Tensor

from isomodels.kernels.attention import attention, attention_backward
from isomodels.validate.accuracy import (
    assert_close,
    assert_gradients,
    gradients,
    seed_of,
    unit_error,
)
from isomodels.validate.battery import GRAPH, Place, named, operation
from isomodels.validate.bits import Fault
from isomodels.validate.inputs import KINDS, numbers, odd_storage
from isomodels.validate.rows import assert_same_in_a_graph
from isomodels.validate.sequences import Heads, Sequences

checks = operation("attention", "attention_backward", long=True)

# Around one row, a tile, the KV block of 64, pages, the segment of 2,048, and several.
_TINY = [1, 0, 67, 5]
_SMALL = [1, 17, 64, 0, 5, 129, 16, 300, 65]
_LARGE = [1, 17, 128, 129, 0, 700, 2048, 2049, 5000]
# Qwen3-8B's and MiMo's layout first, then others that the kernels have.
_GPU_HEADS: list[Heads] = [(8, 4, 128), (2, 1, 32), (4, 2, 64), (2, 5, 128), (1, 8, 256)]
_CPU_HEADS: list[Heads] = [(2, 2, 32), (1, 4, 128), (1, 3, 40)]


def layouts_of_heads(place: Place) -> Iterator[tuple[Heads, torch.dtype, list[int]]]:
    """(heads, dtype, lengths) of every case."""
    if place.interpreted:
        yield (1, 2, 32), torch.float32, _TINY
    elif place.on_gpu and place.brief:
        yield (2, 4, 128), torch.bfloat16, [1, 17, 129, 0, 700, 2100]
    elif place.on_gpu:
        yield from ((heads, torch.bfloat16, _LARGE) for heads in _GPU_HEADS)
        yield (2, 2, 64), torch.float32, [1, 129, 0, 700, 2100]
    elif place.brief:
        yield (2, 2, 32), torch.float32, [1, 17, 0, 70]
    else:
        for heads in _CPU_HEADS:
            yield from ((heads, dtype, _SMALL) for dtype in place.dtypes)


def bound(dtype: torch.dtype, lengths: list[int]) -> float:
    """Of the error; the sum is of probabilities that are rounded to the input's dtype."""
    return unit_error(dtype, max(lengths))


@checks.check("invariance")
def batch_composition(place: Place) -> None:
    """Alone, in another order, among sequences of no tokens, beside a broken one."""
    for heads, dtype, lengths in layouts_of_heads(place):
        one = Sequences(place, lengths, heads, dtype)
        together, label = one.packed(), f"{dtype} heads {heads}"
        place.same(one.packed(), together, f"{label}: second run")
        alone = [one.of([i]) for i in range(len(lengths))]
        place.same(torch.cat(alone), together, f"{label}: packed together against alone")
        turned = [*reversed(range(len(lengths)))]
        place.same(one.of(turned), together[one.rows(turned)], f"{label}: in reverse")
        longest = max(range(len(lengths)), key=lengths.__getitem__)
        start, end = one.starts[longest : longest + 2]
        for x in (one.q, one.k, one.v):
            x[:start], x[end:] = torch.nan, torch.inf
        place.same(one.packed()[start:end], together[start:end], f"{label}: among NaN")


@checks.check("causality")
def later_tokens_do_not_matter(place: Place) -> None:
    """A row's future may hold anything."""
    heads, dtype, lengths = next(iter(layouts_of_heads(place)))
    n = max(lengths)
    one = Sequences(place, [n], heads, dtype)
    whole = one.packed()
    for row in (0, n - 2) if place.brief else (0, 15, 63, 64, n - 2):
        changed = Sequences(place, [n], heads, dtype)
        for x in (changed.q, changed.k, changed.v):
            x[row + 1 :] = x[row + 1 :].flip(0) * 3 + 1
        place.same(changed.packed()[: row + 1], whole[: row + 1], f"up to row {row}")


@checks.check("heads")
def a_kv_head_stands_alone(place: Place) -> None:
    """A rank of tensor parallelism holds some of the heads."""
    kv_heads, group, dim = (1, 2, 32) if place.interpreted else (2, 4, 128 if place.on_gpu else 32)
    one = Sequences(
        place, [70 if place.interpreted else 130], (2 * kv_heads, group, dim), place.sharp
    )
    whole = one.packed()
    for head in range(kv_heads):
        part = slice(head * group, (head + 1) * group)
        keys, values = one.k[:, head : head + 1], one.v[:, head : head + 1]
        alone, _ = attention(one.q[:, part], keys, values, one.bounds, one.scale)
        place.same(alone, whole[:, part].contiguous(), f"kv head {head}")


@checks.check("degenerate")
def few_tokens_and_strides(place: Place) -> None:
    """No tokens, one token, views of a fused projection, other storage."""
    dim = 128 if place.on_gpu else 32
    for lengths in ([0], [0, 0], [1]):
        shape = Sequences(place, lengths, (1, 4, dim), place.sharp).packed().shape
        if shape != (sum(lengths), 4, dim):
            raise Fault(f"sequences of {lengths} tokens: shape {list(shape)}")
    if place.on_gpu and place.brief:
        return  # each alignment of a pointer is compiled anew
    for dtype in place.dtypes:
        one = Sequences(place, [20 if place.interpreted else 100], (2, 4, dim), dtype)
        whole = one.packed()
        fused = torch.cat((one.q, one.k, one.v), 1).split((8, 2, 2), 1)
        stored = {
            "views of qkv": fused,
            "odd offsets": [odd_storage(x) for x in (one.q, one.k, one.v)],
            "heads outermost": [
                x.transpose(0, 1).contiguous().transpose(0, 1) for x in (one.q, one.k, one.v)
            ],
        }
        for name, (q, k, v) in stored.items():
            place.same(attention(q, k, v, one.bounds, one.scale)[0], whole, f"{dtype}: {name}")


def hard_sequences(place: Place) -> Iterator[tuple[str, Sequences]]:
    """One sequence of each kind of values, and one whose scores lie far apart."""
    heads = (1, 4, 128) if place.on_gpu else (1, 2, 32)
    n = 70 if place.brief and not place.on_gpu else 300
    for kind in KINDS:
        one = Sequences(place, [n], heads, place.sharp, kind=kind)
        if kind in ("wide", "huge"):
            # Beyond 2^31 the rounding of a score in powers of two is more than exp2 can take.
            one.q, one.k = (
                place.hard(*x.shape, kind="normal", dtype=x.dtype) for x in (one.q, one.k)
            )
        yield kind, one
    far = Sequences(place, [n], heads, place.sharp)
    far.q *= 500.0
    yield "scores far apart", far


@checks.check("hazards")
def hard_values(place: Place) -> None:
    """Finite values give finite results, and each prefix those of the whole."""
    for name, one in hard_sequences(place):
        whole = one.packed()
        if not torch.isfinite(whole).all():
            at = (~torch.isfinite(whole)).nonzero()[0].tolist()
            raise Fault(f"{name}: not finite at {at} from finite values")
        for count in (1, 64, 65):
            head = one.int32([0, count])
            q, k, v = (x[:count] for x in (one.q, one.k, one.v))
            place.same(attention(q, k, v, head, one.scale)[0], whole[:count], f"{name}: {count}")


def moderate(place: Place) -> Iterator[tuple[Sequences, float, str]]:
    """Sequences that a reference in fp64 has memory for, with the bound of the error."""
    for heads, dtype, lengths in layouts_of_heads(place):
        limit = (700 if place.brief else 2500) if place.on_gpu else 300
        cut = [min(n, limit) for n in lengths[-6:]]
        label = f"{str(dtype).removeprefix('torch.')} heads {list(heads)}"
        yield Sequences(place, cut, heads, dtype), bound(dtype, cut), label


@checks.check("accuracy")
def against_fp64(place: Place) -> None:
    """Outputs and log-sum-exp."""
    for one, limit, label in moderate(place):
        out, lse = attention(one.q, one.k, one.v, one.bounds, one.scale)
        assert_close(out, one.right(), limit, label)
        assert_close(lse, one.right_lse(), limit, f"{label}: log-sum-exp")


@checks.check("gradients")
def gradients_against_fp64(place: Place) -> None:
    """Of q, k and v; equal from run to run. The backward sees the rounded output."""
    for one, limit, label in moderate(place):
        inputs = (one.q, one.k, one.v)

        def run(*x: Tensor, one: Sequences = one) -> Tensor:
            return attention(*x, one.bounds, one.scale)[0]

        with named(label):
            if place.interpreted:
                _interpreted_gradients(one, limit)
            else:
                assert_gradients(run, one.exact, *inputs, bound=2 * limit)


def _interpreted_gradients(one: Sequences, limit: float) -> None:
    inputs = (one.q, one.k, one.v)
    out, lse = attention(*inputs, one.bounds, one.scale)
    right = gradients(one.exact, inputs, torch.float64)
    grad = seed_of(out, inputs)
    actual = attention_backward(grad, *inputs, one.bounds, out, lse, one.scale)
    for name, gradient, exactly in zip("qkv", actual, right, strict=True):
        assert_close(gradient, exactly, 2 * limit, f"d{name}")


@checks.check(GRAPH)
def same_in_a_graph(place: Place) -> None:
    """Replayed with other values."""
    one = Sequences(place, [17, 300], (2, 4, 128), torch.bfloat16)
    assert_same_in_a_graph(
        lambda q, k, v: attention(q, k, v, one.bounds, one.scale)[0], one.q, one.k, one.v
    )


def fixed_sequences(place: Place) -> Iterator[Sequences]:
    """Sequences of fixed values for digests, clamped so that scores stay within a few units."""
    lengths, dim = [1, 17, 130], 128 if place.on_gpu else 32
    for dtype in (torch.bfloat16,) if place.on_gpu else (torch.float32, torch.bfloat16):
        one = Sequences(place, lengths, (2, 4, dim), dtype)
        for name, heads, seed in (("q", 8, 1), ("k", 2, 2), ("v", 2, 3)):
            shape = (sum(lengths), heads, dim)
            fixed = numbers(*shape, seed=seed, dtype=torch.float32, device=place.device)
            setattr(one, name, fixed.clamp(-2.0, 2.0).to(dtype))
        yield one


def outputs(place: Place) -> Iterable[Tensor]:
    """Of the fixed sequences."""
    for one in fixed_sequences(place):
        yield one.packed()


checks.outputs = outputs
