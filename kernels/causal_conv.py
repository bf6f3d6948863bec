"""Depthwise causal convolution with silu over packed sequences (`isomodels::causal_conv`) and with
a carried window (`isomodels::paged_causal_conv`), with one definition for both.

out[t] = silu(sum over w of weight[w] * x[t - W + 1 + w]), fp32, taps added from the oldest to the
newest; what lies before a sequence is zero.

Mathematics: the short convolution of Mamba (Gu and Dao, 2023).
"""

import itertools
from typing import Any

import torch
from torch import Tensor

from isomodels.kernels.fixed_order import one_thread
from isomodels.kernels.schedule import Schedule, declare

_CONSTANTS: dict[str, int | str] = {
    "accumulate": "float32",
    "tap_order": "oldest first",
    "silu": "x / (1 + exp(-x))",
    "roundings": 1,
}
SCHEDULE = declare(Schedule("causal_conv", "torch", 1, _CONSTANTS))
PAGED_SCHEDULE = declare(Schedule("paged_causal_conv", "torch", 1, _CONSTANTS))

_TRITON: dict[str, int | str] = {
    **_CONSTANTS,
    "accumulate": "float32, each product added before it is rounded",
    "silu": "x / (1 + exp(-x)), the GPU's own quotient",
    "exp": "the GPU's own power of two of x times log2(e)",
}
TRITON_SCHEDULE = declare(Schedule("causal_conv", "triton", 1, _TRITON))
TRITON_PAGED_SCHEDULE = declare(Schedule("paged_causal_conv", "triton", 1, _TRITON))


@torch.library.custom_op("isomodels::causal_conv", mutates_args=(), device_types="cpu")
def causal_conv(x: Tensor, weight: Tensor, cu_seqlens: Tensor) -> Tensor:
    """Convolution of whole sequences, packed along the token axis.

    Args:
        x: [T, channels], float32 or bfloat16, any strides.
        weight: [channels, W], dtype of `x`.
        cu_seqlens: [num_seqs + 1] int32; sequence i holds tokens cu_seqlens[i] to cu_seqlens[i+1].

    Returns:
        [T, channels] in the dtype of `x`.

    Raises:
        ValueError: naming shapes that do not fit.
    """
    _check(x, weight)
    out = torch.empty_like(x, memory_format=torch.contiguous_format)
    with one_thread():
        nothing = x.new_zeros(weight.shape[1] - 1, x.shape[1])
        for start, end in itertools.pairwise(cu_seqlens.tolist()):
            history = torch.cat((nothing, x[start:end])).float()
            out[start:end] = _silu(_taps(history, weight.float())).to(x.dtype)
    return out


@torch.library.custom_op(
    "isomodels::paged_causal_conv", mutates_args=("windows",), device_types="cpu"
)
def paged_causal_conv(
    x: Tensor,
    weight: Tensor,
    windows: Tensor,
    slots: Tensor,
    cu_seqlens_q: Tensor,
    seq_lens: Tensor,
) -> Tensor:
    """Convolution of the newest tokens of each sequence, after the inputs it kept.

    Args:
        x: [T, channels], float32 or bfloat16, any strides.
        weight: [channels, W], dtype of `x`.
        windows: [num_slots, W - 1, channels], dtype of `x`: the last inputs of a sequence, oldest
            first; changed. A sequence that starts reads none of it.
        slots: [num_seqs] int32, where each sequence's window lies.
        cu_seqlens_q: [num_seqs + 1] int32 bounds of the new tokens in the token axis.
        seq_lens: [num_seqs] int32 lengths including the new tokens.

    Returns:
        [T, channels] in the dtype of `x`.

    Raises:
        ValueError: naming shapes that do not fit.
        TypeError: for windows of another dtype.
    """
    _check(x, weight)
    _check_windows(x, weight, windows)
    width = weight.shape[1]
    out = torch.zeros_like(x, memory_format=torch.contiguous_format)
    places = zip(slots.tolist(), seq_lens.tolist(), strict=True)
    with one_thread():
        for (start, end), (slot, length) in zip(
            itertools.pairwise(cu_seqlens_q.tolist()), places, strict=True
        ):
            if end == start:
                continue
            window = windows[slot] if length > end - start else torch.zeros_like(windows[slot])
            history = torch.cat((window, x[start:end]))
            windows[slot] = history[len(history) - width + 1 :]
            out[start:end] = _silu(_taps(history.float(), weight.float())).to(x.dtype)
    return out


