"""Triton backend of `isomodels::sigmoid_gate`: elementwise, a block of heads a program."""

# Arguments of kernels have Triton's own types.
# mypy: disable-error-code="no-untyped-def"

import torch
import triton
import triton.language as tl
from torch import Tensor

from isomodels.kernels.common_triton import log2_ceil
from isomodels.kernels.heads_triton import dense_heads, heads_of, places, sigmoid

_ROWS, _WARPS = 16, 4


@triton.jit(do_not_specialize=["tokens"])
def _forward(
    x_ptr, gate_ptr, y_ptr, tokens, stride_t, stride_h, gate_stride_t, gate_stride_h,
    HEADS: tl.constexpr, D: tl.constexpr, LOG2: tl.constexpr, ROWS: tl.constexpr,
):  # fmt: skip
    token, head, real = heads_of(tl.program_id(0), tokens, HEADS, ROWS)
    columns = tl.arange(0, 2**LOG2)[None, :]
    mask = real[:, None] & (columns < D)
    x = tl.load(x_ptr + places(token, head, stride_t, stride_h) + columns, mask=mask, other=0.0)
    at = gate_ptr + places(token, head, gate_stride_t, gate_stride_h) + columns
    gate = tl.load(at, mask=mask, other=0.0).to(tl.float32)
    y = x.to(tl.float32) * sigmoid(gate)
    at = y_ptr + places(token, head, HEADS * D, D) + columns
    tl.store(at, y.to(y_ptr.dtype.element_ty), mask=mask)


@triton.jit(do_not_specialize=["tokens"])
def _backward(
    grad_ptr, x_ptr, gate_ptr, dx_ptr, dgate_ptr, tokens, grad_stride_t, grad_stride_h,
    stride_t, stride_h, gate_stride_t, gate_stride_h,
    HEADS: tl.constexpr, D: tl.constexpr, LOG2: tl.constexpr, ROWS: tl.constexpr,
):  # fmt: skip
    token, head, real = heads_of(tl.program_id(0), tokens, HEADS, ROWS)
    columns = tl.arange(0, 2**LOG2)[None, :]
    mask = real[:, None] & (columns < D)
    at = grad_ptr + places(token, head, grad_stride_t, grad_stride_h) + columns
    grad = tl.load(at, mask=mask, other=0.0).to(tl.float32)
    x = tl.load(x_ptr + places(token, head, stride_t, stride_h) + columns, mask=mask, other=0.0)
    at = gate_ptr + places(token, head, gate_stride_t, gate_stride_h) + columns
    open_ = sigmoid(tl.load(at, mask=mask, other=0.0).to(tl.float32))
    dgate = grad * x.to(tl.float32) * open_ * (1.0 - open_)
    out = places(token, head, HEADS * D, D) + columns
    tl.store(dx_ptr + out, (grad * open_).to(dx_ptr.dtype.element_ty), mask=mask)
    tl.store(dgate_ptr + out, dgate.to(dgate_ptr.dtype.element_ty), mask=mask)


def sigmoid_gate(x: Tensor, gate: Tensor) -> Tensor:
    """x and gate [T, heads, D], views of any strides -> [T, heads, D], contiguous."""
    x, gate = dense_heads(x), dense_heads(gate)
    tokens, heads, d = x.shape
    y = torch.empty(tokens, heads, d, dtype=x.dtype, device=x.device)
    if y.numel():
        _forward[(triton.cdiv(tokens * heads, _ROWS),)](
            x, gate, y, tokens, *x.stride()[:2], *gate.stride()[:2],
            HEADS=heads, D=d, LOG2=log2_ceil(d), ROWS=_ROWS,
            num_warps=_WARPS, enable_fp_fusion=False,
        )  # fmt: skip
    return y


def sigmoid_gate_backward(grad: Tensor, x: Tensor, gate: Tensor) -> tuple[Tensor, Tensor]:
    """Gradients of x and of the gate, contiguous; all [T, heads, D]."""
    grad, x, gate = dense_heads(grad), dense_heads(x), dense_heads(gate)
    tokens, heads, d = x.shape
    dx, dgate = (torch.empty(tokens, heads, d, dtype=x.dtype, device=x.device) for _ in range(2))
    if dx.numel():
        _backward[(triton.cdiv(tokens * heads, _ROWS),)](
            grad, x, gate, dx, dgate, tokens,
            *grad.stride()[:2], *x.stride()[:2], *gate.stride()[:2],
            HEADS=heads, D=d, LOG2=log2_ceil(d), ROWS=_ROWS, num_warps=_WARPS,
        )  # fmt: skip
    return dx, dgate
