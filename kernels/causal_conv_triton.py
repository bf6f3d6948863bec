"""Triton backend of `isomodels::causal_conv` and `isomodels::paged_causal_conv`.

A program walks over a run of tokens and keeps the last inputs of its channels in registers: each
input is read once. It finds the sequences of its tokens in `cu_seqlens` by itself: nothing is read
back. With kept windows, the first tokens of a sequence read the window that its last tokens
replace: one program does both, and the others take the tokens that need no window.
"""

# Arguments of kernels have Triton's own types.
# mypy: disable-error-code="no-untyped-def, assignment, misc, var-annotated"
# Triton adds tuples and does not unpack them.
# ruff: noqa: RUF005

import torch
import triton
import triton.language as tl
from torch import Tensor

from isomodels.kernels.common_triton import log2_ceil, rows_of, sum_rows

# tokens of a run, those whose inputs are loaded together, channels, warps
_RUN, _GROUP, _CHANNELS, _WARPS = 64, 8, 512, 4
_EDGE_CHANNELS = 512
_BACKWARD_RUN, _BACKWARD_GROUP, _BACKWARD_CHANNELS, _BACKWARD_WARPS = 128, 4, 512, 4


@triton.jit
def _taps(weight_ptr, channel, inside, WIDTH: tl.constexpr, POWER: tl.constexpr):
    """The weights of each tap, oldest first: WIDTH times [COLUMNS] fp32, loaded as they lie."""
    tap = tl.arange(0, POWER)[None, :]
    at = weight_ptr + channel[:, None] * WIDTH + tap
    weight = tl.load(at, mask=inside[:, None] & (tap < WIDTH), other=0.0).to(tl.float32)
    taps = ()
    for i in tl.static_range(WIDTH):
        taps = taps + (tl.sum(tl.where(tap == i, weight, 0.0), axis=1),)
    return taps


@triton.jit
def _convolve(taps, inputs, WIDTH: tl.constexpr):
    """The taps times their inputs, oldest first; each product is added before it is rounded."""
    total = taps[0] * inputs[0]
    for i in tl.static_range(1, WIDTH):
        total = tl.fma(taps[i], inputs[i], total)
    return total


@triton.jit
def _silu(y):
    return y / (1.0 + tl.exp(-y))


@triton.jit
def _sequence_of(token, cu_ptr, num_seqs, steps):
    """Bounds of a token's sequence, by halving; behind all, each token is one of its own."""
    low = token * 0
    high = low + num_seqs
    for _ in range(steps):
        middle = (low + high) // 2
        behind = tl.load(cu_ptr + middle) <= token
        low = tl.where(behind, middle, low)
        high = tl.where(behind, high, middle)
    start, end = tl.load(cu_ptr + low), tl.load(cu_ptr + low + 1)
    return tl.where(token < end, start, token), tl.where(token < end, end, token + 1)


@triton.jit
def _row(ptr, token, stride, channel, real, CHANNELS: tl.constexpr):
    """One token's channels in fp32; zeros where it is not `real`, a scalar."""
    at = ptr + token.to(tl.int64) * stride + channel
    return tl.load(at, mask=channel < tl.where(real, CHANNELS, 0), other=0.0).to(tl.float32)


@triton.jit
def _last_inputs(x_ptr, token, start, stride, channel, CHANNELS: tl.constexpr, WIDTH: tl.constexpr):
    """The WIDTH - 1 inputs before a token, oldest first; before its sequence there are zeros."""
    inputs = ()
    for i in tl.static_range(WIDTH - 1):
        source = token - (WIDTH - 1) + i
        inputs = inputs + (_row(x_ptr, source, stride, channel, source >= start, CHANNELS),)
    return inputs


