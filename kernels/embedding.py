"""`isomodels::embedding`: rows of a table, copied bit for bit."""

from typing import Any

import torch
from torch import Tensor

from isomodels.kernels.schedule import Schedule, declare

SCHEDULE = declare(Schedule(operation="embedding", backend="torch", version=1))
TRITON_SCHEDULE = declare(Schedule(operation="embedding", backend="triton", version=1))


@torch.library.custom_op("isomodels::embedding", mutates_args=(), device_types="cpu")
def embedding(input_ids: Tensor, weight: Tensor) -> Tensor:
    """Look up rows.

    Args:
        input_ids: [T] int64, each in [0, V).
        weight: [V, H].

    Returns:
        [T, H] in the dtype of `weight`.

    Raises:
        IndexError: for an id outside the vocabulary.
    """
    # Not weight[input_ids]: that takes -1 for the last row.
    return torch.nn.functional.embedding(input_ids, weight)


@embedding.register_kernel("cuda")
def _(input_ids: Tensor, weight: Tensor) -> Tensor:
    return weight.index_select(0, input_ids)  # rows are copied: no order to fix


@embedding.register_fake
def _(input_ids: Tensor, weight: Tensor) -> Tensor:
    return weight.new_empty(input_ids.shape[0], weight.shape[1])


# An operator of its own, so that torch.compile need not look into Triton launches.
@torch.library.custom_op("isomodels::embedding_backward", mutates_args=(), device_types="cuda")
def embedding_backward(grad: Tensor, input_ids: Tensor, vocab_size: int) -> Tensor:
    """Sums of grad [T, H] by id on the GPU -> [V, H], in fp32 and rounded once."""
    from isomodels.kernels import embedding_triton

    return embedding_triton.embedding_backward(grad, input_ids, vocab_size, grad.dtype)


@embedding_backward.register_fake
def _(grad: Tensor, input_ids: Tensor, vocab_size: int) -> Tensor:
    return grad.new_empty(vocab_size, grad.shape[1])


def _setup_context(ctx: Any, inputs: tuple, output: Any) -> None:
    input_ids, weight = inputs
    ctx.save_for_backward(input_ids)
    ctx.weight_shape, ctx.weight_dtype = weight.shape, weight.dtype


def _backward(ctx: Any, grad: Tensor) -> tuple:
    (input_ids,) = ctx.saved_tensors
    if grad.is_cuda:
        dweight = embedding_backward(grad, input_ids, ctx.weight_shape[0])
        return None, dweight.to(ctx.weight_dtype)
    # fp32, or a frequent token's gradient stops growing in bf16
    dweight = torch.zeros(ctx.weight_shape, dtype=torch.float32)
    dweight.index_add_(0, input_ids, grad.float())
    return None, dweight.to(ctx.weight_dtype)


embedding.register_autograd(_backward, setup_context=_setup_context)