def _check(x: Tensor, weight: Tensor) -> None:
    if x.dim() != 2 or weight.dim() != 2 or weight.shape[0] != x.shape[1]:
        raise ValueError(
            "causal_conv needs x [T, channels] and a weight [channels, width], "
            f"got {list(x.shape)} and {list(weight.shape)}"
        )


def _check_windows(x: Tensor, weight: Tensor, windows: Tensor) -> None:
    shape = (weight.shape[1] - 1, x.shape[1])
    if windows.shape[1:] != shape:
        raise ValueError(f"the windows must be [slots, {list(shape)}], got {list(windows.shape)}")
    if windows.dtype != x.dtype:
        raise TypeError(f"the windows hold {windows.dtype}, the model computes {x.dtype}")


def _taps(history: Tensor, weight: Tensor) -> Tensor:
    """history [W - 1 + n, channels], weight [channels, W], fp32 -> sums [n, channels]."""
    width = weight.shape[1]
    count = len(history) - width + 1
    total = history[:count] * weight[:, 0]
    for tap in range(1, width):
        total = total + history[tap : tap + count] * weight[:, tap]
    return total


def _silu(y: Tensor) -> Tensor:
    # torch's silu rounds differently in its vector body and its scalar tail.
    return y / (1.0 + torch.exp(-y))


@causal_conv.register_kernel("cuda")
def _(x: Tensor, weight: Tensor, cu_seqlens: Tensor) -> Tensor:
    from isomodels.kernels import causal_conv_triton

    _check(x, weight)
    return causal_conv_triton.causal_conv(x, weight, cu_seqlens)


@paged_causal_conv.register_kernel("cuda")
def _(
    x: Tensor,
    weight: Tensor,
    windows: Tensor,
    slots: Tensor,
    cu_seqlens_q: Tensor,
    seq_lens: Tensor,
) -> Tensor:
    from isomodels.kernels import causal_conv_triton

    _check(x, weight)
    _check_windows(x, weight, windows)
    args = (windows, slots, cu_seqlens_q, seq_lens)
    return causal_conv_triton.paged_causal_conv(x, weight, *args)


@causal_conv.register_fake
def _(x: Tensor, weight: Tensor, cu_seqlens: Tensor) -> Tensor:
    return torch.empty_like(x, memory_format=torch.contiguous_format)


@paged_causal_conv.register_fake
def _(
    x: Tensor,
    weight: Tensor,
    windows: Tensor,
    slots: Tensor,
    cu_seqlens_q: Tensor,
    seq_lens: Tensor,
) -> Tensor:
    return torch.empty_like(x, memory_format=torch.contiguous_format)


# An operator of its own, so that torch.compile need not look into Triton launches.
@torch.library.custom_op("isomodels::causal_conv_backward", mutates_args=(), device_types="cuda")
def causal_conv_backward(
    grad: Tensor, x: Tensor, weight: Tensor, cu_seqlens: Tensor
) -> tuple[Tensor, Tensor]:
    """Gradients of `causal_conv` on the GPU: of x and of the weight."""
    from isomodels.kernels import causal_conv_triton

    return causal_conv_triton.causal_conv_backward(grad, x, weight, cu_seqlens)


@causal_conv_backward.register_fake
def _(grad: Tensor, x: Tensor, weight: Tensor, cu_seqlens: Tensor) -> tuple[Tensor, Tensor]:
    return x.new_empty(x.shape), weight.new_empty(weight.shape)


def _setup_context(ctx: Any, inputs: tuple, output: Any) -> None:
    ctx.save_for_backward(*inputs)


def _backward(ctx: Any, grad: Tensor) -> tuple:
    x, weight, cu_seqlens = ctx.saved_tensors
    if grad.is_cuda:
        return *causal_conv_backward(grad, x, weight, cu_seqlens), None
    width, taps = weight.shape[1], weight.float()
    dx = x.new_zeros(x.shape, dtype=torch.float32)
    dweight = torch.zeros_like(taps)
    for start, end in itertools.pairwise(cu_seqlens.tolist()):
        count = end - start
        padded = torch.nn.functional.pad(x[start:end].float(), (0, 0, width - 1, 0))
        y = _taps(padded, taps)
        sigmoid = torch.sigmoid(y)
        dy = grad[start:end].float() * sigmoid * (1.0 + y * (1.0 - sigmoid))
        for tap in range(width):
            dweight[:, tap] += (dy * padded[tap : tap + count]).sum(0)
            shift = width - 1 - tap  # this tap reads the token `shift` places back
            if shift < count:
                dx[start : end - shift] += dy[shift:] * taps[:, tap]
    return dx.to(x.dtype), dweight.to(weight.dtype), None


causal_conv.register_autograd(_backward, setup_context=_setup_context)
