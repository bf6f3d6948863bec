"""`isomodels::rope_qkv` and `isomodels::rope_qkv_to_cache`: `rope` for a fused projection.

The bits of `isomodels::rope` on the queries and on the keys of [q | k | v], in one launch; the
values are copied. A gradient then arrives in one piece too, which a split of the projection would
put together in a pass of its own.
"""

from typing import Any

import torch
from torch import Tensor

from isomodels.kernels.attention import write_kv_cache
from isomodels.kernels.fixed_order import one_thread
from isomodels.kernels.rope import CONSTANTS, TRITON_CONSTANTS, rotated, rotated_backward
from isomodels.kernels.schedule import Schedule, declare

SCHEDULE = declare(Schedule("rope_qkv", "torch", 1, CONSTANTS))
CACHE_SCHEDULE = declare(Schedule("rope_qkv_to_cache", "torch", 1, CONSTANTS))
TRITON_SCHEDULE = declare(Schedule("rope_qkv", "triton", 1, TRITON_CONSTANTS))
TRITON_CACHE_SCHEDULE = declare(Schedule("rope_qkv_to_cache", "triton", 1, TRITON_CONSTANTS))


@torch.library.custom_op("isomodels::rope_qkv", mutates_args=(), device_types="cpu")
def rope_qkv(
    qkv: Tensor,
    positions: Tensor,
    table: Tensor,
    q_weight: Tensor | None,
    k_weight: Tensor | None,
    num_heads: int,
    eps: float,
) -> tuple[Tensor, Tensor, Tensor]:
    """Rotate queries and keys by their token's position, and cut the values off.

    Args:
        qkv: [T, num_heads + 2 * kv_heads, head_dim], float32 or bfloat16.
        positions: [T] int64, each below the table's length.
        table: [max_positions, head_dim] fp32 from `rope.rope_table`.
        q_weight, k_weight: [head_dim] for qk-norm before the rotation, or None for no norm.
        num_heads: of the queries.
        eps: of the qk-norm.

    Returns:
        (q [T, num_heads, head_dim], k and v [T, kv_heads, head_dim]) in the dtype of `qkv`.

    Raises:
        ValueError: naming shapes that do not fit.
        IndexError: for a position outside the table. A GPU, which would have to wait, does not
            check.
    """
    _check(qkv, positions, table, q_weight, k_weight, num_heads)
    q, k, v = _cut(qkv, num_heads)
    with one_thread():
        q = rotated(q, positions, table, q_weight, eps)
        return (
            q,
            rotated(k, positions, table, k_weight, eps),
            v.clone(memory_format=torch.contiguous_format),
        )


@torch.library.custom_op(
    "isomodels::rope_qkv_to_cache", mutates_args=("kv_cache",), device_types="cpu"
)
def rope_qkv_to_cache(
    qkv: Tensor,
    positions: Tensor,
    table: Tensor,
    q_weight: Tensor | None,
    k_weight: Tensor | None,
    num_heads: int,
    eps: float,
    kv_cache: Tensor,
    slot_mapping: Tensor,
) -> tuple[Tensor, Tensor, Tensor]:
    """`rope_qkv`, and its keys and values put into their pages. Not differentiable.

    Args:
        qkv, positions, table, q_weight, k_weight, num_heads, eps: see `rope_qkv`.
        kv_cache: [num_blocks, kv_heads, block_size, 2 * head_dim], dtype of `qkv`; changed.
        slot_mapping: [T] int64, block * block_size + offset.

    Returns:
        As `rope_qkv`.

    Raises:
        TypeError: for a cache of another dtype.
        ValueError, IndexError: as `rope_qkv`.
    """
    q, k, v = rope_qkv(qkv, positions, table, q_weight, k_weight, num_heads, eps)
    _check_cache(qkv, num_heads, kv_cache, slot_mapping)
    write_kv_cache(k, v, kv_cache, slot_mapping)
    return q, k, v


def _cut(qkv: Tensor, num_heads: int) -> tuple[Tensor, ...]:
    kv_heads = (qkv.shape[1] - num_heads) // 2
    return qkv.split((num_heads, kv_heads, kv_heads), dim=1)


def _check(
    qkv: Tensor,
    positions: Tensor,
    table: Tensor,
    q_weight: Tensor | None,
    k_weight: Tensor | None,
    num_heads: int,
) -> None:
    if qkv.dim() != 3 or positions.shape != qkv.shape[:1] or table.shape[1:] != qkv.shape[2:]:
        raise ValueError(
            "rope_qkv needs qkv [T, heads, head_dim], positions [T] and a table "
            "[positions, head_dim], "
            f"got {list(qkv.shape)}, {list(positions.shape)} and {list(table.shape)}"
        )
    kv_heads, left_over = divmod(qkv.shape[1] - num_heads, 2)
    if num_heads < 1 or kv_heads < 1 or left_over:
        raise ValueError(
            "rope_qkv needs heads of queries, and as many of keys as of values, "
            f"got {num_heads} heads of queries in qkv {list(qkv.shape)}"
        )
    shapes = [None if weight is None else weight.shape for weight in (q_weight, k_weight)]
    if shapes[0] != shapes[1] or shapes[0] not in (None, qkv.shape[2:]):
        named = [None if shape is None else list(shape) for shape in shapes]
        raise ValueError(
            "rope_qkv needs qkv [T, heads, head_dim] and norm weights [head_dim] for q and k or "
            f"for neither, got {list(qkv.shape)}, {named[0]} and {named[1]}"
        )


