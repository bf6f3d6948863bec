"""Triton backend of `isomodels::swiglu`: elementwise, so nothing but one element moves a bit."""

# Arguments of kernels have Triton's own types.
# mypy: disable-error-code="no-untyped-def"

import torch
import triton
import triton.language as tl
from torch import Tensor

from isomodels.kernels.common_triton import rows_of

_BLOCK = 2048


@triton.jit
def _forward(x_ptr, y_ptr, stride, width, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    columns = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    mask = columns < width
    gate = tl.load(x_ptr + row * stride + columns, mask=mask, other=0.0).to(tl.float32)
    up = tl.load(x_ptr + row * stride + width + columns, mask=mask, other=0.0).to(tl.float32)
    y = tl.div_rn(gate, 1.0 + tl.exp(-gate)) * up
    tl.store(y_ptr + row * width + columns, y.to(y_ptr.dtype.element_ty), mask=mask)


@triton.jit
def _backward(grad_ptr, x_ptr, dx_ptr, grad_stride, stride, width, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    columns = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    mask = columns < width
    gate = tl.load(x_ptr + row * stride + columns, mask=mask, other=0.0).to(tl.float32)
    up = tl.load(x_ptr + row * stride + width + columns, mask=mask, other=0.0).to(tl.float32)
    grad = tl.load(grad_ptr + row * grad_stride + columns, mask=mask, other=0.0).to(tl.float32)
    sigmoid = 1.0 / (1.0 + tl.exp(-gate))
    dgate = grad * up * sigmoid * (1.0 + gate * (1.0 - sigmoid))
    dup = grad * gate * sigmoid
    out = dx_ptr + row * 2 * width + columns
    tl.store(out, dgate.to(dx_ptr.dtype.element_ty), mask=mask)
    tl.store(out + width, dup.to(dx_ptr.dtype.element_ty), mask=mask)


def swiglu(gate_up: Tensor) -> Tensor:
    """[T, 2 I] -> silu(gate) * up [T, I]."""
    gate_up = rows_of(gate_up)
    rows, width = gate_up.shape[0], gate_up.shape[1] // 2
    y = torch.empty(rows, width, dtype=gate_up.dtype, device=gate_up.device)
    if y.numel():
        _forward[(rows, triton.cdiv(width, _BLOCK))](
            gate_up, y, gate_up.stride(0), width,
            BLOCK=_BLOCK, num_warps=4, enable_fp_fusion=False,
        )  # fmt: skip
    return y


def swiglu_backward(grad: Tensor, gate_up: Tensor) -> Tensor:
    """grad [T, I], gate_up [T, 2 I] -> [T, 2 I]."""
    gate_up, grad = rows_of(gate_up), rows_of(grad)
    rows, width = grad.shape
    dx = torch.empty(rows, 2 * width, dtype=gate_up.dtype, device=gate_up.device)
    if dx.numel():
        _backward[(rows, triton.cdiv(width, _BLOCK))](
            grad, gate_up, dx, grad.stride(0), gate_up.stride(0), width,
            BLOCK=_BLOCK, num_warps=4,
        )  # fmt: skip
    return dx
