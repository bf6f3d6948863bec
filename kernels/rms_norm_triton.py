"""Triton backend of `isomodels::rms_norm` and `isomodels::add_rms_norm`; one row a program."""

# Arguments of kernels have Triton's own types.
# mypy: disable-error-code="no-untyped-def"

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from isomodels.kernels.common_triton import (
    log2_ceil,
    pairwise_sum,
    processors,
    rows_of,
    sum_rows,
)


class Walk(NamedTuple):
    """Tuning of a backward whose programs walk over rows."""

    programs: int  # a multiprocessor
    warps: int  # times those of the forward
    ahead: int  # loads in flight, in rows


_BACKWARD = Walk(2, 1, 3)


@triton.jit
def inverse_rms(square_sum, N: tl.constexpr, eps):
    """1 / sqrt(mean + eps), each operation rounded to nearest."""
    return tl.div_rn(1.0, tl.sqrt_rn(tl.div_rn(square_sum, N * 1.0) + eps))


@triton.jit
def _forward(
    x_ptr, residual_ptr, weight_ptr, y_ptr, total_ptr, x_stride, residual_stride, eps,
    N: tl.constexpr, LOG2: tl.constexpr, ADD: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    columns = tl.arange(0, 2**LOG2)
    mask = columns < N
    x = tl.load(x_ptr + row * x_stride + columns, mask=mask, other=0.0)
    if ADD:
        residual = tl.load(residual_ptr + row * residual_stride + columns, mask=mask, other=0.0)
        x = (x.to(tl.float32) + residual.to(tl.float32)).to(total_ptr.dtype.element_ty)
        tl.store(total_ptr + row * N + columns, x, mask=mask)
    x = x.to(tl.float32)
    scale = inverse_rms(pairwise_sum(tl.reshape(x * x, (1, 2**LOG2)), 1, LOG2), N, eps)
    weight = tl.load(weight_ptr + columns, mask=mask, other=0.0).to(tl.float32)
    y = x * scale * weight
    tl.store(y_ptr + row * N + columns, y.to(y_ptr.dtype.element_ty), mask=mask)


@triton.jit(do_not_specialize=["rows"])
def _backward(
    grad_ptr, grad_total_ptr, x_ptr, weight_ptr, dx_ptr, dweight_ptr, rows,
    grad_stride, grad_total_stride, x_stride, eps,
    N: tl.constexpr, LOG2: tl.constexpr, ADD: tl.constexpr, AHEAD: tl.constexpr,
):  # fmt: skip
    """Each program walks over rows and keeps its part of the weight's gradient in registers."""
    columns = tl.arange(0, 2**LOG2)
    mask = columns < N
    weight = tl.load(weight_ptr + columns, mask=mask, other=0.0).to(tl.float32)
    dweight = tl.zeros((2**LOG2,), tl.float32)
    for turn in tl.range(0, tl.cdiv(rows - tl.program_id(0), tl.num_programs(0)), num_stages=AHEAD):
        at = (tl.program_id(0) + turn * tl.num_programs(0)).to(tl.int64)
        x = tl.load(x_ptr + at * x_stride + columns, mask=mask, other=0.0).to(tl.float32)
        grad = tl.load(grad_ptr + at * grad_stride + columns, mask=mask, other=0.0).to(tl.float32)
        scale = inverse_rms(tl.sum(x * x), N, eps)
        unit = x * scale
        dweight += grad * unit
        grad = grad * weight
        dx = (grad - unit * (tl.sum(grad * unit) / N)) * scale
        if ADD:
            into = grad_total_ptr + at * grad_total_stride + columns
            dx += tl.load(into, mask=mask, other=0.0).to(tl.float32)
        tl.store(dx_ptr + at * N + columns, dx.to(dx_ptr.dtype.element_ty), mask=mask)
    tl.store(dweight_ptr + tl.program_id(0) * N + columns, dweight, mask=mask)


def _warps(n: int) -> int:
    """A tuning: about 16 elements a thread."""
    return max(1, min(16, triton.next_power_of_2(n) // 512))


def rms_norm(
    x: Tensor, residual: Tensor | None, weight: Tensor, eps: float
) -> tuple[Tensor, Tensor]:
    """x [T, N] (+ residual [T, N]) -> (normed [T, N], the sum, or `x` without a residual)."""
    x = rows_of(x)
    rows, n = x.shape
    y = torch.empty(rows, n, dtype=x.dtype, device=x.device)
    add = residual is not None
    total = torch.empty_like(y) if add else x
    other = x if residual is None else rows_of(residual)
    if rows:
        _forward[(rows,)](
            x, other, weight.contiguous(), y, total, x.stride(0), other.stride(0), eps,
            N=n, LOG2=log2_ceil(n), ADD=add, num_warps=_warps(n), enable_fp_fusion=False,
        )  # fmt: skip
    return y, total


def rms_norm_backward(
    grad: Tensor, grad_total: Tensor | None, x: Tensor, weight: Tensor, eps: float
) -> tuple[Tensor, Tensor]:
    """Gradients of the norm of x [T, N] -> (dx [T, N], dweight [N]).

    `grad_total` [T, N], the gradient of the residual stream, is added to dx.
    """
    x, grad = rows_of(x), rows_of(grad)
    rows, n = x.shape
    add = grad_total is not None
    other = grad if grad_total is None else rows_of(grad_total)
    dx = torch.empty(rows, n, dtype=x.dtype, device=x.device)
    programs = min(rows, _BACKWARD.programs * processors(x))
    if not rows:
        return dx, torch.zeros_like(weight)
    partial = torch.empty(programs, n, dtype=torch.float32, device=x.device)
    _backward[(programs,)](
        grad, other, x, weight.contiguous(), dx, partial, rows,
        grad.stride(0), other.stride(0), x.stride(0), eps,
        N=n, LOG2=log2_ceil(n), ADD=add, AHEAD=_BACKWARD.ahead,
        num_warps=min(16, _BACKWARD.warps * _warps(n)),
    )  # fmt: skip
    (dweight,) = sum_rows(partial, programs, [weight.dtype])
    return dx, dweight
