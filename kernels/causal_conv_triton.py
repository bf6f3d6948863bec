"""Triton backend of `isomodels::causal_conv` and `isomodels::paged_causal_conv`.

A program finds the sequences of its tokens in `cu_seqlens` by itself: nothing is read back. With
kept windows, the first tokens of a sequence read the window that its last tokens replace: one
program does both, and the others take the tokens that need no window.
"""

# Arguments of kernels have Triton's own types.
# mypy: disable-error-code="no-untyped-def, assignment"
# Triton adds tuples and does not unpack them.
# ruff: noqa: RUF005

import torch
import triton
import triton.language as tl
from torch import Tensor

from isomodels.kernels.common_triton import log2_ceil, processors, rows_of, sum_rows
from isomodels.kernels.heads_triton import sigmoid, silu

_TOKENS, _CHANNELS, _EDGE_CHANNELS, _WARPS = 16, 256, 1024, 4
# tokens, channels, warps, programs a multiprocessor
_BACKWARD_TOKENS, _BACKWARD_CHANNELS, _BACKWARD_WARPS, _BACKWARD_PROGRAMS = 8, 128, 4, 4


@triton.jit
def _sequence_of(token, cu_ptr, num_seqs, steps):
    """Bounds of each token's sequence, by halving; of a token behind all, those of the last."""
    low = tl.zeros_like(token)
    high = low + num_seqs
    for _ in range(steps):
        middle = (low + high) // 2
        behind = tl.load(cu_ptr + middle) <= token
        low = tl.where(behind, middle, low)
        high = tl.where(behind, high, middle)
    return tl.load(cu_ptr + low), tl.load(cu_ptr + low + 1)


