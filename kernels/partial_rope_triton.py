"""Triton backend of `isomodels::partial_rope`; a block of heads a program."""

# Arguments of kernels have Triton's own types.
# mypy: disable-error-code="no-untyped-def"

import torch
import triton
import triton.language as tl
from torch import Tensor

from isomodels.kernels.common_triton import log2_ceil, pairwise_sum, processors, sum_rows
from isomodels.kernels.heads_triton import dense_heads, heads_of, places
from isomodels.kernels.rms_norm_triton import inverse_rms

_ROWS, _WARPS = 8, 4
# rows, warps, programs a multiprocessor, loads ahead
_BACKWARD_ROWS, _BACKWARD_WARPS, _BACKWARD_PROGRAMS, _AHEAD = 8, 4, 4, 1


@triton.jit
def _angles(table_ptr, position_ptr, token, real, columns, mask, H: tl.constexpr):
    position = tl.load(position_ptr + token, mask=real, other=0)
    at = table_ptr + position[:, None] * (2 * H) + columns
    return tl.load(at, mask=mask, other=0.0), tl.load(at + H, mask=mask, other=0.0)


@triton.jit(do_not_specialize=["tokens"])
def _forward(
    x_ptr, position_ptr, table_ptr, weight_ptr, y_ptr, tokens, stride_t, stride_h, eps,
    HEADS: tl.constexpr, D: tl.constexpr, H: tl.constexpr, LOG2: tl.constexpr,
    REST: tl.constexpr, REST_LOG2: tl.constexpr, ROWS: tl.constexpr,
):  # fmt: skip
    """A head is [first H | second H | REST]: the pairs to rotate, and what carries no position."""
    token, head, real = heads_of(tl.program_id(0), tokens, HEADS, ROWS)
    columns = tl.arange(0, 2**LOG2)[None, :]
    mask = real[:, None] & (columns < H)
    x_at = x_ptr + places(token, head, stride_t, stride_h)
    first = tl.load(x_at + columns, mask=mask, other=0.0).to(tl.float32)
    second = tl.load(x_at + H + columns, mask=mask, other=0.0).to(tl.float32)
    squares = pairwise_sum(first * first + second * second, ROWS, LOG2)
    others = 2 * H + tl.arange(0, 2**REST_LOG2)[None, :]
    kept = real[:, None] & (others < D)
    if REST > 0:
        rest = tl.load(x_at + others, mask=kept, other=0.0).to(tl.float32)
        squares += pairwise_sum(rest * rest, ROWS, REST_LOG2)
    scale = inverse_rms(squares, D, eps)[:, None]
    left = tl.load(weight_ptr + columns, mask=columns < H, other=0.0).to(tl.float32)
    right = tl.load(weight_ptr + H + columns, mask=columns < H, other=0.0).to(tl.float32)
    first, second = first * scale * left, second * scale * right
    cos, sin = _angles(table_ptr, position_ptr, token, real, columns, mask, H)
    element = y_ptr.dtype.element_ty
    y_at = y_ptr + places(token, head, HEADS * D, D)
    tl.store(y_at + columns, (first * cos - second * sin).to(element), mask=mask)
    tl.store(y_at + H + columns, (second * cos + first * sin).to(element), mask=mask)
    if REST > 0:
        weight = tl.load(weight_ptr + others, mask=others < D, other=0.0).to(tl.float32)
        tl.store(y_at + others, (rest * scale * weight).to(element), mask=kept)


