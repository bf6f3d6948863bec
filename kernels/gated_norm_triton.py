"""Triton backend of `isomodels::gated_rms_norm`; a block of heads a program."""

# Arguments of kernels have Triton's own types.
# mypy: disable-error-code="no-untyped-def"

import torch
import triton
import triton.language as tl
from torch import Tensor

from isomodels.kernels.common_triton import log2_ceil, pairwise_sum, processors, sum_rows
from isomodels.kernels.heads_triton import dense_heads, heads_of, places, silu
from isomodels.kernels.rms_norm_triton import inverse_rms

_ROWS, _WARPS = 16, 4
# rows, warps, programs a multiprocessor, loads ahead
_BACKWARD_ROWS, _BACKWARD_WARPS, _BACKWARD_PROGRAMS, _AHEAD = 32, 8, 2, 1


@triton.jit(do_not_specialize=["tokens"])
def _forward(
    x_ptr, gate_ptr, weight_ptr, y_ptr, tokens, stride_t, stride_h, gate_stride_t, gate_stride_h,
    eps, HEADS: tl.constexpr, N: tl.constexpr, LOG2: tl.constexpr, ROWS: tl.constexpr,
):  # fmt: skip
    token, head, real = heads_of(tl.program_id(0), tokens, HEADS, ROWS)
    columns = tl.arange(0, 2**LOG2)[None, :]
    mask = real[:, None] & (columns < N)
    at = x_ptr + places(token, head, stride_t, stride_h) + columns
    x = tl.load(at, mask=mask, other=0.0).to(tl.float32)
    at = gate_ptr + places(token, head, gate_stride_t, gate_stride_h) + columns
    gate = tl.load(at, mask=mask, other=0.0).to(tl.float32)
    weight = tl.load(weight_ptr + columns, mask=columns < N, other=0.0).to(tl.float32)
    scale = inverse_rms(pairwise_sum(x * x, ROWS, LOG2), N, eps)[:, None]
    y = x * scale * weight * silu(gate)
    at = y_ptr + places(token, head, HEADS * N, N) + columns
    tl.store(at, y.to(y_ptr.dtype.element_ty), mask=mask)


@triton.jit(do_not_specialize=["tokens"])
def _backward(
    grad_ptr, x_ptr, gate_ptr, weight_ptr, dx_ptr, dgate_ptr, partial_ptr, tokens,
    grad_stride_t, grad_stride_h, stride_t, stride_h, gate_stride_t, gate_stride_h, eps,
    HEADS: tl.constexpr, N: tl.constexpr, LOG2: tl.constexpr, ROWS: tl.constexpr,
    AHEAD: tl.constexpr,
):  # fmt: skip
    """Each program walks over rows and keeps its part of the weight's gradient in registers."""
    columns = tl.arange(0, 2**LOG2)[None, :]
    weight = tl.load(weight_ptr + columns, mask=columns < N, other=0.0).to(tl.float32)
    dweight = tl.zeros((ROWS, 2**LOG2), tl.float32)
    blocks = tl.cdiv(tokens * HEADS, ROWS)
    for block in tl.range(tl.program_id(0), blocks, tl.num_programs(0), num_stages=AHEAD):
        token, head, real = heads_of(block, tokens, HEADS, ROWS)
        mask = real[:, None] & (columns < N)
        at = grad_ptr + places(token, head, grad_stride_t, grad_stride_h) + columns
        grad = tl.load(at, mask=mask, other=0.0).to(tl.float32)
        at = x_ptr + places(token, head, stride_t, stride_h) + columns
        x = tl.load(at, mask=mask, other=0.0).to(tl.float32)
        at = gate_ptr + places(token, head, gate_stride_t, gate_stride_h) + columns
        gate = tl.load(at, mask=mask, other=0.0).to(tl.float32)
        open_ = 1.0 / (1.0 + tl.exp(-gate))
        scale = inverse_rms(tl.sum(x * x, axis=1), N, eps)[:, None]
        unit = x * scale
        dgate = grad * unit * weight * open_ * (1.0 + gate * (1.0 - open_))
        grad = grad * gate * open_
        dweight += grad * unit
        grad = grad * weight
        dx = (grad - unit * (tl.sum(grad * unit, axis=1) / N)[:, None]) * scale
        out = places(token, head, HEADS * N, N) + columns
        tl.store(dx_ptr + out, dx.to(dx_ptr.dtype.element_ty), mask=mask)
        tl.store(dgate_ptr + out, dgate.to(dgate_ptr.dtype.element_ty), mask=mask)
    column = tl.arange(0, 2**LOG2)
    total = tl.sum(dweight, axis=0)
    tl.store(partial_ptr + tl.program_id(0) * N + column, total, mask=column < N)


def gated_rms_norm(x: Tensor, gate: Tensor, weight: Tensor, eps: float) -> Tensor:
    """x and gate [T, heads, N], views of any strides -> [T, heads, N], contiguous."""
    x, gate = dense_heads(x), dense_heads(gate)
    tokens, heads, n = x.shape
    y = torch.empty(tokens, heads, n, dtype=x.dtype, device=x.device)
    if y.numel():
        _forward[(triton.cdiv(tokens * heads, _ROWS),)](
            x, gate, weight.contiguous(), y, tokens, *x.stride()[:2], *gate.stride()[:2], eps,
            HEADS=heads, N=n, LOG2=log2_ceil(n), ROWS=_ROWS,
            num_warps=_WARPS, enable_fp_fusion=False,
        )  # fmt: skip
    return y


def gated_rms_norm_backward(
    grad: Tensor, x: Tensor, gate: Tensor, weight: Tensor, eps: float
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients of x and of the gate [T, heads, N], contiguous, and of the weight [N]."""
    grad, x, gate = dense_heads(grad), dense_heads(x), dense_heads(gate)
    tokens, heads, n = x.shape
    dx, dgate = (torch.empty(tokens, heads, n, dtype=x.dtype, device=x.device) for _ in range(2))
    if not dx.numel():
        return dx, dgate, torch.zeros_like(weight, memory_format=torch.contiguous_format)
    blocks = triton.cdiv(tokens * heads, _BACKWARD_ROWS)
    programs = min(blocks, _BACKWARD_PROGRAMS * processors(x))
    partial = torch.empty(programs, n, dtype=torch.float32, device=x.device)
    _backward[(programs,)](
        grad, x, gate, weight.contiguous(), dx, dgate, partial, tokens,
        *grad.stride()[:2], *x.stride()[:2], *gate.stride()[:2], eps,
        HEADS=heads, N=n, LOG2=log2_ceil(n), ROWS=_BACKWARD_ROWS, AHEAD=_AHEAD,
        num_warps=_BACKWARD_WARPS,
    )  # fmt: skip
    return dx, dgate, sum_rows(partial, programs, [weight.dtype])[0]
