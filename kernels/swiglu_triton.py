"""Triton backend of `isomodels::swiglu`: elementwise, so nothing but one element moves a bit."""

# Arguments of kernels have Triton's own types.
# mypy: disable-error-code="no-untyped-def"

import torch
import triton
import triton.language as tl
from torch import Tensor

from isomodels.kernels.common_triton import log2_ceil, rows_of
from isomodels.kernels.tensor_map_triton import cdiv

_BLOCK = 2048  # elements a program: of one row, or of several short ones


@triton.jit
def _places(rows, width, ROWS: tl.constexpr, BLOCK: tl.constexpr):
    """Rows [ROWS, 1], columns [1, BLOCK] and which elements exist."""
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)[:, None]
    columns = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)[None, :]
    return row, columns, (row < rows) & (columns < width)


@triton.jit(do_not_specialize=["rows"])
def _forward(x_ptr, y_ptr, rows, stride, width, ROWS: tl.constexpr, BLOCK: tl.constexpr):
    row, columns, mask = _places(rows, width, ROWS, BLOCK)
    gate = tl.load(x_ptr + row * stride + columns, mask=mask, other=0.0).to(tl.float32)
    up = tl.load(x_ptr + row * stride + width + columns, mask=mask, other=0.0).to(tl.float32)
    y = tl.div_rn(gate, 1.0 + tl.exp(-gate)) * up
    tl.store(y_ptr + row * width + columns, y.to(y_ptr.dtype.element_ty), mask=mask)


@triton.jit(do_not_specialize=["rows"])
def _backward(
    grad_ptr, x_ptr, dx_ptr, rows, grad_stride, stride, width,
    ROWS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    row, columns, mask = _places(rows, width, ROWS, BLOCK)
    gate = tl.load(x_ptr + row * stride + columns, mask=mask, other=0.0).to(tl.float32)
    up = tl.load(x_ptr + row * stride + width + columns, mask=mask, other=0.0).to(tl.float32)
    grad = tl.load(grad_ptr + row * grad_stride + columns, mask=mask, other=0.0).to(tl.float32)
    sigmoid = 1.0 / (1.0 + tl.exp(-gate))
    dgate = grad * up * sigmoid * (1.0 + gate * (1.0 - sigmoid))
    dup = grad * gate * sigmoid
    out = dx_ptr + row * 2 * width + columns
    tl.store(out, dgate.to(dx_ptr.dtype.element_ty), mask=mask)
    tl.store(out + width, dup.to(dx_ptr.dtype.element_ty), mask=mask)


def _shape(rows: int, width: int) -> tuple[tuple[int, int], dict[str, int]]:
    """Programs and the elements of each."""
    block = min(_BLOCK, 1 << log2_ceil(width))
    height = _BLOCK // block
    return (cdiv(rows, height), cdiv(width, block)), {"ROWS": height, "BLOCK": block}


def swiglu(gate_up: Tensor) -> Tensor:
    """[T, 2 I] -> silu(gate) * up [T, I]."""
    gate_up = rows_of(gate_up)
    rows, width = gate_up.shape[0], gate_up.shape[1] // 2
    y = torch.empty(rows, width, dtype=gate_up.dtype, device=gate_up.device)
    if y.numel():
        grid, shape = _shape(rows, width)
        _forward[grid](
            gate_up, y, rows, gate_up.stride(0), width,
            **shape, num_warps=4, enable_fp_fusion=False,
        )  # fmt: skip
    return y


def swiglu_backward(grad: Tensor, gate_up: Tensor) -> Tensor:
    """grad [T, I], gate_up [T, 2 I] -> [T, 2 I]."""
    gate_up, grad = rows_of(gate_up), rows_of(grad)
    rows, width = grad.shape
    dx = torch.empty(rows, 2 * width, dtype=gate_up.dtype, device=gate_up.device)
    if dx.numel():
        grid, shape = _shape(rows, width)
        _backward[grid](
            grad, gate_up, dx, rows, grad.stride(0), gate_up.stride(0), width,
            **shape, num_warps=4,
        )  # fmt: skip
    return dx
