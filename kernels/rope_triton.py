"""Triton backend of `isomodels::rope` and `isomodels::rope_qkv`.

One launch rotates all heads of a fused projection [q | k | v] and copies the values: its programs
are shared out between the three parts. Heads of one tensor alone are the case without k and v.
"""

# Arguments of kernels have Triton's own types.
# mypy: disable-error-code="no-untyped-def"

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from isomodels.kernels.common_triton import log2_ceil, pairwise_sum, processors, sum_rows
from isomodels.kernels.rms_norm_triton import inverse_rms

_ROWS, _WARPS = 16, 4
# rows, warps, programs a multiprocessor, loads ahead
_BACKWARD_ROWS, _BACKWARD_WARPS, _BACKWARD_PROGRAMS, _AHEAD = 16, 4, 5, 1


@triton.jit
def _heads(block, tokens, HEADS: tl.constexpr, ROWS: tl.constexpr):
    """A block's rows: of which token and head, and which are real."""
    row = block * ROWS + tl.arange(0, ROWS)
    return row // HEADS, row % HEADS, row < tokens * HEADS


@triton.jit
def _angles(table_ptr, position_ptr, token, real, columns, mask, D: tl.constexpr):
    position = tl.load(position_ptr + token, mask=real, other=0)
    at = table_ptr + position[:, None] * D + columns[None, :]
    cos = tl.load(at, mask=mask, other=0.0)
    return cos, tl.load(at + D // 2, mask=mask, other=0.0)


@triton.jit
def _places(token, head, stride_t, stride_h):
    return (token.to(tl.int64) * stride_t + head * stride_h)[:, None]


@triton.jit
def _page_places(
    slot_ptr, token, head, real, stride_page, stride_head, stride_slot, PAGE: tl.constexpr
):
    """Where rows lie in the pages; a padding token, of slot -1, lies nowhere."""
    slot = tl.load(slot_ptr + token, mask=real, other=-1)
    at = (slot // PAGE) * stride_page + (slot % PAGE) * stride_slot + head * stride_head
    return at[:, None], slot >= 0


@triton.jit
def _rotate_block(
    block, x_ptr, position_ptr, table_ptr, weight_ptr, y_ptr, cache_ptr, slot_ptr,
    tokens, stride_t, stride_h, stride_page, stride_head, stride_slot, eps,
    HEADS: tl.constexpr, D: tl.constexpr, LOG2: tl.constexpr, NORM: tl.constexpr,
    PAGE: tl.constexpr, ROWS: tl.constexpr,
):  # fmt: skip
    H: tl.constexpr = D // 2
    token, head, real = _heads(block, tokens, HEADS, ROWS)
    columns = tl.arange(0, 2**LOG2)
    mask = real[:, None] & (columns < H)[None, :]
    at = x_ptr + _places(token, head, stride_t, stride_h) + columns[None, :]
    first = tl.load(at, mask=mask, other=0.0).to(tl.float32)
    second = tl.load(at + H, mask=mask, other=0.0).to(tl.float32)
    cos, sin = _angles(table_ptr, position_ptr, token, real, columns, mask, D)
    if NORM:
        squares = first * first + second * second
        scale = inverse_rms(pairwise_sum(squares, ROWS, LOG2), D, eps)[:, None]
        left = tl.load(weight_ptr + columns, mask=columns < H, other=0.0).to(tl.float32)
        right = tl.load(weight_ptr + H + columns, mask=columns < H, other=0.0).to(tl.float32)
        first = first * scale * left[None, :]
        second = second * scale * right[None, :]
    rotated = (first * cos - second * sin).to(y_ptr.dtype.element_ty)
    other = (second * cos + first * sin).to(y_ptr.dtype.element_ty)
    out = y_ptr + _places(token, head, HEADS * D, D) + columns[None, :]
    tl.store(out, rotated, mask=mask)
    tl.store(out + H, other, mask=mask)
    if PAGE > 0:
        place, kept = _page_places(
            slot_ptr, token, head, real, stride_page, stride_head, stride_slot, PAGE
        )
        page = cache_ptr + place + columns[None, :]
        tl.store(page, rotated, mask=mask & kept[:, None])
        tl.store(page + H, other, mask=mask & kept[:, None])


@triton.jit
def _copy_block(
    block, x_ptr, y_ptr, cache_ptr, slot_ptr,
    tokens, stride_t, stride_h, y_stride_t, stride_page, stride_head, stride_slot,
    HEADS: tl.constexpr, D: tl.constexpr, WIDTH: tl.constexpr, PAGE: tl.constexpr,
    ROWS: tl.constexpr,
):  # fmt: skip
    token, head, real = _heads(block, tokens, HEADS, ROWS)
    columns = tl.arange(0, WIDTH)
    mask = real[:, None] & (columns < D)[None, :]
    x = tl.load(x_ptr + _places(token, head, stride_t, stride_h) + columns[None, :], mask=mask)
    tl.store(y_ptr + _places(token, head, y_stride_t, D) + columns[None, :], x, mask=mask)
    if PAGE > 0:
        place, kept = _page_places(
            slot_ptr, token, head, real, stride_page, stride_head, stride_slot, PAGE
        )
        # Values lie behind their key.
        tl.store(cache_ptr + place + D + columns[None, :], x, mask=mask & kept[:, None])


@triton.jit(do_not_specialize=["tokens"])
def _forward(
    x_ptr, position_ptr, table_ptr, q_weight_ptr, k_weight_ptr, q_ptr, k_ptr, v_ptr,
    cache_ptr, slot_ptr, tokens, stride_t, stride_h, stride_page, stride_head, stride_slot, eps,
    HEADS: tl.constexpr, KV_HEADS: tl.constexpr, D: tl.constexpr, LOG2: tl.constexpr,
    NORM: tl.constexpr, PAGE: tl.constexpr, ROWS: tl.constexpr,
):  # fmt: skip
    """x [tokens, HEADS + 2 KV_HEADS, D] -> q, k and v, and k and v into their pages."""
    block = tl.program_id(0)
    q_blocks = tl.cdiv(tokens * HEADS, ROWS)
    if block < q_blocks:
        _rotate_block(
            block, x_ptr, position_ptr, table_ptr, q_weight_ptr, q_ptr, cache_ptr, slot_ptr,
            tokens, stride_t, stride_h, stride_page, stride_head, stride_slot, eps,
            HEADS, D, LOG2, NORM, 0, ROWS,
        )  # fmt: skip
    elif KV_HEADS > 0:
        k_blocks = tl.cdiv(tokens * KV_HEADS, ROWS)
        block -= q_blocks
        if block < k_blocks:
            _rotate_block(
                block, x_ptr + HEADS * stride_h, position_ptr, table_ptr, k_weight_ptr, k_ptr,
                cache_ptr, slot_ptr,
                tokens, stride_t, stride_h, stride_page, stride_head, stride_slot, eps,
                KV_HEADS, D, LOG2, NORM, PAGE, ROWS,
            )  # fmt: skip
        else:
            _copy_block(
                block - k_blocks, x_ptr + (HEADS + KV_HEADS) * stride_h, v_ptr, cache_ptr,
                slot_ptr, tokens, stride_t, stride_h, KV_HEADS * D,
                stride_page, stride_head, stride_slot,
                KV_HEADS, D, 2 * 2**LOG2, PAGE, ROWS,
            )  # fmt: skip


@triton.jit
def _backward_heads(
    program, programs, grad_ptr, x_ptr, position_ptr, table_ptr, weight_ptr, dx_ptr, partial_ptr,
    tokens, grad_stride_t, grad_stride_h, stride_t, stride_h, dx_stride_t, eps,
    HEADS: tl.constexpr, D: tl.constexpr, LOG2: tl.constexpr, NORM: tl.constexpr,
    ROWS: tl.constexpr, AHEAD: tl.constexpr,
):  # fmt: skip
    H: tl.constexpr = D // 2
    columns = tl.arange(0, 2**LOG2)
    if NORM:
        left = tl.load(weight_ptr + columns, mask=columns < H, other=0.0).to(tl.float32)[None, :]
        right = tl.load(weight_ptr + H + columns, mask=columns < H, other=0.0).to(tl.float32)
        right = right[None, :]
        # Summed over rows once, at the end.
        dleft = tl.zeros((ROWS, 2**LOG2), tl.float32)
        dright = tl.zeros((ROWS, 2**LOG2), tl.float32)
    for block in tl.range(program, tl.cdiv(tokens * HEADS, ROWS), programs, num_stages=AHEAD):
        token, head, real = _heads(block, tokens, HEADS, ROWS)
        mask = real[:, None] & (columns < H)[None, :]
        source = grad_ptr + _places(token, head, grad_stride_t, grad_stride_h) + columns[None, :]
        grad1 = tl.load(source, mask=mask, other=0.0).to(tl.float32)
        grad2 = tl.load(source + H, mask=mask, other=0.0).to(tl.float32)
        cos, sin = _angles(table_ptr, position_ptr, token, real, columns, mask, D)
        first = grad1 * cos + grad2 * sin
        second = grad2 * cos - grad1 * sin
        if NORM:
            at = x_ptr + _places(token, head, stride_t, stride_h) + columns[None, :]
            x1 = tl.load(at, mask=mask, other=0.0).to(tl.float32)
            x2 = tl.load(at + H, mask=mask, other=0.0).to(tl.float32)
            scale = inverse_rms(tl.sum(x1 * x1 + x2 * x2, axis=1), D, eps)[:, None]
            x1, x2 = x1 * scale, x2 * scale
            dleft += first * x1
            dright += second * x2
            first, second = first * left, second * right
            shared = (tl.sum(first * x1 + second * x2, axis=1) / D)[:, None]
            first = (first - x1 * shared) * scale
            second = (second - x2 * shared) * scale
        out = dx_ptr + _places(token, head, dx_stride_t, D) + columns[None, :]
        tl.store(out, first.to(dx_ptr.dtype.element_ty), mask=mask)
        tl.store(out + H, second.to(dx_ptr.dtype.element_ty), mask=mask)
    if NORM:
        partial = partial_ptr + program * D + columns
        tl.store(partial, tl.sum(dleft, axis=0), mask=columns < H)
        tl.store(partial + H, tl.sum(dright, axis=0), mask=columns < H)


@triton.jit(do_not_specialize=["tokens", "q_programs", "k_programs"])
def _backward(
    dq_ptr, dk_ptr, dv_ptr, x_ptr, position_ptr, table_ptr, q_weight_ptr, k_weight_ptr, dx_ptr,
    partial_ptr, tokens, q_programs, k_programs, q_stride_t, q_stride_h, k_stride_t, k_stride_h,
    v_stride_t, v_stride_h, stride_t, stride_h, eps,
    HEADS: tl.constexpr, KV_HEADS: tl.constexpr, D: tl.constexpr, LOG2: tl.constexpr,
    NORM: tl.constexpr, ROWS: tl.constexpr, AHEAD: tl.constexpr,
):  # fmt: skip
    """Each program walks over rows of q, k or v and keeps its part of the weight's gradient."""
    program = tl.program_id(0)
    OUT: tl.constexpr = (HEADS + 2 * KV_HEADS) * D
    if program < q_programs:
        _backward_heads(
            program, q_programs, dq_ptr, x_ptr, position_ptr, table_ptr, q_weight_ptr, dx_ptr,
            partial_ptr, tokens, q_stride_t, q_stride_h, stride_t, stride_h, OUT, eps,
            HEADS, D, LOG2, NORM, ROWS, AHEAD,
        )  # fmt: skip
    elif KV_HEADS > 0:
        program -= q_programs
        if program < k_programs:
            _backward_heads(
                program, k_programs, dk_ptr, x_ptr + HEADS * stride_h, position_ptr, table_ptr,
                k_weight_ptr, dx_ptr + HEADS * D, partial_ptr + q_programs * D,
                tokens, k_stride_t, k_stride_h, stride_t, stride_h, OUT, eps,
                KV_HEADS, D, LOG2, NORM, ROWS, AHEAD,
            )  # fmt: skip
        else:
            programs = tl.num_programs(0) - q_programs - k_programs
            blocks = tl.cdiv(tokens * KV_HEADS, ROWS)
            for block in tl.range(program - k_programs, blocks, programs, num_stages=AHEAD):
                _copy_block(
                    block, dv_ptr, dx_ptr + (HEADS + KV_HEADS) * D, dx_ptr, position_ptr,
                    tokens, v_stride_t, v_stride_h, OUT, 0, 0, 0,
                    KV_HEADS, D, 2 * 2**LOG2, 0, ROWS,
                )  # fmt: skip


def _dense_heads(x: Tensor) -> Tensor:
    return x if x.stride(-1) == 1 else x.contiguous()


def _dense(*tensors: Tensor | None) -> tuple[Any, ...]:
    return tuple(None if x is None else x.contiguous() for x in tensors)


Pages = tuple[Tensor, Tensor]  # an attention layer's KV cache and the slot of each token


def rope_qkv(
    qkv: Tensor,
    positions: Tensor,
    table: Tensor,
    q_weight: Tensor | None,
    k_weight: Tensor | None,
    num_heads: int,
    eps: float,
    pages: Pages | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """qkv [T, heads + 2 kv_heads, D], a view of any strides with dense heads -> (q, k, v), dense.

    With `pages` k and v are also written to the cache.
    """
    qkv = _dense_heads(qkv)
    positions, table, q_weight, k_weight = _dense(positions, table, q_weight, k_weight)
    tokens, heads, d = qkv.shape
    kv_heads = (heads - num_heads) // 2
    q, k, v = (
        torch.empty(tokens, count, d, dtype=qkv.dtype, device=qkv.device)
        for count in (num_heads, kv_heads, kv_heads)
    )
    cache, (slots,) = (None, (None,)) if pages is None else (pages[0], _dense(pages[1]))
    page_strides = (0, 0, 0) if cache is None else cache.stride()[:3]
    blocks = triton.cdiv(tokens * num_heads, _ROWS) + 2 * triton.cdiv(tokens * kv_heads, _ROWS)
    if blocks and d:
        _forward[(blocks,)](
            qkv, positions, table, q_weight, k_weight, q, k, v, cache, slots, tokens,
            qkv.stride(0), qkv.stride(1), *page_strides, eps,
            HEADS=num_heads, KV_HEADS=kv_heads, D=d, LOG2=log2_ceil(d // 2),
            NORM=q_weight is not None, PAGE=0 if cache is None else cache.shape[2],
            ROWS=_ROWS, num_warps=_WARPS, enable_fp_fusion=False,
        )  # fmt: skip
    return q, k, v


def rope(
    x: Tensor, positions: Tensor, table: Tensor, norm_weight: Tensor | None, eps: float
) -> Tensor:
    """x [T, heads, D], a view of any strides with dense heads -> [T, heads, D], contiguous."""
    return rope_qkv(x, positions, table, norm_weight, None, x.shape[1], eps)[0]


def rope_qkv_backward(
    dq: Tensor,
    dk: Tensor | None,
    dv: Tensor | None,
    qkv: Tensor,
    positions: Tensor,
    table: Tensor,
    q_weight: Tensor | None,
    k_weight: Tensor | None,
    eps: float,
) -> tuple[Tensor, Tensor | None, Tensor | None]:
    """Gradients of q, k and v -> those of qkv [T, heads + 2 kv_heads, D] and of the weights [D]."""
    grads = [_dense_heads(dq if grad is None else grad) for grad in (dq, dk, dv)]
    qkv = _dense_heads(qkv)
    positions, table, q_weight, k_weight = _dense(positions, table, q_weight, k_weight)
    tokens, heads, d = qkv.shape
    num_heads = dq.shape[1]
    kv_heads = (heads - num_heads) // 2
    dqkv = torch.empty(tokens, heads, d, dtype=qkv.dtype, device=qkv.device)
    weights = [weight for weight in (q_weight, k_weight) if weight is not None]
    if not dqkv.numel():
        sums = [torch.zeros_like(weight) for weight in weights]
    else:
        q_programs, k_programs, v_programs = _programs(tokens, num_heads, kv_heads, processors(dq))
        rows = q_programs + k_programs if weights else 0
        partial = torch.empty(rows, d, dtype=torch.float32, device=qkv.device)
        strides = [stride for grad in grads for stride in grad.stride()[:2]]
        _backward[(q_programs + k_programs + v_programs,)](
            *grads, qkv, positions, table, q_weight, k_weight, dqkv, partial, tokens,
            q_programs, k_programs, *strides, qkv.stride(0), qkv.stride(1), eps,
            HEADS=num_heads, KV_HEADS=kv_heads, D=d, LOG2=log2_ceil(d // 2), NORM=bool(weights),
            ROWS=_BACKWARD_ROWS, AHEAD=_AHEAD, num_warps=_BACKWARD_WARPS,
        )  # fmt: skip
        sums = sum_rows(partial, q_programs, [weight.dtype for weight in weights])
    dq_weight, dk_weight = (*sums, None, None)[:2]
    return dqkv, dq_weight, dk_weight


def _programs(tokens: int, heads: int, kv_heads: int, multiprocessors: int) -> tuple[int, ...]:
    """Programs for q, k and v, in the proportion of what they move: a value's head is a copy."""
    parts = (3 * heads, 3 * kv_heads, 2 * kv_heads)
    total = _BACKWARD_PROGRAMS * multiprocessors
    return tuple(
        min(triton.cdiv(tokens * count, _BACKWARD_ROWS), max(1, total * part // sum(parts)))
        for part, count in zip(parts, (heads, kv_heads, kv_heads), strict=True)
    )


def rope_backward(
    grad: Tensor,
    x: Tensor,
    positions: Tensor,
    table: Tensor,
    norm_weight: Tensor | None,
    eps: float,
) -> tuple[Tensor, Tensor | None]:
    """grad and x [T, heads, D] -> (dx [T, heads, D], gradient of the norm's weight [D])."""
    args = (x, positions, table, norm_weight, None, eps)
    return rope_qkv_backward(grad, None, None, *args)[:2]
