"""`isomodels::one_plus`: 1 + w in fp32, the weight that a zero-centred RMSNorm multiplies with.

Checkpoints of Qwen3-Next and Qwen3.5 store w. The sum is made in fp32 at each use: in bfloat16 it
would lose a small w (1 + 0.001 is 1), and a stored sum could be shifted twice.
"""

from typing import Any

import torch
from torch import Tensor

from isomodels.kernels.fixed_order import one_thread
from isomodels.kernels.schedule import Schedule, declare

SCHEDULE = declare(Schedule("one_plus", "torch", 1, {"sum": "float32"}))
TRITON_SCHEDULE = declare(Schedule("one_plus", "triton", 1, {"sum": "float32"}))


@torch.library.custom_op("isomodels::one_plus", mutates_args=(), device_types="cpu")
def one_plus(weight: Tensor) -> Tensor:
    """[N] float32 or bfloat16 -> 1 + weight, [N] fp32."""
    with one_thread():
        return 1.0 + weight.float()


@one_plus.register_kernel("cuda")
def _(weight: Tensor) -> Tensor:
    from isomodels.kernels import one_plus_triton

    return one_plus_triton.one_plus(weight)


@one_plus.register_fake
def _(weight: Tensor) -> Tensor:
    return weight.new_empty(weight.shape, dtype=torch.float32)


def _setup_context(ctx: Any, inputs: tuple, output: Any) -> None:
    ctx.dtype = inputs[0].dtype


def _backward(ctx: Any, grad: Tensor) -> Tensor:
    return grad.to(ctx.dtype)


one_plus.register_autograd(_backward, setup_context=_setup_context)
