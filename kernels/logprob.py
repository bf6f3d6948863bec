"""Logprobs over the vocabulary: `isomodels::lm_head` and `isomodels::log_normalize`, the two as
`isomodels::logprobs`, and `isomodels::token_logprobs`.

Logits are fp32 sums that are never rounded to the model dtype. The normaliser takes the exact row
maximum, then sums exponentials over the vocabulary padded with zeros to a multiple of
`VOCAB_ALIGNMENT`: blocks of `VOCAB_BLOCK`, then the blocks of each of `VOCAB_LEAVES` leaves, then
the leaves, each by halving. A logprob is (logit - maximum) - log(sum).
"""

from typing import Any

import torch
from torch import Tensor

from isomodels.kernels.fixed_order import (
    TILE_COLUMNS,
    TILE_ROWS,
    fold_sum,
    matmul_nt,
    one_thread,
    round_up,
)
from isomodels.kernels.linear import check_operands
from isomodels.kernels.schedule import Schedule, declare

VOCAB_BLOCK = 128
VOCAB_LEAVES = 8
VOCAB_ALIGNMENT = VOCAB_BLOCK * VOCAB_LEAVES

_NORMALIZER: dict[str, int | str] = {
    "accumulate": "float32",
    "vocab_block": VOCAB_BLOCK,
    "vocab_leaves": VOCAB_LEAVES,
    "sum": "halving",
    "result": "(logit - maximum) - log(sum)",
}
_LOGITS: dict[str, int | str] = {
    "logits": "float32, not rounded",
    "k_partition": 1,
    "tile_rows": TILE_ROWS,
    "tile_columns": TILE_COLUMNS,
}
LM_HEAD_SCHEDULE = declare(Schedule("lm_head", "torch", 1, _LOGITS))
NORMALIZE_SCHEDULE = declare(Schedule("log_normalize", "torch", 1, _NORMALIZER))
LOGPROBS_SCHEDULE = declare(Schedule("logprobs", "torch", 1, {**_LOGITS, **_NORMALIZER}))
SCHEDULE = declare(Schedule("token_logprobs", "torch", 1, {**_LOGITS, **_NORMALIZER}))

_TRITON_NORMALIZER: dict[str, int | str] = {
    "accumulate": "float32, products and sums rounded apart",
    "vocab_block": VOCAB_BLOCK,
    "vocab_leaves": VOCAB_LEAVES,
    "block": "maximum of the block, exponentials above it added, neighbours first",
    "leaf": "blocks scaled by exp(block maximum - leaf maximum), added likewise",
    "row": "leaves scaled by exp(leaf maximum - maximum), added likewise",
    "exp": "the GPU's own power of two of x times log2(e)",
    "result": "(logit - maximum) - log(sum)",
}
_TRITON_LOGITS: dict[str, int | str] = {
    "logits": "float32, not rounded",
    "accumulate": "float32 on the matrix units, K in order",
    "float32_operands": "ieee",
    "k_partition": 1,
}
TRITON_LM_HEAD_SCHEDULE = declare(Schedule("lm_head", "triton", 1, _TRITON_LOGITS))
TRITON_NORMALIZE_SCHEDULE = declare(Schedule("log_normalize", "triton", 1, _TRITON_NORMALIZER))
_TRITON_BOTH = {**_TRITON_LOGITS, **_TRITON_NORMALIZER}
TRITON_LOGPROBS_SCHEDULE = declare(Schedule("logprobs", "triton", 1, _TRITON_BOTH))
TRITON_SCHEDULE = declare(Schedule("token_logprobs", "triton", 1, _TRITON_BOTH))


@torch.library.custom_op("isomodels::lm_head", mutates_args=(), device_types="cpu")
def lm_head(hidden: Tensor, weight: Tensor) -> Tensor:
    """Logits.

    Args:
        hidden: [T, H], float32 or bfloat16.
        weight: [V, H], dtype of `hidden`.

    Returns:
        [T, V] fp32.
    """
    check_operands("lm_head", hidden, weight)
    with one_thread():
        return matmul_nt(hidden, weight).contiguous()


