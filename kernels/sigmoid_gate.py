"""`isomodels::sigmoid_gate`: x * sigmoid(gate) in fp32 with one rounding.

Mathematics: Qiu et al., "Gated Attention for Large Language Models" (2025).
"""

from typing import Any

import torch
from torch import Tensor

from isomodels.kernels.fixed_order import one_thread
from isomodels.kernels.schedule import Schedule, declare

SCHEDULE = declare(
    Schedule(
        operation="sigmoid_gate",
        backend="torch",
        version=1,
        constants={"sigmoid": "1 / (1 + exp(-x)), float32", "roundings": 1},
    )
)
TRITON_SCHEDULE = declare(
    Schedule(
        operation="sigmoid_gate",
        backend="triton",
        version=1,
        constants={
            "sigmoid": "1 / (1 + exp(-x)), float32, the quotient rounded to nearest",
            "exp": "the GPU's own power of two of x times log2(e)",
            "roundings": 1,
        },
    )
)


@torch.library.custom_op("isomodels::sigmoid_gate", mutates_args=(), device_types="cpu")
def sigmoid_gate(x: Tensor, gate: Tensor) -> Tensor:
    """Gate the output of attention.

    Args:
        x: [T, heads, D], float32 or bfloat16.
        gate: [T, heads, D], dtype of `x`, any strides.

    Returns:
        [T, heads, D] in the dtype of `x`.

    Raises:
        ValueError: naming shapes that do not fit.
    """
    _check(x, gate)
    with one_thread():
        # torch's sigmoid rounds differently in its vector body and its scalar tail.
        return (x.float() * (1.0 / (1.0 + torch.exp(-gate.float())))).to(x.dtype)


def _check(x: Tensor, gate: Tensor) -> None:
    if x.dim() != 3 or gate.shape != x.shape:
        raise ValueError(
            "sigmoid_gate needs two tensors of one shape [T, heads, D], "
            f"got {list(x.shape)} and {list(gate.shape)}"
        )


@sigmoid_gate.register_kernel("cuda")
def _(x: Tensor, gate: Tensor) -> Tensor:
    from isomodels.kernels import sigmoid_gate_triton

    _check(x, gate)
    return sigmoid_gate_triton.sigmoid_gate(x, gate)


@sigmoid_gate.register_fake
def _(x: Tensor, gate: Tensor) -> Tensor:
    return torch.empty_like(x, memory_format=torch.contiguous_format)


# An operator of its own, so that torch.compile need not look into Triton launches.
@torch.library.custom_op("isomodels::sigmoid_gate_backward", mutates_args=(), device_types="cuda")
def sigmoid_gate_backward(grad: Tensor, x: Tensor, gate: Tensor) -> tuple[Tensor, Tensor]:
    """Gradients of `sigmoid_gate` on the GPU: of x and of the gate."""
    from isomodels.kernels import sigmoid_gate_triton

    return sigmoid_gate_triton.sigmoid_gate_backward(grad, x, gate)


@sigmoid_gate_backward.register_fake
def _(grad: Tensor, x: Tensor, gate: Tensor) -> tuple[Tensor, Tensor]:
    return x.new_empty(x.shape), x.new_empty(x.shape)


def _setup_context(ctx: Any, inputs: tuple, output: Any) -> None:
    ctx.save_for_backward(*inputs)


def _backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor]:
    x, gate = ctx.saved_tensors
    if grad.is_cuda:
        return sigmoid_gate_backward(grad, x, gate)
    grad, sigmoid = grad.float(), torch.sigmoid(gate.float())
    dgate = grad * x.float() * sigmoid * (1.0 - sigmoid)
    return (grad * sigmoid).to(x.dtype), dgate.to(gate.dtype)


sigmoid_gate.register_autograd(_backward, setup_context=_setup_context)