@triton.jit
def _body(
    block, x_ptr, weight_ptr, cu_ptr, y_ptr, tokens, num_seqs, steps, stride,
    CHANNELS: tl.constexpr, WIDTH: tl.constexpr, PAGED: tl.constexpr,
    TOKENS: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    """Tokens that need no window: all of them if there is none."""
    STRIPES: tl.constexpr = (CHANNELS + COLUMNS - 1) // COLUMNS
    token = (block // STRIPES) * TOKENS + tl.arange(0, TOKENS)
    channel = (block % STRIPES) * COLUMNS + tl.arange(0, COLUMNS)
    start, _ = _sequence_of(token, cu_ptr, num_seqs, steps)
    real = token < tl.load(cu_ptr + num_seqs)
    mine = token < tokens
    if PAGED:
        mine &= (token - start >= WIDTH - 1) | ~real  # a padded token becomes zero
    inside = channel < CHANNELS
    total = tl.zeros((TOKENS, COLUMNS), tl.float32)
    for tap in tl.static_range(WIDTH):
        source = token - (WIDTH - 1) + tap
        mask = (mine & real & (source >= start))[:, None] & inside[None, :]
        at = x_ptr + source.to(tl.int64)[:, None] * stride + channel[None, :]
        x = tl.load(at, mask=mask, other=0.0).to(tl.float32)
        weight = tl.load(weight_ptr + channel * WIDTH + tap, mask=inside, other=0.0)
        part = x * weight.to(tl.float32)[None, :]
        total = part if tap == 0 else total + part
    y = tl.where(real[:, None], silu(total), 0.0)
    at = y_ptr + token.to(tl.int64)[:, None] * CHANNELS + channel[None, :]
    tl.store(at, y.to(y_ptr.dtype.element_ty), mask=mine[:, None] & inside[None, :])


@triton.jit
def _edge(
    block, x_ptr, weight_ptr, window_ptr, slot_ptr, cu_ptr, length_ptr, y_ptr, stride,
    slot_stride, window_stride_n, window_stride_t, window_stride_c,
    CHANNELS: tl.constexpr, WIDTH: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    """The first tokens of one sequence, which read its window, and then its new window."""
    STRIPES: tl.constexpr = (CHANNELS + COLUMNS - 1) // COLUMNS
    sequence = block // STRIPES
    channel = (block % STRIPES) * COLUMNS + tl.arange(0, COLUMNS)
    inside = channel < CHANNELS
    start = tl.load(cu_ptr + sequence)
    count = tl.load(cu_ptr + sequence + 1) - start
    if count > 0:  # else its slot may be none
        x_at = x_ptr + start.to(tl.int64) * stride
        slot = tl.load(slot_ptr + sequence * slot_stride).to(tl.int64)
        window_at = window_ptr + slot * window_stride_n
        # A sequence that starts has no window.
        kept = tl.where(tl.load(length_ptr + sequence) > count, WIDTH - 1, 0)
        for i in tl.static_range(WIDTH - 1):
            if i < count:
                total = tl.zeros((COLUMNS,), tl.float32)
                for tap in tl.static_range(WIDTH):
                    if i + tap < WIDTH - 1:
                        at = window_at + (i + tap) * window_stride_t + channel * window_stride_c
                        x = tl.load(at, mask=channel < tl.where(kept > 0, CHANNELS, 0), other=0.0)
                    else:
                        at = x_at + (i + tap - (WIDTH - 1)) * stride + channel
                        x = tl.load(at, mask=inside, other=0.0)
                    weight = tl.load(weight_ptr + channel * WIDTH + tap, mask=inside, other=0.0)
                    part = x.to(tl.float32) * weight.to(tl.float32)
                    total = part if tap == 0 else total + part
                at = y_ptr + (start + i).to(tl.int64) * CHANNELS + channel
                tl.store(at, silu(total).to(y_ptr.dtype.element_ty), mask=inside)
        row = tl.arange(0, ROWS)[:, None]
        source = row + count
        real = (row < WIDTH - 1) & inside[None, :]
        old = (source < kept) & real
        at = window_at + source * window_stride_t + channel[None, :] * window_stride_c
        x = tl.load(at, mask=old, other=0.0)
        new = (source >= WIDTH - 1) & real
        at = x_at + (source - (WIDTH - 1)).to(tl.int64) * stride + channel[None, :]
        x = tl.where(new, tl.load(at, mask=new, other=0.0), x)
        tl.debug_barrier()  # no thread may overwrite what another has yet to read
        at = window_at + row * window_stride_t + channel[None, :] * window_stride_c
        tl.store(at, x, mask=real)


@triton.jit(do_not_specialize=["tokens", "num_seqs", "steps"])
def _forward(
    x_ptr, weight_ptr, window_ptr, slot_ptr, cu_ptr, length_ptr, y_ptr, tokens, num_seqs, steps,
    stride, slot_stride, window_stride_n, window_stride_t, window_stride_c,
    CHANNELS: tl.constexpr, WIDTH: tl.constexpr, ROWS: tl.constexpr, PAGED: tl.constexpr,
    TOKENS: tl.constexpr, COLUMNS: tl.constexpr, EDGE_COLUMNS: tl.constexpr,
):  # fmt: skip
    block = tl.program_id(0)
    if PAGED:
        edges = num_seqs * ((CHANNELS + EDGE_COLUMNS - 1) // EDGE_COLUMNS)
        if block < edges:
            _edge(
                block, x_ptr, weight_ptr, window_ptr, slot_ptr, cu_ptr, length_ptr, y_ptr, stride,
                slot_stride, window_stride_n, window_stride_t, window_stride_c,
                CHANNELS, WIDTH, ROWS, EDGE_COLUMNS,
            )  # fmt: skip
        else:
            _body(
                block - edges, x_ptr, weight_ptr, cu_ptr, y_ptr, tokens, num_seqs, steps, stride,
                CHANNELS, WIDTH, PAGED, TOKENS, COLUMNS,
            )  # fmt: skip
    else:
        _body(
            block, x_ptr, weight_ptr, cu_ptr, y_ptr, tokens, num_seqs, steps, stride,
            CHANNELS, WIDTH, PAGED, TOKENS, COLUMNS,
        )  # fmt: skip


@triton.jit(do_not_specialize=["tokens", "num_seqs", "steps"])
def _backward(
    grad_ptr, x_ptr, weight_ptr, cu_ptr, dx_ptr, partial_ptr, tokens, num_seqs, steps,
    grad_stride, stride, CHANNELS: tl.constexpr, WIDTH: tl.constexpr,
    TOKENS: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    """Each program walks over tokens of its channels and keeps its part of the taps' gradients.

    A token's input reaches `WIDTH` outputs, whose gradients before silu are made anew for it.
    """
    channel = tl.program_id(0) * COLUMNS + tl.arange(0, COLUMNS)
    inside = channel < CHANNELS
    taps = ()
    dtaps = ()
    for tap in tl.static_range(WIDTH):
        weight = tl.load(weight_ptr + channel * WIDTH + tap, mask=inside, other=0.0)
        taps = taps + (weight.to(tl.float32)[None, :],)
        dtaps = dtaps + (tl.zeros((TOKENS, COLUMNS), tl.float32),)
    last = tl.load(cu_ptr + num_seqs)
    for block in range(tl.program_id(1), tl.cdiv(tokens, TOKENS), tl.num_programs(1)):
        token = block * TOKENS + tl.arange(0, TOKENS)
        start, end = _sequence_of(token, cu_ptr, num_seqs, steps)
        real = token < last
        xs = ()
        for i in tl.static_range(2 * WIDTH - 1):
            source = token - (WIDTH - 1) + i
            mask = real & (source >= start) & (source < end)
            at = x_ptr + source.to(tl.int64)[:, None] * stride + channel[None, :]
            xs = xs + (tl.load(at, mask=mask[:, None] & inside[None, :], other=0.0),)
        dx = tl.zeros((TOKENS, COLUMNS), tl.float32)
        for shift in tl.static_range(WIDTH):
            y = tl.zeros((TOKENS, COLUMNS), tl.float32)
            for tap in tl.static_range(WIDTH):
                y += xs[shift + tap].to(tl.float32) * taps[tap]
            later = token + shift
            mask = (real & (later < end))[:, None] & inside[None, :]
            at = grad_ptr + later.to(tl.int64)[:, None] * grad_stride + channel[None, :]
            dy = tl.load(at, mask=mask, other=0.0).to(tl.float32)
            open_ = sigmoid(y)
            dy = dy * open_ * (1.0 + y * (1.0 - open_))
            dx += dy * taps[WIDTH - 1 - shift]
            if shift == 0:
                sums = ()
                for tap in tl.static_range(WIDTH):
                    sums = sums + (dtaps[tap] + dy * xs[tap].to(tl.float32),)
                dtaps = sums
        at = dx_ptr + token.to(tl.int64)[:, None] * CHANNELS + channel[None, :]
        mask = (token < tokens)[:, None] & inside[None, :]
        tl.store(at, dx.to(dx_ptr.dtype.element_ty), mask=mask)
    for tap in tl.static_range(WIDTH):
        at = partial_ptr + (tl.program_id(1) * CHANNELS + channel) * WIDTH + tap
        tl.store(at, tl.sum(dtaps[tap], axis=0), mask=inside)


def causal_conv(x: Tensor, weight: Tensor, cu_seqlens: Tensor) -> Tensor:
    """x [T, channels], a view of any strides -> [T, channels], contiguous."""
    return _run(x, weight, cu_seqlens, None)


def paged_causal_conv(
    x: Tensor,
    weight: Tensor,
    windows: Tensor,
    slots: Tensor,
    cu_seqlens_q: Tensor,
    seq_lens: Tensor,
) -> Tensor:
    """The same after the kept windows [num_slots, W - 1, channels], which it replaces."""
    return _run(x, weight, cu_seqlens_q, (windows, slots, seq_lens.contiguous()))


def _run(
    x: Tensor, weight: Tensor, cu_seqlens: Tensor, kept: tuple[Tensor, Tensor, Tensor] | None
) -> Tensor:
    x, weight, cu_seqlens = rows_of(x), weight.contiguous(), cu_seqlens.contiguous()
    tokens, channels = x.shape
    num_seqs, width = len(cu_seqlens) - 1, weight.shape[1]
    y = torch.empty(tokens, channels, dtype=x.dtype, device=x.device)
    if not y.numel() or num_seqs < 1:
        return y.zero_()
    windows, slots, lengths = (None, None, None) if kept is None else kept
    strides = (0, 0, 0, 0) if windows is None or slots is None else (
        slots.stride(0), *windows.stride()
    )  # fmt: skip
    programs = triton.cdiv(tokens, _TOKENS) * triton.cdiv(channels, _CHANNELS)
    if kept is not None:
        programs += num_seqs * triton.cdiv(channels, _EDGE_CHANNELS)
    _forward[(programs,)](
        x, weight, windows, slots, cu_seqlens, lengths, y, tokens, num_seqs, log2_ceil(num_seqs),
        x.stride(0), *strides,
        CHANNELS=channels, WIDTH=width, ROWS=2 ** log2_ceil(width - 1), PAGED=kept is not None,
        TOKENS=_TOKENS, COLUMNS=_CHANNELS, EDGE_COLUMNS=_EDGE_CHANNELS,
        num_warps=_WARPS, enable_fp_fusion=False,
    )  # fmt: skip
    return y


def causal_conv_backward(
    grad: Tensor, x: Tensor, weight: Tensor, cu_seqlens: Tensor
) -> tuple[Tensor, Tensor]:
    """Gradients of x [T, channels], contiguous, and of the weight [channels, W]."""
    grad, x = rows_of(grad), rows_of(x)
    tokens, channels = x.shape
    num_seqs, width = len(cu_seqlens) - 1, weight.shape[1]
    dx = torch.empty(tokens, channels, dtype=x.dtype, device=x.device)
    if not dx.numel() or num_seqs < 1:
        return dx.zero_(), torch.zeros_like(weight, memory_format=torch.contiguous_format)
    stripes = triton.cdiv(channels, _BACKWARD_CHANNELS)
    most = max(1, _BACKWARD_PROGRAMS * processors(x) // stripes)
    programs = min(triton.cdiv(tokens, _BACKWARD_TOKENS), most)
    partial = torch.empty(programs, channels * width, dtype=torch.float32, device=x.device)
    _backward[(stripes, programs)](
        grad, x, weight.contiguous(), cu_seqlens.contiguous(), dx, partial, tokens, num_seqs,
        log2_ceil(num_seqs), grad.stride(0), x.stride(0),
        CHANNELS=channels, WIDTH=width, TOKENS=_BACKWARD_TOKENS, COLUMNS=_BACKWARD_CHANNELS,
        num_warps=_BACKWARD_WARPS,
    )  # fmt: skip
    (dweight,) = sum_rows(partial, programs, [weight.dtype])
    return dx, dweight.view(channels, width)
