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

_ROWS, _WARPS = 4, 4
# rows, warps, programs a multiprocessor
_BACKWARD_ROWS, _BACKWARD_WARPS, _BACKWARD_PROGRAMS = 8, 4, 4


@triton.jit
def _pair_angles(table_ptr, position_ptr, token, real, columns, mask, H: tl.constexpr):
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
    cos, sin = _pair_angles(table_ptr, position_ptr, token, real, columns, mask, H)
    element = y_ptr.dtype.element_ty
    y_at = y_ptr + places(token, head, HEADS * D, D)
    tl.store(y_at + columns, (first * cos - second * sin).to(element), mask=mask)
    tl.store(y_at + H + columns, (second * cos + first * sin).to(element), mask=mask)
    if REST > 0:
        weight = tl.load(weight_ptr + others, mask=others < D, other=0.0).to(tl.float32)
        tl.store(y_at + others, (rest * scale * weight).to(element), mask=kept)


@triton.jit
def _partners(x_ptr, at, column, real, H: tl.constexpr):
    """Each rotated channel's partner, half a rotation away; 0 for the others."""
    first = tl.load(x_ptr + at + H, mask=real & (column < H), other=0.0)
    second = tl.load(x_ptr + at - H, mask=real & (column >= H) & (column < 2 * H), other=0.0)
    return tl.where(column < H, first, second).to(tl.float32)


@triton.jit
def _angles(table_ptr, position_ptr, token, real, column, H: tl.constexpr):
    """Cosine and signed sine of each channel: 1 and 0 for those that carry no position."""
    position = tl.load(position_ptr + token, mask=real, other=0)
    at = table_ptr + position[:, None] * (2 * H) + column
    real = real[:, None]
    first = real & (column < H)
    second = real & (column >= H) & (column < 2 * H)
    left, right = tl.load(at, mask=first, other=1.0), tl.load(at - H, mask=second, other=1.0)
    cos = tl.where(column < H, left, right)
    left, right = tl.load(at + H, mask=first, other=0.0), tl.load(at, mask=second, other=0.0)
    return cos, tl.where(column < H, -left, right)


@triton.jit(do_not_specialize=["tokens"])
def _backward(
    grad_ptr, x_ptr, position_ptr, table_ptr, weight_ptr, dx_ptr, partial_ptr, tokens,
    grad_stride_t, grad_stride_h, stride_t, stride_h, eps,
    HEADS: tl.constexpr, D: tl.constexpr, LOG2: tl.constexpr, H: tl.constexpr, ROWS: tl.constexpr,
):  # fmt: skip
    """Each program walks over rows and keeps its part of the weight's gradient in registers."""
    column = tl.arange(0, 2**LOG2)[None, :]
    weight = tl.load(weight_ptr + column, mask=column < D, other=0.0).to(tl.float32)
    dweight = tl.zeros((ROWS, 2**LOG2), tl.float32)
    blocks = tl.cdiv(tokens * HEADS, ROWS)
    for block in range(tl.program_id(0), blocks, tl.num_programs(0)):
        token, head, real = heads_of(block, tokens, HEADS, ROWS)
        mask = real[:, None] & (column < D)
        at = places(token, head, grad_stride_t, grad_stride_h) + column
        grad = tl.load(grad_ptr + at, mask=mask, other=0.0).to(tl.float32)
        partner = _partners(grad_ptr, at, column, real[:, None], H)
        at = x_ptr + places(token, head, stride_t, stride_h) + column
        x = tl.load(at, mask=mask, other=0.0).to(tl.float32)
        cos, sin = _angles(table_ptr, position_ptr, token, real, column, H)
        scale = inverse_rms(tl.sum(x * x, axis=1), D, eps)[:, None]
        unit = x * scale
        grad = grad * cos - partner * sin
        dweight += grad * unit
        grad = grad * weight
        dx = (grad - unit * (tl.sum(grad * unit, axis=1) / D)[:, None]) * scale
        at = dx_ptr + places(token, head, HEADS * D, D) + column
        tl.store(at, dx.to(dx_ptr.dtype.element_ty), mask=mask)
    at = tl.arange(0, 2**LOG2)
    tl.store(partial_ptr + tl.program_id(0) * D + at, tl.sum(dweight, axis=0), mask=at < D)


def partial_rope(
    x: Tensor, positions: Tensor, table: Tensor, norm_weight: Tensor, eps: float
) -> Tensor:
    """x [T, heads, D], a view of any strides -> [T, heads, D], contiguous."""
    x = dense_heads(x)
    tokens, heads, d = x.shape
    half = table.shape[1] // 2
    y = torch.empty(tokens, heads, d, dtype=x.dtype, device=x.device)
    if y.numel():
        _forward[(triton.cdiv(tokens * heads, _ROWS),)](
            x, positions.contiguous(), table.contiguous(), norm_weight.contiguous(), y, tokens,
            *x.stride()[:2], eps,
            HEADS=heads, D=d, H=half, LOG2=log2_ceil(half), REST=d - 2 * half,
            REST_LOG2=log2_ceil(d - 2 * half), ROWS=_ROWS,
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
        HEADS=heads, D=d, LOG2=log2_ceil(d), H=table.shape[1] // 2, ROWS=_BACKWARD_ROWS,
        num_warps=_BACKWARD_WARPS,
    )  # fmt: skip
    return dx, sum_rows(partial, programs, [norm_weight.dtype])[0]
