"""`isomodels::write_kv_cache`: copies into pages, so every check is of bits."""

from collections.abc import Iterable

import torch
from torch import Tensor

from isomodels.kernels.attention import write_kv_cache
from isomodels.validate.battery import GRAPH, Place, operation
from isomodels.validate.bits import assert_same_bits
from isomodels.validate.inputs import KINDS, numbers
from isomodels.validate.pages import Pages
from isomodels.validate.rows import assert_same_in_a_graph
from isomodels.validate.sequences import ORDERS

checks = operation("write_kv_cache", trainable=False)
_TOKENS = 37


def _heads(place: Place) -> tuple[int, int]:
    return (8, 128) if place.on_gpu else (2, 32)


def _pages(place: Place, dtype: torch.dtype, block_size: int = 16, order: int = 0) -> Pages:
    where = {"order": ORDERS[order], "device": place.device}
    return Pages([_TOKENS], *_heads(place), block_size, dtype, **where)  # type: ignore[arg-type]


def _assert_written(
    k: Tensor, v: Tensor, pages: Pages, slots: Tensor, what: str, order: Tensor | None = None
) -> None:
    """The slots hold k and v, and no other slot has changed."""
    expected = pages.cache.clone()
    size = pages.block_size
    expected[slots // size, :, slots % size] = torch.cat((k, v), -1)
    if order is not None:
        k, v, slots = k[order], v[order], slots[order]
    write_kv_cache(k, v, pages.cache, slots)
    assert_same_bits(pages.cache, expected, what)


@checks.check("invariance")
def any_order_and_cut(place: Place) -> None:
    """Tokens in any order, and in two steps, end in the same cache."""
    for dtype in place.dtypes:
        heads = _heads(place)
        k, v = (place.hard(_TOKENS, *heads, seed=i, dtype=dtype) for i in (0, 1))
        pages = _pages(place, dtype)
        slots = pages.slots(0, 0, _TOKENS)
        turned = torch.arange(_TOKENS - 1, -1, -1, device=place.device)
        _assert_written(k, v, pages, slots, "in reverse", turned)
        once, pages = pages.cache, _pages(place, dtype)
        for part in (slice(0, 5), slice(5, _TOKENS)):
            write_kv_cache(k[part], v[part], pages.cache, slots[part])
        assert_same_bits(pages.cache, once, "in two steps")


@checks.check("degenerate")
def few_tokens_and_strides(place: Place) -> None:
    """No tokens, one token, views of a fused projection."""
    dtype, heads = place.sharp, _heads(place)
    fused = place.hard(_TOKENS, 4 * heads[0], heads[1], dtype=dtype)
    k, v = fused[:, heads[0] : 2 * heads[0]], fused[:, 3 * heads[0] :]
    for count in (0, 1, _TOKENS):
        pages = _pages(place, dtype)
        slots = pages.slots(0, 0, _TOKENS)[:count]
        _assert_written(k[:count], v[:count], pages, slots, f"{count} tokens of views of qkv")


@checks.check("hazards")
def every_value(place: Place) -> None:
    """NaN, infinities, subnormals and signed zeros arrive as they are."""
    heads = _heads(place)
    for dtype in place.dtypes:
        for kind in KINDS:
            k, v = (place.hard(_TOKENS, *heads, kind=kind, seed=i, dtype=dtype) for i in (0, 1))
            k[3], v[4] = torch.nan, -torch.inf
            pages = _pages(place, dtype)
            _assert_written(k, v, pages, pages.slots(0, 0, _TOKENS), f"{kind} {dtype}")


@checks.check("accuracy")
def every_layout_of_pages(place: Place) -> None:
    """Page sizes and orders of the cache in memory."""
    heads, dtype = _heads(place), place.sharp
    k, v = (place.hard(_TOKENS, *heads, seed=i, dtype=dtype) for i in (0, 1))
    for block_size in (16,) if place.brief else (16, 48, 128):
        for order in range(len(ORDERS)):
            pages = _pages(place, dtype, block_size, order)
            slots = pages.slots(0, 0, _TOKENS)
            _assert_written(k, v, pages, slots, f"pages of {block_size}, order {ORDERS[order]}")


@checks.check(GRAPH)
def same_in_a_graph(place: Place) -> None:
    """Replayed with other keys."""
    pages = _pages(place, torch.bfloat16)
    slots, heads = pages.slots(0, 0, _TOKENS), _heads(place)
    k, v = (place.hard(_TOKENS, *heads, seed=i, dtype=torch.bfloat16) for i in (0, 1))

    def written(k: Tensor, v: Tensor) -> Tensor:
        write_kv_cache(k, v, pages.cache, slots)
        return pages.cache[slots // 16, :, slots % 16]

    assert_same_in_a_graph(written, k, v)


def outputs(place: Place) -> Iterable[Tensor]:
    """The written slots of fixed values."""
    heads = _heads(place)
    for dtype in (torch.float32, torch.bfloat16):
        k, v = (numbers(_TOKENS, *heads, seed=i, dtype=dtype, device=place.device) for i in (1, 2))
        pages = _pages(place, dtype)
        slots = pages.slots(0, 0, _TOKENS)
        write_kv_cache(k, v, pages.cache, slots)
        yield pages.cache[slots // 16, :, slots % 16]


checks.outputs = outputs