@triton.jit
def _body(
    block, x_ptr, weight_ptr, cu_ptr, y_ptr, tokens, num_seqs, steps, stride,
    CHANNELS: tl.constexpr, WIDTH: tl.constexpr, POWER: tl.constexpr, PAGED: tl.constexpr,
    RUN: tl.constexpr, GROUP: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    """Tokens that need no window: all of them if there is none. Behind all sequences are zeros."""
    STRIPES: tl.constexpr = (CHANNELS + COLUMNS - 1) // COLUMNS
    channel = (block % STRIPES) * COLUMNS + tl.arange(0, COLUMNS)
    begin = (block // STRIPES) * RUN
    last = tl.load(cu_ptr + num_seqs)
    taps = _taps(weight_ptr, channel, channel < CHANNELS, WIDTH, POWER)
    start, end = _sequence_of(begin, cu_ptr, num_seqs, steps)
    inputs = _last_inputs(x_ptr, begin, start, stride, channel, CHANNELS, WIDTH)
    turns = tl.cdiv(tl.minimum(RUN, tokens - begin), GROUP)
    if PAGED:  # a run of decodes has nothing to walk for
        run = begin + tl.arange(0, RUN)
        begun, _ = _sequence_of(run, cu_ptr, num_seqs, steps)
        needed = (run < tokens) & ((run - begun >= WIDTH - 1) | (run >= last))
        turns *= tl.max(needed.to(tl.int32), axis=0)
    for turn in range(turns):
        group = begin + turn * GROUP
        for i in tl.static_range(GROUP):
            inputs = inputs + (_row(x_ptr, group + i, stride, channel, group + i < last, CHANNELS),)
        for i in tl.static_range(GROUP):
            token = group + i
            if token >= end:
                start, end = _sequence_of(token, cu_ptr, num_seqs, steps)
            own = ()
            for tap in tl.static_range(WIDTH):
                mine = token - (WIDTH - 1 - tap) >= start
                own = own + (tl.where(mine, inputs[i + tap], 0.0),)
            y = _silu(_convolve(taps, own, WIDTH))
            wanted = token < tokens
            if PAGED:
                wanted = (token < tokens) & ((token - start >= WIDTH - 1) | (token >= last))
            at = y_ptr + token.to(tl.int64) * CHANNELS + channel
            mask = channel < tl.where(wanted, CHANNELS, 0)
            tl.store(at, y.to(y_ptr.dtype.element_ty), mask=mask)
        kept = ()
        for i in tl.static_range(WIDTH - 1):
            kept = kept + (inputs[GROUP + i],)
        inputs = kept


@triton.jit
def _edge(
    block, x_ptr, weight_ptr, window_ptr, slot_ptr, cu_ptr, length_ptr, y_ptr, stride,
    slot_stride, window_stride_n, window_stride_t, window_stride_c,
    CHANNELS: tl.constexpr, WIDTH: tl.constexpr, POWER: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    """The first tokens of one sequence, which read its window, and then its new window."""
    STRIPES: tl.constexpr = (CHANNELS + COLUMNS - 1) // COLUMNS
    sequence = block // STRIPES
    channel = (block % STRIPES) * COLUMNS + tl.arange(0, COLUMNS)
    inside = channel < CHANNELS
    start = tl.load(cu_ptr + sequence)
    count = tl.load(cu_ptr + sequence + 1) - start
    if count > 0:  # else its slot may be none
        slot = tl.load(slot_ptr + sequence * slot_stride).to(tl.int64)
        window_at = window_ptr + slot * window_stride_n + channel * window_stride_c
        # A sequence that starts has no window.
        begun = tl.load(length_ptr + sequence) > count
        inputs = ()
        for i in tl.static_range(WIDTH - 1):
            mask = channel < tl.where(begun, CHANNELS, 0)
            inputs = inputs + (tl.load(window_at + i * window_stride_t, mask=mask, other=0.0),)
        for i in tl.static_range(WIDTH - 1):
            at = x_ptr + (start + i).to(tl.int64) * stride + channel
            mask = channel < tl.where(i < count, CHANNELS, 0)
            inputs = inputs + (tl.load(at, mask=mask, other=0.0),)
        taps = _taps(weight_ptr, channel, inside, WIDTH, POWER)
        for i in tl.static_range(WIDTH - 1):
            if i < count:
                own = ()
                for tap in tl.static_range(WIDTH):
                    own = own + (inputs[i + tap].to(tl.float32),)
                y = _silu(_convolve(taps, own, WIDTH))
                at = y_ptr + (start + i).to(tl.int64) * CHANNELS + channel
                tl.store(at, y.to(y_ptr.dtype.element_ty), mask=inside)
        tl.debug_barrier()  # no thread may overwrite what another has yet to read
        for i in tl.static_range(WIDTH - 1):
            # The new window's i-th: of the old one where the tokens are few.
            new = inputs[i]
            for few in tl.static_range(1, WIDTH - 1):
                new = tl.where(count == few, inputs[i + few], new)
            at = x_ptr + (start + count - (WIDTH - 1) + i).to(tl.int64) * stride + channel
            many = tl.load(at, mask=channel < tl.where(count >= WIDTH - 1, CHANNELS, 0), other=0.0)
            new = tl.where(count >= WIDTH - 1, many, new)
            tl.store(window_at + i * window_stride_t, new, mask=inside)


@triton.jit(do_not_specialize=["tokens", "num_seqs", "steps"])
def _forward(
    x_ptr, weight_ptr, window_ptr, slot_ptr, cu_ptr, length_ptr, y_ptr, tokens, num_seqs, steps,
    stride, slot_stride, window_stride_n, window_stride_t, window_stride_c,
    CHANNELS: tl.constexpr, WIDTH: tl.constexpr, POWER: tl.constexpr, PAGED: tl.constexpr,
    RUN: tl.constexpr, GROUP: tl.constexpr, COLUMNS: tl.constexpr, EDGE_COLUMNS: tl.constexpr,
):  # fmt: skip
    block = tl.program_id(0)
    if PAGED:
        edges = num_seqs * ((CHANNELS + EDGE_COLUMNS - 1) // EDGE_COLUMNS)
        if block < edges:
            _edge(
                block, x_ptr, weight_ptr, window_ptr, slot_ptr, cu_ptr, length_ptr, y_ptr, stride,
                slot_stride, window_stride_n, window_stride_t, window_stride_c,
                CHANNELS, WIDTH, POWER, EDGE_COLUMNS,
            )  # fmt: skip
        else:
            _body(
                block - edges, x_ptr, weight_ptr, cu_ptr, y_ptr, tokens, num_seqs, steps, stride,
                CHANNELS, WIDTH, POWER, PAGED, RUN, GROUP, COLUMNS,
            )  # fmt: skip
    else:
        _body(
            block, x_ptr, weight_ptr, cu_ptr, y_ptr, tokens, num_seqs, steps, stride,
            CHANNELS, WIDTH, POWER, PAGED, RUN, GROUP, COLUMNS,
        )  # fmt: skip


@triton.jit(do_not_specialize=["tokens", "num_seqs", "steps"])
def _backward(
    grad_ptr, x_ptr, weight_ptr, cu_ptr, dx_ptr, partial_ptr, tokens, num_seqs, steps,
    grad_stride, stride, CHANNELS: tl.constexpr, WIDTH: tl.constexpr, POWER: tl.constexpr,
    RUN: tl.constexpr, GROUP: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    """Each program walks over a run and keeps its part of the taps' gradients in registers.

    A token's output reads WIDTH inputs, so that an input's gradient is whole WIDTH - 1 tokens
    later; the run goes on for as many tokens, which count for its own inputs alone.
    """
    channel = tl.program_id(0) * COLUMNS + tl.arange(0, COLUMNS)
    inside = channel < CHANNELS
    begin = tl.program_id(1) * RUN
    stop = tl.minimum(begin + RUN, tokens)
    last = tl.load(cu_ptr + num_seqs)
    taps = _taps(weight_ptr, channel, inside, WIDTH, POWER)
    start, end = _sequence_of(begin, cu_ptr, num_seqs, steps)
    inputs = _last_inputs(x_ptr, begin, start, stride, channel, CHANNELS, WIDTH)
    open_ = ()  # gradients of the last inputs so far
    dtaps = ()
    for _ in tl.static_range(WIDTH - 1):
        open_ = open_ + (tl.zeros((COLUMNS,), tl.float32),)
    for _ in tl.static_range(WIDTH):
        dtaps = dtaps + (tl.zeros((COLUMNS,), tl.float32),)
    for turn in range(tl.cdiv(stop - begin + WIDTH - 1, GROUP)):
        group = begin + turn * GROUP
        grads = ()
        for i in tl.static_range(GROUP):
            real = group + i < tl.minimum(last, stop + WIDTH - 1)
            inputs = inputs + (_row(x_ptr, group + i, stride, channel, real, CHANNELS),)
            grads = grads + (_row(grad_ptr, group + i, grad_stride, channel, real, CHANNELS),)
        for i in tl.static_range(GROUP):
            token = group + i
            if token >= end:
                start, end = _sequence_of(token, cu_ptr, num_seqs, steps)
            own = ()
            for tap in tl.static_range(WIDTH):
                mine = token - (WIDTH - 1 - tap) >= start
                own = own + (tl.where(mine, inputs[i + tap], 0.0),)
            y = _convolve(taps, own, WIDTH)
            gate = 1.0 / (1.0 + tl.exp(-y))
            dy = grads[i] * gate * (1.0 + y * (1.0 - gate))
            counted = tl.where(token < stop, dy, 0.0)
            sums = ()
            grown = ()
            for tap in tl.static_range(WIDTH):
                sums = sums + (dtaps[tap] + counted * own[tap],)
                part = tl.where(token - (WIDTH - 1 - tap) >= start, dy * taps[tap], 0.0)
                if tap < WIDTH - 1:
                    part += open_[tap]
                grown = grown + (part,)
            dtaps = sums
            done = token - (WIDTH - 1)
            at = dx_ptr + done.to(tl.int64) * CHANNELS + channel
            mask = channel < tl.where((done >= begin) & (done < stop), CHANNELS, 0)
            tl.store(at, grown[0].to(dx_ptr.dtype.element_ty), mask=mask)
            rest = ()
            for tap in tl.static_range(1, WIDTH):
                rest = rest + (grown[tap],)
            open_ = rest
        kept = ()
        for i in tl.static_range(WIDTH - 1):
            kept = kept + (inputs[GROUP + i],)
        inputs = kept
    for tap in tl.static_range(WIDTH):
        at = partial_ptr + (tl.program_id(1) * CHANNELS + channel) * WIDTH + tap
        tl.store(at, dtaps[tap], mask=inside)


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
    programs = triton.cdiv(tokens, _RUN) * triton.cdiv(channels, _CHANNELS)
    if kept is not None:
        programs += num_seqs * triton.cdiv(channels, _EDGE_CHANNELS)
    _forward[(programs,)](
        x, weight, windows, slots, cu_seqlens, lengths, y, tokens, num_seqs, log2_ceil(num_seqs),
        x.stride(0), *strides,
        CHANNELS=channels, WIDTH=width, POWER=2 ** log2_ceil(width), PAGED=kept is not None,
        RUN=_RUN, GROUP=_GROUP, COLUMNS=_CHANNELS, EDGE_COLUMNS=_EDGE_CHANNELS,
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
    runs = triton.cdiv(tokens, _BACKWARD_RUN)
    partial = torch.empty(runs, channels * width, dtype=torch.float32, device=x.device)
    _backward[(triton.cdiv(channels, _BACKWARD_CHANNELS), runs)](
        grad, x, weight.contiguous(), cu_seqlens.contiguous(), dx, partial, tokens, num_seqs,
        log2_ceil(num_seqs), grad.stride(0), x.stride(0),
        CHANNELS=channels, WIDTH=width, POWER=2 ** log2_ceil(width),
        RUN=_BACKWARD_RUN, GROUP=_BACKWARD_GROUP, COLUMNS=_BACKWARD_CHANNELS,
        num_warps=_BACKWARD_WARPS,
    )  # fmt: skip
    (dweight,) = sum_rows(partial, runs, [weight.dtype])
    return dx, dweight.view(channels, width)
