"""Triton backend of `isomodels::delta_gates`; a block of tokens a program."""

# Arguments of kernels have Triton's own types.
# mypy: disable-error-code="no-untyped-def"

import torch
import triton
import triton.language as tl
from torch import Tensor

from isomodels.kernels.common_triton import log2_ceil, processors, sum_rows
from isomodels.kernels.heads_triton import sigmoid

_ELEMENTS, _WARPS = 512, 4
_BACKWARD_ELEMENTS, _BACKWARD_PROGRAMS = 1024, 1  # programs a multiprocessor


@triton.jit
def _log1p(z):
    """log(1 + z) for z from 0 to 1: 2 artanh(z / (2 + z)) by its series, to the last bits of fp32.

    A library's logarithm of 1 + z loses a small z, and its own log1p may change with its version.
    """
    s = tl.div_rn(z, 2.0 + z)  # at most 1/3
    t = s * s
    series = 1.0 / 15.0
    series = 1.0 / 13.0 + t * series
    series = 1.0 / 11.0 + t * series
    series = 1.0 / 9.0 + t * series
    series = 1.0 / 7.0 + t * series
    series = 1.0 / 5.0 + t * series
    series = 1.0 / 3.0 + t * series
    return 2.0 * s + 2.0 * s * (t * series)


@triton.jit(do_not_specialize=["tokens"])
def _forward(
    a_ptr, b_ptr, a_log_ptr, dt_bias_ptr, g_ptr, beta_ptr, tokens,
    a_stride_t, a_stride_h, b_stride_t, b_stride_h, FLOOR: tl.constexpr,
    HEADS: tl.constexpr, LOG2: tl.constexpr, ROWS: tl.constexpr,
):  # fmt: skip
    token = (tl.program_id(0) * ROWS + tl.arange(0, ROWS))[:, None].to(tl.int64)
    head = tl.arange(0, 2**LOG2)[None, :]
    mask = (token < tokens) & (head < HEADS)
    a = tl.load(a_ptr + token * a_stride_t + head * a_stride_h, mask=mask, other=0.0)
    b = tl.load(b_ptr + token * b_stride_t + head * b_stride_h, mask=mask, other=0.0)
    rate = tl.exp(tl.load(a_log_ptr + head, mask=head < HEADS, other=0.0))
    x = a.to(tl.float32) + tl.load(dt_bias_ptr + head, mask=head < HEADS, other=0.0)
    softplus = tl.maximum(x, 0.0, tl.PropagateNan.ALL) + _log1p(tl.exp(-tl.abs(x)))
    g = tl.maximum(-(rate * softplus), FLOOR, tl.PropagateNan.ALL)
    out = token * HEADS + head
    tl.store(g_ptr + out, g, mask=mask)
    tl.store(beta_ptr + out, sigmoid(b.to(tl.float32)), mask=mask)