@torch.library.custom_op("isomodels::log_normalize", mutates_args=(), device_types="cpu")
def log_normalize(logits: Tensor, temperature: float = 1.0) -> Tensor:
    """Log-softmax of logits / temperature.

    Args:
        logits: [T, V] fp32.
        temperature: above 0; 1.0 leaves every bit of the logits.

    Returns:
        [T, V] fp32.
    """
    with one_thread():
        scaled = _scale(logits, temperature)
        row_max, log_sum = _normalizer(scaled)
        return (scaled - row_max) - log_sum


@torch.library.custom_op("isomodels::logprobs", mutates_args=(), device_types="cpu")
def logprobs(hidden: Tensor, weight: Tensor, temperature: float = 1.0) -> Tensor:
    """The bits of `log_normalize(lm_head(hidden, weight), temperature)`, without the logits.

    On a GPU the logits are normalised in place: there is one [T, V] tensor.

    Args:
        hidden: [T, H], float32 or bfloat16.
        weight: [V, H], dtype of `hidden`.
        temperature: above 0; 1.0 leaves every bit of the logits.

    Returns:
        [T, V] fp32.
    """
    check_operands("logprobs", hidden, weight)
    with one_thread():
        scaled = _scale(matmul_nt(hidden, weight), temperature)
        row_max, log_sum = _normalizer(scaled)
        return (scaled - row_max) - log_sum


@torch.library.custom_op("isomodels::token_logprobs", mutates_args=(), device_types="cpu")
def token_logprobs(
    hidden: Tensor, weight: Tensor, targets: Tensor, temperature: float = 1.0
) -> tuple[Tensor, Tensor]:
    """Logprob of one target a row; the bits of `log_normalize(lm_head(...))` at that target.

    Args:
        hidden: [T, H], float32 or bfloat16.
        weight: [V, H], dtype of `hidden`.
        targets: [T] int64, each in [0, V).
        temperature: above 0.

    Returns:
        (logprobs [T] fp32, (maximum, log of the sum) [T, 2] fp32 for the backward).

    Raises:
        IndexError: for a target outside the vocabulary. On a GPU, which would have to wait for
            the check, the logprob of such a target is NaN.
    """
    check_operands("token_logprobs", hidden, weight)
    vocab_size = weight.shape[0]
    if targets.numel() and not 0 <= int(targets.min()) <= int(targets.max()) < vocab_size:
        raise IndexError(f"a target lies outside the vocabulary of {vocab_size}")
    with one_thread():
        scaled = _scale(matmul_nt(hidden, weight), temperature)
        row_max, log_sum = _normalizer(scaled)
        chosen = scaled.gather(1, targets.unsqueeze(1))
        logprobs = ((chosen - row_max) - log_sum).squeeze(1)
        return logprobs, torch.cat((row_max, log_sum), 1)


@lm_head.register_kernel("cuda")
def _(hidden: Tensor, weight: Tensor) -> Tensor:
    from isomodels.kernels import linear_triton

    check_operands("lm_head", hidden, weight)
    return linear_triton.linear(hidden, weight, out_dtype=torch.float32)


@log_normalize.register_kernel("cuda")
def _(logits: Tensor, temperature: float = 1.0) -> Tensor:
    from isomodels.kernels import logprob_normalize_triton

    _check_scale(logits.dtype, temperature)
    return logprob_normalize_triton.log_normalize(logits, temperature)


@logprobs.register_kernel("cuda")
def _(hidden: Tensor, weight: Tensor, temperature: float = 1.0) -> Tensor:
    from isomodels.kernels import logprob_normalize_triton

    check_operands("logprobs", hidden, weight)
    _check_scale(torch.float32, temperature)
    return logprob_normalize_triton.logprobs(hidden, weight, temperature)