def _check_cache(qkv: Tensor, num_heads: int, kv_cache: Tensor, slot_mapping: Tensor) -> None:
    if kv_cache.dtype != qkv.dtype:
        raise TypeError(f"the KV cache holds {kv_cache.dtype}, the model computes {qkv.dtype}")
    kv_heads, head_dim = (qkv.shape[1] - num_heads) // 2, qkv.shape[2]
    fits = kv_cache.dim() == 4 and kv_cache.shape[1::2] == (kv_heads, 2 * head_dim)
    if not fits or slot_mapping.shape != qkv.shape[:1]:
        raise ValueError(
            f"rope_qkv_to_cache needs a cache [blocks, {kv_heads}, block_size, {2 * head_dim}] "
            f"and slots [{qkv.shape[0]}], "
            f"got {list(kv_cache.shape)} and {list(slot_mapping.shape)}"
        )


@rope_qkv.register_kernel("cuda")
def _(
    qkv: Tensor,
    positions: Tensor,
    table: Tensor,
    q_weight: Tensor | None,
    k_weight: Tensor | None,
    num_heads: int,
    eps: float,
) -> tuple[Tensor, Tensor, Tensor]:
    from isomodels.kernels import rope_triton

    _check(qkv, positions, table, q_weight, k_weight, num_heads)
    return rope_triton.rope_qkv(qkv, positions, table, q_weight, k_weight, num_heads, eps)


@rope_qkv_to_cache.register_kernel("cuda")
def _(
    qkv: Tensor,
    positions: Tensor,
    table: Tensor,
    q_weight: Tensor | None,
    k_weight: Tensor | None,
    num_heads: int,
    eps: float,
    kv_cache: Tensor,
    slot_mapping: Tensor,
) -> tuple[Tensor, Tensor, Tensor]:
    from isomodels.kernels import rope_triton

    _check(qkv, positions, table, q_weight, k_weight, num_heads)
    _check_cache(qkv, num_heads, kv_cache, slot_mapping)
    pages = (kv_cache, slot_mapping)
    return rope_triton.rope_qkv(qkv, positions, table, q_weight, k_weight, num_heads, eps, pages)


@rope_qkv.register_fake
def _(
    qkv: Tensor,
    positions: Tensor,
    table: Tensor,
    q_weight: Tensor | None,
    k_weight: Tensor | None,
    num_heads: int,
    eps: float,
) -> tuple[Tensor, Tensor, Tensor]:
    q, k, v = (qkv.new_empty(part.shape) for part in _cut(qkv, num_heads))
    return q, k, v


@rope_qkv_to_cache.register_fake
def _(
    qkv: Tensor,
    positions: Tensor,
    table: Tensor,
    q_weight: Tensor | None,
    k_weight: Tensor | None,
    num_heads: int,
    eps: float,
    kv_cache: Tensor,
    slot_mapping: Tensor,
) -> tuple[Tensor, Tensor, Tensor]:
    q, k, v = (qkv.new_empty(part.shape) for part in _cut(qkv, num_heads))
    return q, k, v


# An operator of its own, so that torch.compile need not look into Triton launches.
@torch.library.custom_op("isomodels::rope_qkv_backward", mutates_args=(), device_types="cuda")
def rope_qkv_backward(
    dq: Tensor,
    dk: Tensor,
    dv: Tensor,
    qkv: Tensor,
    positions: Tensor,
    table: Tensor,
    q_weight: Tensor | None,
    k_weight: Tensor | None,
    eps: float,
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients of `rope_qkv` on the GPU: of qkv, and of the two weights ([D] or [0])."""
    from isomodels.kernels import rope_triton

    args = (qkv, positions, table, q_weight, k_weight, eps)
    dqkv, dq_weight, dk_weight = rope_triton.rope_qkv_backward(dq, dk, dv, *args)
    if dq_weight is None or dk_weight is None:
        return dqkv, qkv.new_empty(0), qkv.new_empty(0)
    return dqkv, dq_weight, dk_weight


@rope_qkv_backward.register_fake
def _(
    dq: Tensor,
    dk: Tensor,
    dv: Tensor,
    qkv: Tensor,
    positions: Tensor,
    table: Tensor,
    q_weight: Tensor | None,
    k_weight: Tensor | None,
    eps: float,
) -> tuple[Tensor, Tensor, Tensor]:
    weights = [qkv.new_empty(0) if w is None else torch.empty_like(w) for w in (q_weight, k_weight)]
    return qkv.new_empty(qkv.shape), weights[0], weights[1]


def _setup_context(ctx: Any, inputs: tuple, output: Any) -> None:
    *tensors, _, ctx.eps = inputs
    ctx.save_for_backward(*tensors)


def _backward(ctx: Any, dq: Tensor, dk: Tensor, dv: Tensor) -> tuple:
    qkv, positions, table, q_weight, k_weight = ctx.saved_tensors
    if dq.is_cuda:
        args = (qkv, positions, table, q_weight, k_weight, ctx.eps)
        dqkv, dq_weight, dk_weight = rope_qkv_backward(dq, dk, dv, *args)
        weights = (None, None) if q_weight is None else (dq_weight, dk_weight)
        return dqkv, None, None, *weights, None, None
    q, k, _ = _cut(qkv, dq.shape[1])
    dq, dq_weight = rotated_backward(dq, q, positions, table, q_weight, ctx.eps)
    dk, dk_weight = rotated_backward(dk, k, positions, table, k_weight, ctx.eps)
    return torch.cat((dq, dk, dv), 1), None, None, dq_weight, dk_weight, None, None


rope_qkv.register_autograd(_backward, setup_context=_setup_context)
