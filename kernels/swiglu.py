"""`isomodels::swiglu`: silu(gate) * up in fp32 with one rounding.

Mathematics: Shazeer, "GLU Variants Improve Transformer" (2020).
"""

from typing import Any

import torch
from torch import Tensor

from isomodels.kernels.fixed_order import one_thread
from isomodels.kernels.schedule import Schedule, declare

SCHEDULE = declare(
    Schedule(
        operation="swiglu",
        backend="torch",
        version=1,
        constants={"silu": "x / (1 + exp(-x))", "roundings": 1},
    )
)

TRITON_SCHEDULE = declare(
    Schedule(
        operation="swiglu",
        backend="triton",
        version=1,
        constants={
            "silu": "x / (1 + exp(-x)), the quotient rounded to nearest",
            "exp": "the GPU's own power of two of x times log2(e)",
            "roundings": 1,
        },
    )
)


@torch.library.custom_op("isomodels::swiglu", mutates_args=(), device_types="cpu")
def swiglu(gate_up: Tensor) -> Tensor:
    """Gated activation of a fused projection.

    Args:
        gate_up: [T, 2 * I], float32 or bfloat16; the first half is the gate.

    Returns:
        [T, I] in the dtype of `gate_up`.
    """
    with one_thread():
        gate, up = gate_up.float().chunk(2, -1)
        # torch's silu rounds differently in its vector body and its scalar tail.
        return (gate / (1.0 + torch.exp(-gate)) * up).to(gate_up.dtype)


@swiglu.register_kernel("cuda")
def _(gate_up: Tensor) -> Tensor:
    from isomodels.kernels import swiglu_triton

    return swiglu_triton.swiglu(gate_up)


@swiglu.register_fake
def _(gate_up: Tensor) -> Tensor:
    return gate_up.new_empty(gate_up.shape[0], gate_up.shape[1] // 2)


# An operator of its own, so that torch.compile need not look into Triton launches.
@torch.library.custom_op("isomodels::swiglu_backward", mutates_args=(), device_types="cuda")
def swiglu_backward(grad: Tensor, gate_up: Tensor) -> Tensor:
    """Gradient of `swiglu` on the GPU: grad [T, I], gate_up [T, 2 * I] -> [T, 2 * I]."""
    from isomodels.kernels import swiglu_triton

    return swiglu_triton.swiglu_backward(grad, gate_up)


@swiglu_backward.register_fake
def _(grad: Tensor, gate_up: Tensor) -> Tensor:
    return gate_up.new_empty(gate_up.shape)


def _setup_context(ctx: Any, inputs: tuple, output: Any) -> None:
    ctx.save_for_backward(*inputs)


def _backward(ctx: Any, grad: Tensor) -> Tensor:
    (gate_up,) = ctx.saved_tensors
    if grad.is_cuda:
        return swiglu_backward(grad, gate_up)
    gate, up = gate_up.float().chunk(2, -1)
    grad = grad.float()
    sigmoid = torch.sigmoid(gate)
    dgate = grad * up * sigmoid * (1.0 + gate * (1.0 - sigmoid))
    return torch.cat((dgate, grad * gate * sigmoid), -1).to(gate_up.dtype)


swiglu.register_autograd(_backward, setup_context=_setup_context)