@token_logprobs.register_kernel("cuda")
def _(
    hidden: Tensor, weight: Tensor, targets: Tensor, temperature: float = 1.0
) -> tuple[Tensor, Tensor]:
    from isomodels.kernels import logprob_triton

    check_operands("token_logprobs", hidden, weight)
    _check_scale(torch.float32, temperature)
    return logprob_triton.token_logprobs(hidden, weight, targets, temperature)


def _check_scale(dtype: torch.dtype, temperature: float) -> None:
    if dtype != torch.float32:
        raise TypeError(f"logits must be float32, got {dtype}")
    if not temperature > 0.0:
        raise ValueError(f"temperature must be above 0, got {temperature}")


def _scale(logits: Tensor, temperature: float) -> Tensor:
    _check_scale(logits.dtype, temperature)
    # A tensor of one column, not a number: the division is then the one that samplers do.
    return logits / torch.full((len(logits), 1), temperature, dtype=torch.float32)


def _normalizer(logits: Tensor) -> tuple[Tensor, Tensor]:
    """[T, V] fp32 -> (row maximum [T, 1], log of the sum of exponentials above it [T, 1])."""
    rows, vocab_size = logits.shape
    row_max = logits.amax(1, keepdim=True)  # exact in any order
    padded = round_up(vocab_size, VOCAB_ALIGNMENT)
    exponentials = torch.zeros(rows, padded, dtype=torch.float32)
    exponentials[:, :vocab_size] = torch.exp(logits - row_max)
    blocks = exponentials.view(rows, VOCAB_LEAVES, padded // VOCAB_ALIGNMENT, VOCAB_BLOCK)
    total = fold_sum(fold_sum(fold_sum(blocks)))  # [T, leaves, blocks] -> [T, leaves] -> [T]
    return row_max, torch.log(total).unsqueeze(1)


@lm_head.register_fake
def _(hidden: Tensor, weight: Tensor) -> Tensor:
    return hidden.new_empty(hidden.shape[0], weight.shape[0], dtype=torch.float32)


@logprobs.register_fake
def _(hidden: Tensor, weight: Tensor, temperature: float = 1.0) -> Tensor:
    return hidden.new_empty(hidden.shape[0], weight.shape[0], dtype=torch.float32)


@log_normalize.register_fake
def _(logits: Tensor, temperature: float = 1.0) -> Tensor:
    return torch.empty_like(logits)


@token_logprobs.register_fake
def _(
    hidden: Tensor, weight: Tensor, targets: Tensor, temperature: float = 1.0
) -> tuple[Tensor, Tensor]:
    rows = hidden.shape[0]
    return (
        hidden.new_empty(rows, dtype=torch.float32),
        hidden.new_empty(rows, 2, dtype=torch.float32),
    )


# Operators of their own, so that torch.compile need not look into Triton launches.
@torch.library.custom_op("isomodels::logits_backward", mutates_args=(), device_types="cuda")
def logits_backward(grad: Tensor, hidden: Tensor, weight: Tensor) -> tuple[Tensor, Tensor]:
    """grad [T, V] fp32 of the logits -> (dhidden [T, H], dweight [V, H]) on the GPU."""
    from isomodels.kernels import logprob_triton

    return logprob_triton.logits_backward(grad, hidden, weight)


@torch.library.custom_op("isomodels::token_logprobs_backward", mutates_args=(), device_types="cuda")
def token_logprobs_backward(
    grad: Tensor,
    hidden: Tensor,
    weight: Tensor,
    targets: Tensor,
    normalizer: Tensor,
    temperature: float,
    exponentials: Tensor | None = None,
    tops: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """grad [T] fp32 of the logprobs -> (dhidden [T, H], dweight [V, H]) on the GPU.

    `exponentials` and `tops` are what `token_logprobs_kept` kept; the other logits are computed
    again.
    """
    from isomodels.kernels import logprob_triton

    kept = None if exponentials is None or tops is None else (exponentials, tops)
    return logprob_triton.token_logprobs_backward(
        grad, hidden, weight, targets, normalizer, temperature, kept
    )


@logits_backward.register_fake
def _(grad: Tensor, hidden: Tensor, weight: Tensor) -> tuple[Tensor, Tensor]:
    return hidden.new_empty(hidden.shape), weight.new_empty(weight.shape)


@token_logprobs_backward.register_fake
def _(
    grad: Tensor,
    hidden: Tensor,
    weight: Tensor,
    targets: Tensor,
    normalizer: Tensor,
    temperature: float,
    exponentials: Tensor | None = None,
    tops: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    return hidden.new_empty(hidden.shape), weight.new_empty(weight.shape)


def _lm_head_setup(ctx: Any, inputs: tuple, output: Any) -> None:
    ctx.save_for_backward(*inputs)


def _lm_head_backward(ctx: Any, grad: Tensor) -> tuple:
    return _logits_backward(grad, *ctx.saved_tensors)


def _logits_backward(grad: Tensor, hidden: Tensor, weight: Tensor) -> tuple[Tensor, Tensor]:
    if grad.is_cuda:
        return logits_backward(grad, hidden, weight)
    dhidden = (grad @ weight.float()).to(hidden.dtype)
    return dhidden, (grad.t() @ hidden.float()).to(weight.dtype)


def _normalize_setup(ctx: Any, inputs: tuple, output: Any) -> None:
    ctx.temperature = inputs[1]
    ctx.save_for_backward(output)


def _normalize_backward(ctx: Any, grad: Tensor) -> tuple:
    (normalized,) = ctx.saved_tensors
    return _logits_gradient(grad, normalized, ctx.temperature), None


def _logits_gradient(grad: Tensor, normalized: Tensor, temperature: float) -> Tensor:
    """From the gradient of the logprobs to that of the logits, both [T, V] fp32."""
    return (grad - normalized.exp() * grad.sum(1, keepdim=True)) / temperature


def _logprobs_setup(ctx: Any, inputs: tuple, output: Any) -> None:
    hidden, weight, ctx.temperature = inputs
    ctx.save_for_backward(hidden, weight, output)


def _logprobs_backward(ctx: Any, grad: Tensor) -> tuple:
    hidden, weight, normalized = ctx.saved_tensors
    dlogits = _logits_gradient(grad, normalized, ctx.temperature)
    return *_logits_backward(dlogits, hidden, weight), None


def _token_setup(ctx: Any, inputs: tuple, output: Any) -> None:
    hidden, weight, targets, ctx.temperature = inputs
    ctx.mark_non_differentiable(output[1])
    ctx.save_for_backward(hidden, weight, targets, output[1])


def _token_backward(ctx: Any, grad: Tensor, _: Tensor) -> tuple:
    args: tuple = (grad, *ctx.saved_tensors, ctx.temperature)
    gradients = token_logprobs_backward(*args) if grad.is_cuda else recomputed_backward(*args)
    return *gradients, None, None


def recomputed_backward(
    grad: Tensor,
    hidden: Tensor,
    weight: Tensor,
    targets: Tensor,
    normalizer: Tensor,
    temperature: float,
) -> tuple[Tensor, Tensor]:
    """`token_logprobs_backward` on the CPU: logits again, and no [T, V] tensor kept."""
    row_max, log_sum = normalizer.unsqueeze(1).unbind(-1)  # [T, 1] each
    scaled = (hidden.float() @ weight.float().t()) / temperature
    dlogits = -torch.exp(scaled - row_max - log_sum)
    dlogits[torch.arange(len(targets)), targets] += 1.0
    dlogits *= grad.unsqueeze(1) / temperature
    return _logits_backward(dlogits, hidden, weight)


lm_head.register_autograd(_lm_head_backward, setup_context=_lm_head_setup)
log_normalize.register_autograd(_normalize_backward, setup_context=_normalize_setup)
logprobs.register_autograd(_logprobs_backward, setup_context=_logprobs_setup)
token_logprobs.register_autograd(_token_backward, setup_context=_token_setup)
