"""Triton backend of `isomodels::rope`: `_ROWS` heads a program, of whatever tokens."""

# Arguments of kernels have Triton's own types.
# mypy: disable-error-code="no-untyped-def"

import torch
import triton
import triton.language as tl
from torch import Tensor

from isomodels.kernels.common_triton import log2_ceil, pairwise_sum, processors
from isomodels.kernels.rms_norm_triton import inverse_rms

_ROWS, _WARPS = 16, 4
# rows, warps, programs a multiprocessor, loads ahead
_BACKWARD_ROWS, _BACKWARD_WARPS, _BACKWARD_PROGRAMS, _AHEAD = 4, 1, 20, 1


@triton.jit
def _places(
    row, rows, position_ptr, stride_t, stride_h, HEADS: tl.constexpr, D: tl.constexpr,
    HALF: tl.constexpr,
):  # fmt: skip
    """Where the first halves of heads lie in an input and in the table, and which are real."""
    real = row < rows
    token, head = row // HEADS, row % HEADS
    columns = tl.arange(0, HALF)
    mask = real[:, None] & (columns < D // 2)[None, :]
    position = tl.load(position_ptr + token, mask=real, other=0)
    into = (token.to(tl.int64) * stride_t + head * stride_h)[:, None] + columns[None, :]
    return into, position[:, None] * D + columns[None, :], columns, mask


@triton.jit(do_not_specialize=["rows"])
def _forward(
    x_ptr, position_ptr, table_ptr, weight_ptr, y_ptr, rows, stride_t, stride_h, eps,
    HEADS: tl.constexpr, D: tl.constexpr, LOG2: tl.constexpr, NORM: tl.constexpr,
    ROWS: tl.constexpr,
):  # fmt: skip
    H: tl.constexpr = D // 2
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    into, angle, columns, mask = _places(
        row, rows, position_ptr, stride_t, stride_h, HEADS, D, 2**LOG2
    )
    first = tl.load(x_ptr + into, mask=mask, other=0.0).to(tl.float32)
    second = tl.load(x_ptr + into + H, mask=mask, other=0.0).to(tl.float32)
    cos = tl.load(table_ptr + angle, mask=mask, other=0.0)
    sin = tl.load(table_ptr + angle + H, mask=mask, other=0.0)
    if NORM:
        squares = first * first + second * second
        scale = inverse_rms(pairwise_sum(squares, ROWS, LOG2), D, eps)[:, None]
        left = tl.load(weight_ptr + columns, mask=columns < H, other=0.0).to(tl.float32)
        right = tl.load(weight_ptr + H + columns, mask=columns < H, other=0.0).to(tl.float32)
        first = first * scale * left[None, :]
        second = second * scale * right[None, :]
    out = y_ptr + row.to(tl.int64)[:, None] * D + columns[None, :]
    tl.store(out, (first * cos - second * sin).to(y_ptr.dtype.element_ty), mask=mask)
    tl.store(out + H, (second * cos + first * sin).to(y_ptr.dtype.element_ty), mask=mask)


@triton.jit(do_not_specialize=["rows"])
def _backward(
    grad_ptr, x_ptr, position_ptr, table_ptr, weight_ptr, dx_ptr, dweight_ptr, rows,
    grad_stride_t, grad_stride_h, stride_t, stride_h, eps,
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
    blocks = tl.cdiv(rows, ROWS)
    for block in tl.range(tl.program_id(0), blocks, tl.num_programs(0), num_stages=AHEAD):
        row = block * ROWS + tl.arange(0, ROWS)
        source, angle, _, mask = _places(
            row, rows, position_ptr, grad_stride_t, grad_stride_h, HEADS, D, 2**LOG2
        )
        grad1 = tl.load(grad_ptr + source, mask=mask, other=0.0).to(tl.float32)
        grad2 = tl.load(grad_ptr + source + H, mask=mask, other=0.0).to(tl.float32)
        cos = tl.load(table_ptr + angle, mask=mask, other=0.0)
        sin = tl.load(table_ptr + angle + H, mask=mask, other=0.0)
        first = grad1 * cos + grad2 * sin
        second = grad2 * cos - grad1 * sin
        if NORM:
            token, head = row // HEADS, row % HEADS
            into = (token.to(tl.int64) * stride_t + head * stride_h)[:, None] + columns[None, :]
            x1 = tl.load(x_ptr + into, mask=mask, other=0.0).to(tl.float32)
            x2 = tl.load(x_ptr + into + H, mask=mask, other=0.0).to(tl.float32)
            scale = inverse_rms(tl.sum(x1 * x1 + x2 * x2, axis=1), D, eps)[:, None]
            x1, x2 = x1 * scale, x2 * scale
            dleft += first * x1
            dright += second * x2
            first, second = first * left, second * right
            shared = (tl.sum(first * x1 + second * x2, axis=1) / D)[:, None]
            first = (first - x1 * shared) * scale
            second = (second - x2 * shared) * scale
        out = dx_ptr + row.to(tl.int64)[:, None] * D + columns[None, :]
        tl.store(out, first.to(dx_ptr.dtype.element_ty), mask=mask)
        tl.store(out + H, second.to(dx_ptr.dtype.element_ty), mask=mask)
    if NORM:
        partial = dweight_ptr + tl.program_id(0) * D + columns
        tl.store(partial, tl.sum(dleft, axis=0), mask=columns < H)
        tl.store(partial + H, tl.sum(dright, axis=0), mask=columns < H)


def _dense_heads(x: Tensor) -> Tensor:
    return x if x.stride(-1) == 1 else x.contiguous()


def rope(
    x: Tensor, positions: Tensor, table: Tensor, norm_weight: Tensor | None, eps: float
) -> Tensor:
    """x [T, heads, D], a view of any strides with dense heads -> [T, heads, D], contiguous."""
    x = _dense_heads(x)
    tokens, heads, d = x.shape
    y = torch.empty(tokens, heads, d, dtype=x.dtype, device=x.device)
    if y.numel():
        _forward[(triton.cdiv(tokens * heads, _ROWS),)](
            x, positions, table, norm_weight, y, tokens * heads, x.stride(0), x.stride(1), eps,
            HEADS=heads, D=d, LOG2=log2_ceil(d // 2), NORM=norm_weight is not None,
            ROWS=_ROWS, num_warps=_WARPS, enable_fp_fusion=False,
        )  # fmt: skip
    return y


def rope_backward(
    grad: Tensor,
    x: Tensor,
    positions: Tensor,
    table: Tensor,
    norm_weight: Tensor | None,
    eps: float,
) -> tuple[Tensor, Tensor | None]:
    """grad and x [T, heads, D] -> (dx [T, heads, D], gradient of the norm's weight [D])."""
    grad, x = _dense_heads(grad), _dense_heads(x)
    tokens, heads, d = x.shape
    dx = torch.empty(tokens, heads, d, dtype=x.dtype, device=x.device)
    norm = norm_weight is not None
    if not dx.numel():
        return dx, None if norm_weight is None else torch.zeros_like(norm_weight)
    blocks = triton.cdiv(tokens * heads, _BACKWARD_ROWS)
    programs = min(blocks, _BACKWARD_PROGRAMS * processors(x))
    partial = torch.empty(programs if norm else 0, d, dtype=torch.float32, device=x.device)
    _backward[(programs,)](
        grad, x, positions, table, norm_weight, dx, partial, tokens * heads,
        grad.stride(0), grad.stride(1), x.stride(0), x.stride(1), eps,
        HEADS=heads, D=d, LOG2=log2_ceil(d // 2), NORM=norm, ROWS=_BACKWARD_ROWS,
        AHEAD=_AHEAD, num_warps=_BACKWARD_WARPS,
    )  # fmt: skip
    return dx, None if norm_weight is None else partial.sum(0).to(norm_weight.dtype)