@triton.jit(do_not_specialize=["tokens"])
def _backward(
    grad_ptr, x_ptr, position_ptr, table_ptr, weight_ptr, dx_ptr, partial_ptr, tokens,
    grad_stride_t, grad_stride_h, stride_t, stride_h, eps,
    HEADS: tl.constexpr, D: tl.constexpr, H: tl.constexpr, LOG2: tl.constexpr,
    REST: tl.constexpr, REST_LOG2: tl.constexpr, ROWS: tl.constexpr, AHEAD: tl.constexpr,
):  # fmt: skip
    """Each program walks over rows and keeps its part of the weight's gradient in registers."""
    columns = tl.arange(0, 2**LOG2)[None, :]
    others = 2 * H + tl.arange(0, 2**REST_LOG2)[None, :]
    left = tl.load(weight_ptr + columns, mask=columns < H, other=0.0).to(tl.float32)
    right = tl.load(weight_ptr + H + columns, mask=columns < H, other=0.0).to(tl.float32)
    weight = tl.load(weight_ptr + others, mask=others < D, other=0.0).to(tl.float32)
    dleft = tl.zeros((ROWS, 2**LOG2), tl.float32)
    dright = tl.zeros((ROWS, 2**LOG2), tl.float32)
    dweight = tl.zeros((ROWS, 2**REST_LOG2), tl.float32)
    blocks = tl.cdiv(tokens * HEADS, ROWS)
    for block in tl.range(tl.program_id(0), blocks, tl.num_programs(0), num_stages=AHEAD):
        token, head, real = heads_of(block, tokens, HEADS, ROWS)
        mask = real[:, None] & (columns < H)
        kept = real[:, None] & (others < D)
        grad_at = grad_ptr + places(token, head, grad_stride_t, grad_stride_h)
        grad1 = tl.load(grad_at + columns, mask=mask, other=0.0).to(tl.float32)
        grad2 = tl.load(grad_at + H + columns, mask=mask, other=0.0).to(tl.float32)
        grad3 = tl.load(grad_at + others, mask=kept, other=0.0).to(tl.float32)
        x_at = x_ptr + places(token, head, stride_t, stride_h)
        x1 = tl.load(x_at + columns, mask=mask, other=0.0).to(tl.float32)
        x2 = tl.load(x_at + H + columns, mask=mask, other=0.0).to(tl.float32)
        x3 = tl.load(x_at + others, mask=kept, other=0.0).to(tl.float32)
        squares = tl.sum(x1 * x1 + x2 * x2, axis=1) + tl.sum(x3 * x3, axis=1)
        scale = inverse_rms(squares, D, eps)[:, None]
        x1, x2, x3 = x1 * scale, x2 * scale, x3 * scale
        cos, sin = _angles(table_ptr, position_ptr, token, real, columns, mask, H)
        first = grad1 * cos + grad2 * sin
        second = grad2 * cos - grad1 * sin
        dleft += first * x1
        dright += second * x2
        dweight += grad3 * x3
        first, second, third = first * left, second * right, grad3 * weight
        shared = tl.sum(first * x1 + second * x2, axis=1) + tl.sum(third * x3, axis=1)
        shared = (shared / D)[:, None]
        element = dx_ptr.dtype.element_ty
        out = dx_ptr + places(token, head, HEADS * D, D)
        tl.store(out + columns, ((first - x1 * shared) * scale).to(element), mask=mask)
        tl.store(out + H + columns, ((second - x2 * shared) * scale).to(element), mask=mask)
        tl.store(out + others, ((third - x3 * shared) * scale).to(element), mask=kept)
    out = partial_ptr + tl.program_id(0) * D
    column, other = tl.arange(0, 2**LOG2), 2 * H + tl.arange(0, 2**REST_LOG2)
    tl.store(out + column, tl.sum(dleft, axis=0), mask=column < H)
    tl.store(out + H + column, tl.sum(dright, axis=0), mask=column < H)
    tl.store(out + other, tl.sum(dweight, axis=0), mask=other < D)


def _shape(d: int, rotary: int) -> dict[str, int]:
    half, rest = rotary // 2, d - rotary
    return {
        "D": d,
        "H": half,
        "LOG2": log2_ceil(half),
        "REST": rest,
        "REST_LOG2": log2_ceil(rest),
    }


def partial_rope(
    x: Tensor, positions: Tensor, table: Tensor, norm_weight: Tensor, eps: float
) -> Tensor:
    """x [T, heads, D], a view of any strides -> [T, heads, D], contiguous."""
    x = dense_heads(x)
    tokens, heads, d = x.shape
    y = torch.empty(tokens, heads, d, dtype=x.dtype, device=x.device)
    if y.numel():
        _forward[(triton.cdiv(tokens * heads, _ROWS),)](
            x, positions.contiguous(), table.contiguous(), norm_weight.contiguous(), y, tokens,
            *x.stride()[:2], eps,
            HEADS=heads, **_shape(d, table.shape[1]), ROWS=_ROWS,
            num_warps=_WARPS, enable_fp_fusion=False,
        )  # fmt: skip
    return y


def partial_rope_backward(
    grad: Tensor, x: Tensor, positions: Tensor, table: Tensor, norm_weight: Tensor, eps: float
) -> tuple[Tensor, Tensor]:
    """Gradients of x [T, heads, D], contiguous, and of the norm's weight [D]."""
    grad, x = dense_heads(grad), dense_heads(x)
    tokens, heads, d = x.shape
    dx = torch.empty(tokens, heads, d, dtype=x.dtype, device=x.device)
    if not dx.numel():
        return dx, torch.zeros_like(norm_weight, memory_format=torch.contiguous_format)
    blocks = triton.cdiv(tokens * heads, _BACKWARD_ROWS)
    programs = min(blocks, _BACKWARD_PROGRAMS * processors(x))
    partial = torch.empty(programs, d, dtype=torch.float32, device=x.device)
    _backward[(programs,)](
        grad, x, positions.contiguous(), table.contiguous(), norm_weight.contiguous(), dx, partial,
        tokens, *grad.stride()[:2], *x.stride()[:2], eps,
        HEADS=heads, **_shape(d, table.shape[1]), ROWS=_BACKWARD_ROWS, AHEAD=_AHEAD,
        num_warps=_BACKWARD_WARPS,
    )  # fmt: skip
    return dx, sum_rows(partial, programs, [norm_weight.dtype])[0]
