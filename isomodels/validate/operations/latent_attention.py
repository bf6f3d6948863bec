"""Latent attention, whole and over an engine's pages of latents."""

from collections.abc import Iterable

import torch
from torch import Tensor

from isomodels.kernels.mla_attention import (
    mla_attention,
    paged_mla_attention,
    write_latent_cache,
)
from isomodels.validate.battery import Place, operation
from isomodels.validate.bits import assert_same_bits
from isomodels.validate.cases import Inputs
from isomodels.validate.inputs import KINDS, numbers
from isomodels.validate.pages import Pages
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
