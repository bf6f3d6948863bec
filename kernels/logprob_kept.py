"""`isomodels::token_logprobs_kept`: the bits of `token_logprobs`, for a training step on a GPU.

The forward also keeps, of the first columns of the vocabulary, each exponential exp(logit - maximum
of its block), rounded to the dtype of the hidden states. The backward then has the probabilities of
these columns without a second product with the head. The rounding does no harm: the likeliest token
is the maximum of its block and kept as exactly 1, so the small gradient p - 1 of a confident row is
exact, and any other p is at most 1/2.
"""

from typing import Any

import torch
from torch import Tensor

from isomodels.kernels.fixed_order import round_up
from isomodels.kernels.linear import check_operands
from isomodels.kernels.logprob import (
    SCHEDULE,
    TRITON_SCHEDULE,
    VOCAB_BLOCK,
    _check_scale,
    recomputed_backward,
    token_logprobs,
    token_logprobs_backward,
)
from isomodels.kernels.schedule import Schedule, declare

KEPT_SCHEDULE = declare(Schedule("token_logprobs_kept", "torch", 1, SCHEDULE.constants))
TRITON_KEPT_SCHEDULE = declare(
    Schedule("token_logprobs_kept", "triton", 1, TRITON_SCHEDULE.constants)
)

# Bytes that a forward may keep. At 8,192 tokens and a vocabulary of 151,936 a training step then
# needs less memory than one that stores its logits in bfloat16.
MOST_KEPT = 5 * 2**28
COLUMNS = 16384  # what is kept of a large vocabulary is a multiple of this
_ROW = 8  # a kept row is a multiple of this long, which bulk copies need


@torch.library.custom_op("isomodels::token_logprobs_kept", mutates_args=(), device_types="cpu")
def token_logprobs_kept(
    hidden: Tensor, weight: Tensor, targets: Tensor, temperature: float, columns: int
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Logprob of one target a row, and what its backward needs. The CPU keeps nothing.

    Args:
        hidden, weight, targets, temperature: see `token_logprobs`.
        columns: of the vocabulary that a GPU keeps: V or more for all, or a multiple of
            `VOCAB_BLOCK`.

    Returns:
        (logprobs [T] fp32, (maximum, log of the sum) [T, 2] fp32, exponentials [T, columns] in the
        dtype of `hidden`, maxima of the blocks [T, blocks] fp32); the last two have no rows on the
        CPU.

    Raises:
        IndexError: see `token_logprobs`.
        ValueError: `columns` is neither.
    """
    logprobs, normalizer = token_logprobs(hidden, weight, targets, temperature)
    return logprobs, normalizer, *_room(hidden, weight, columns, 0)


@token_logprobs_kept.register_kernel("cuda")
def _(
    hidden: Tensor, weight: Tensor, targets: Tensor, temperature: float, columns: int
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    from isomodels.kernels import logprob_triton

    check_operands("token_logprobs_kept", hidden, weight)
    _check_scale(torch.float32, temperature)
    kept = _room(hidden, weight, columns, len(hidden))
    return *logprob_triton.token_logprobs(hidden, weight, targets, temperature, kept), *kept


@token_logprobs_kept.register_fake
def _(
    hidden: Tensor, weight: Tensor, targets: Tensor, temperature: float, columns: int
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    rows = hidden.shape[0]
    logprobs = hidden.new_empty(rows, dtype=torch.float32)
    normalizer = hidden.new_empty(rows, 2, dtype=torch.float32)
    return logprobs, normalizer, *_room(hidden, weight, columns, rows if hidden.is_cuda else 0)


def _room(hidden: Tensor, weight: Tensor, columns: int, rows: int) -> tuple[Tensor, Tensor]:
    """Exponentials and maxima, to be filled."""
    vocab_size = weight.shape[0]
    blocks = round_up(vocab_size, VOCAB_BLOCK) // VOCAB_BLOCK
    if columns < vocab_size and (columns < 0 or columns % VOCAB_BLOCK):
        raise ValueError(
            f"token_logprobs_kept keeps a multiple of {VOCAB_BLOCK} columns, or all {vocab_size}, "
            f"got {columns}"
        )
    return (
        hidden.new_empty(rows, round_up(min(columns, vocab_size), _ROW)),
        hidden.new_empty(rows, blocks, dtype=torch.float32),
    )


def _setup(ctx: Any, inputs: tuple, output: Any) -> None:
    *tensors, ctx.temperature, _ = inputs
    ctx.mark_non_differentiable(*output[1:])
    ctx.set_materialize_grads(False)  # zeros as large as what is kept
    ctx.save_for_backward(*tensors, *output[1:])


def _backward(ctx: Any, grad: Tensor | None, *_: Tensor | None) -> tuple:
    if grad is None:
        return None, None, None, None, None
    *tensors, exponentials, tops = ctx.saved_tensors
    args: tuple = (grad, *tensors, ctx.temperature)
    if grad.is_cuda:
        gradients = token_logprobs_backward(*args, exponentials, tops)
    else:
        gradients = recomputed_backward(*args)
    return *gradients, None, None, None


token_logprobs_kept.register_autograd(_backward, setup_context=_setup)


def columns_to_keep(hidden: Tensor, weight: Tensor) -> int:
    """How much of the vocabulary a forward keeps: nothing without a backward or off a GPU."""
    trains = torch.is_grad_enabled() and (hidden.requires_grad or weight.requires_grad)
    if not (trains and hidden.is_cuda):
        return 0
    room = MOST_KEPT // (max(hidden.shape[0], 1) * hidden.element_size())
    vocab_size = weight.shape[0]
    return vocab_size if vocab_size <= room else room // COLUMNS * COLUMNS


def target_logprobs(
    hidden: Tensor, weight: Tensor, targets: Tensor, temperature: float = 1.0
) -> Tensor:
    """Logprob of one target a row, [T] fp32, by the operator that suits: the bits are the same.

    Args:
        hidden, weight, targets, temperature: see `token_logprobs`.
    """
    columns = columns_to_keep(hidden, weight)
    if columns:
        return token_logprobs_kept(hidden, weight, targets, temperature, columns)[0]
    return token_logprobs(hidden, weight, targets, temperature)[0]
