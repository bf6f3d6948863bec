"""`isomodels::rope_qkv` and `isomodels::rope_qkv_to_cache`: `rope` on a fused projection."""

import torch
from torch import Tensor

from isomodels.kernels.rope import rope, rope_table
from isomodels.kernels.rope_qkv import rope_qkv, rope_qkv_backward, rope_qkv_to_cache
from isomodels.validate.battery import Place
from isomodels.validate.cases import Case, Inputs, row_operation
from isomodels.validate.operations.rms_norm import EPS
from isomodels.validate.operations.rope import POSITIONS
from isomodels.validate.operations.rope import exact as exact_rope

# (query heads, kv heads, head_dim, qk-norm): Qwen3, and MiMo, which has no norm
_SMALL = ((3, 1, 40, 1), (1, 1, 10, 0), (4, 2, 64, 1))
_REAL = ((32, 8, 128, 1), (32, 8, 128, 0))
_PAGE = 16


def exact(
    qkv: Tensor, positions: Tensor, table: Tensor, heads: int, weights: tuple[Tensor, ...]
) -> list[Tensor]:
    """q, k and v by rope's definition."""
    kv_heads = (qkv.shape[1] - heads) // 2
    q, k, v = qkv.split((heads, kv_heads, kv_heads), 1)
    q_weight, k_weight = weights or (None, None)
    return [
        exact_rope(q, positions, table, q_weight),
        exact_rope(k, positions, table, k_weight),
        v,
    ]


def _arguments(
    draw: Inputs, heads: int, kv_heads: int, head_dim: int, norm: int
) -> tuple[Tensor, tuple[Tensor, Tensor], tuple[Tensor, ...]]:
    """(table, rows, weights)."""
    table = rope_table(head_dim, 1e6, POSITIONS).to(draw.place.device)
    qkv = draw.floats(draw.num_rows, heads + 2 * kv_heads, head_dim)
    weights = [draw.floats(head_dim, seed=i, kind="normal") for i in (1, 2)] if norm else []
    return table, (qkv, draw.integers(POSITIONS)), tuple(weights)


@row_operation("rope_qkv", "rope_qkv_backward", small=_SMALL, real=_REAL, gradient_roundings=4)
def fused(draw: Inputs, heads: int, kv_heads: int, head_dim: int, norm: int) -> Case:
    """The three parts side by side."""
    table, rows, weights = _arguments(draw, heads, kv_heads, head_dim, norm)

    def run(qkv: Tensor, positions: Tensor, *pair: Tensor) -> Tensor:
        return torch.cat(rope_qkv(qkv, positions, table, *(pair or (None, None)), heads, EPS), 1)

    def backward(grad: Tensor, qkv: Tensor, positions: Tensor, *pair: Tensor) -> list[Tensor]:
        parts = [x.contiguous() for x in grad.split((heads, kv_heads, kv_heads), 1)]
        args = (*parts, qkv, positions, table, *(pair or (None, None)), EPS)
        return list(rope_qkv_backward(*args))[: 1 + len(pair)]

    return Case(
        run=run,
        exact=lambda qkv, at, *pair: torch.cat(exact(qkv, at, table, heads, pair), 1),
        rows=rows,
        shared=weights,
        terms=head_dim + heads * draw.num_rows,
        backward=backward,
    )


@fused.check("rope")
def is_rope_on_the_parts(place: Place) -> None:
    """The bits of `rope` on queries and keys; values are copied; all from a view."""
    heads, kv_heads, head_dim = (32, 8, 128) if place.on_gpu else (4, 2, 32)
    for dtype in place.dtypes:
        draw = Inputs(place, dtype, "wide", place.few_rows)
        table, (qkv, at), weights = _arguments(draw, heads, kv_heads, head_dim, 1)
        wide = torch.cat((qkv.flip(0), qkv), 1)[:, qkv.shape[1] :]
        q, k, v = qkv.split((heads, kv_heads, kv_heads), 1)
        parts = (
            rope(q.contiguous(), at, table, weights[0], EPS),
            rope(k.contiguous(), at, table, weights[1], EPS),
            v.contiguous(),
        )
        for stored in (qkv, wide):
            whole = rope_qkv(stored, at, table, *weights, heads, EPS)
            for name, one, right in zip("qkv", whole, parts, strict=True):
                place.same(one, right, f"{dtype} {name}")


@row_operation("rope_qkv_to_cache", small=_SMALL, real=_REAL, trainable=False)
def cached(draw: Inputs, heads: int, kv_heads: int, head_dim: int, norm: int) -> Case:
    """The three parts and, once more, keys and values as the pages hold them."""
    table, rows, weights = _arguments(draw, heads, kv_heads, head_dim, norm)

    def run(qkv: Tensor, positions: Tensor, *pair: Tensor) -> Tensor:
        slots = torch.arange(len(qkv), device=qkv.device).flip(0) + 3
        shape = (len(qkv) // _PAGE + 2, kv_heads, _PAGE, 2 * head_dim)
        cache = qkv.new_zeros(shape)
        args = (qkv, positions, table, *(pair or (None, None)), heads, EPS)
        parts = rope_qkv_to_cache(*args, cache, slots)
        held = cache[slots // _PAGE, :, slots % _PAGE]  # [T, kv_heads, 2D]
        return torch.cat((*parts, *held.split(head_dim, -1)), 1)

    def exactly(qkv: Tensor, positions: Tensor, *pair: Tensor) -> Tensor:
        q, k, v = exact(qkv, positions, table, heads, pair)
        return torch.cat((q, k, v, k, v), 1)

    return Case(run=run, exact=exactly, rows=rows, shared=weights, terms=head_dim)