@triton.jit(do_not_specialize=["tokens"])
def _backward(
    dg_ptr, dbeta_ptr, a_ptr, a_log_ptr, dt_bias_ptr, g_ptr, beta_ptr, da_ptr, db_ptr, partial_ptr,
    tokens, dg_stride_t, dg_stride_h, dbeta_stride_t, dbeta_stride_h, a_stride_t, a_stride_h,
    FLOOR: tl.constexpr, HEADS: tl.constexpr, LOG2: tl.constexpr, ROWS: tl.constexpr,
):  # fmt: skip
    """Each program walks over tokens and keeps its part of the parameters' gradients."""
    head = tl.arange(0, 2**LOG2)[None, :]
    rate = tl.exp(tl.load(a_log_ptr + head, mask=head < HEADS, other=0.0))
    dt_bias = tl.load(dt_bias_ptr + head, mask=head < HEADS, other=0.0)
    da_log = tl.zeros((ROWS, 2**LOG2), tl.float32)
    ddt_bias = tl.zeros((ROWS, 2**LOG2), tl.float32)
    for block in range(tl.program_id(0), tl.cdiv(tokens, ROWS), tl.num_programs(0)):
        token = (block * ROWS + tl.arange(0, ROWS))[:, None].to(tl.int64)
        mask = (token < tokens) & (head < HEADS)
        at = token * HEADS + head
        g = tl.load(g_ptr + at, mask=mask, other=0.0)
        beta = tl.load(beta_ptr + at, mask=mask, other=0.0)
        dg = tl.load(dg_ptr + token * dg_stride_t + head * dg_stride_h, mask=mask, other=0.0)
        dg = tl.where(g <= FLOOR, 0.0, dg)
        into = dbeta_ptr + token * dbeta_stride_t + head * dbeta_stride_h
        db = tl.load(into, mask=mask, other=0.0) * beta * (1.0 - beta)
        a = tl.load(a_ptr + token * a_stride_t + head * a_stride_h, mask=mask, other=0.0)
        da = -dg * rate * sigmoid(a.to(tl.float32) + dt_bias)
        tl.store(da_ptr + at, da.to(da_ptr.dtype.element_ty), mask=mask)
        tl.store(db_ptr + at, db.to(db_ptr.dtype.element_ty), mask=mask)
        da_log += dg * g
        ddt_bias += da
    column = tl.arange(0, 2**LOG2)
    out = partial_ptr + tl.program_id(0) * HEADS + column
    tl.store(out, tl.sum(da_log, axis=0), mask=column < HEADS)
    out += tl.num_programs(0) * HEADS
    tl.store(out, tl.sum(ddt_bias, axis=0), mask=column < HEADS)


def delta_gates(
    a: Tensor, b: Tensor, A_log: Tensor, dt_bias: Tensor, floor: float
) -> tuple[Tensor, Tensor]:
    """a and b [T, heads], views of any strides -> (g, beta), [T, heads] fp32."""
    tokens, heads = a.shape
    g, beta = (torch.empty(tokens, heads, dtype=torch.float32, device=a.device) for _ in range(2))
    if g.numel():
        rows = _rows(heads, _ELEMENTS)
        _forward[(triton.cdiv(tokens, rows),)](
            a, b, A_log.contiguous(), dt_bias.contiguous(), g, beta, tokens,
            *a.stride(), *b.stride(), FLOOR=floor,
            HEADS=heads, LOG2=log2_ceil(heads), ROWS=rows,
            num_warps=_WARPS, enable_fp_fusion=False,
        )  # fmt: skip
    return g, beta


def delta_gates_backward(
    dg: Tensor,
    dbeta: Tensor,
    a: Tensor,
    b: Tensor,
    A_log: Tensor,
    dt_bias: Tensor,
    g: Tensor,
    beta: Tensor,
    floor: float,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Gradients of a and b [T, heads], contiguous, and of A_log and dt_bias [heads]."""
    tokens, heads = a.shape
    da, db = (torch.empty(tokens, heads, dtype=x.dtype, device=a.device) for x in (a, b))
    if not da.numel():
        return da, db, torch.zeros_like(A_log), torch.zeros_like(dt_bias)
    rows = _rows(heads, _BACKWARD_ELEMENTS)
    programs = min(triton.cdiv(tokens, rows), _BACKWARD_PROGRAMS * processors(a))
    partial = torch.empty(2 * programs, heads, dtype=torch.float32, device=a.device)
    _backward[(programs,)](
        dg, dbeta, a, A_log.contiguous(), dt_bias.contiguous(), g, beta, da, db, partial, tokens,
        *dg.stride(), *dbeta.stride(), *a.stride(),
        FLOOR=floor, HEADS=heads, LOG2=log2_ceil(heads), ROWS=rows, num_warps=_WARPS,
    )  # fmt: skip
    dA_log, ddt_bias = sum_rows(partial, programs, [torch.float32, torch.float32])
    return da, db, dA_log, ddt_bias


def _rows(heads: int, elements: int) -> int:
    return max(1, elements >> log2_ceil(heads))
