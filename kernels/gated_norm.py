"""`isomodels::gated_rms_norm`: RMSNorm of each head, times the weight, times silu of a gate.

Mathematics: Yang et al., "Gated Delta Networks" (2024); the norm of Zhang and Sennrich (2019). All
in fp32 with one rounding (transformers rounds the normed value before the weight, Megatron before
the gate).
"""

from typing import Any

import torch
from torch import Tensor

from isomodels.kernels.fixed_order import one_thread
from isomodels.kernels.rms_norm import normalize, normalize_backward
from isomodels.kernels.schedule import Schedule, declare

SCHEDULE = declare(
    Schedule(
        operation="gated_rms_norm",
        backend="torch",
        version=1,
        constants={
            "accumulate": "float32",
            "sum": "halving",
            "order": "(x / rms * weight) * silu(gate)",
            "silu": "x / (1 + exp(-x))",
            "roundings": 1,
        },
    )
)
TRITON_SCHEDULE = declare(
    Schedule(
        operation="gated_rms_norm",
        backend="triton",
        version=1,
        constants={
            "accumulate": "float32, products and sums rounded apart",
            "sum": "neighbours first, zero-padded to a power of two",
            "inverse": "1 / sqrt, each rounded to nearest",
            "order": "(x / rms * weight) * silu(gate)",
            "silu": "x / (1 + exp(-x)), the quotient rounded to nearest",
            "exp": "the GPU's own power of two of x times log2(e)",
            "roundings": 1,
        },
    )
)


@torch.library.custom_op("isomodels::gated_rms_norm", mutates_args=(), device_types="cpu")
def gated_rms_norm(x: Tensor, gate: Tensor, weight: Tensor, eps: float) -> Tensor:
    """Norm over the last axis, then the gate.

    Args:
        x: [T, heads, N], float32 or bfloat16.
        gate: [T, heads, N], dtype of `x`, any strides.
        weight: [N], as stored: not shifted by one.
        eps: added to the mean of squares.

    Returns:
        [T, heads, N] in the dtype of `x`.

    Raises:
        ValueError: naming shapes that do not fit.
    """
    _check(x, gate, weight)
    with one_thread():
        unit, _ = normalize(x.float(), eps)
        z = gate.float()
        return (unit * weight.float() * (z / (1.0 + torch.exp(-z)))).to(x.dtype)


def _check(x: Tensor, gate: Tensor, weight: Tensor) -> None:
    if x.dim() != 3 or gate.shape != x.shape or weight.shape != x.shape[-1:]:
        raise ValueError(
            "gated_rms_norm needs x and gate [T, heads, N] and a weight [N], "
            f"got {list(x.shape)}, {list(gate.shape)} and {list(weight.shape)}"
        )


@gated_rms_norm.register_kernel("cuda")
def _(x: Tensor, gate: Tensor, weight: Tensor, eps: float) -> Tensor:
    from isomodels.kernels import gated_norm_triton

    _check(x, gate, weight)
    return gated_norm_triton.gated_rms_norm(x, gate, weight, eps)


@gated_rms_norm.register_fake
def _(x: Tensor, gate: Tensor, weight: Tensor, eps: float) -> Tensor:
    return torch.empty_like(x, memory_format=torch.contiguous_format)


# An operator of its own, so that torch.compile need not look into Triton launches.
@torch.library.custom_op("isomodels::gated_rms_norm_backward", mutates_args=(), device_types="cuda")
def gated_rms_norm_backward(
    grad: Tensor, x: Tensor, gate: Tensor, weight: Tensor, eps: float
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients of `gated_rms_norm` on the GPU: of x, of the gate and of the weight."""
    from isomodels.kernels import gated_norm_triton

    return gated_norm_triton.gated_rms_norm_backward(grad, x, gate, weight, eps)


@gated_rms_norm_backward.register_fake
def _(
    grad: Tensor, x: Tensor, gate: Tensor, weight: Tensor, eps: float
) -> tuple[Tensor, Tensor, Tensor]:
    return x.new_empty(x.shape), x.new_empty(x.shape), weight.new_empty(weight.shape)


def _setup_context(ctx: Any, inputs: tuple, output: Any) -> None:
    *tensors, ctx.eps = inputs
    ctx.save_for_backward(*tensors)


def _backward(ctx: Any, grad: Tensor) -> tuple:
    x, gate, weight = ctx.saved_tensors
    if grad.is_cuda:
        return *gated_rms_norm_backward(grad, x, gate, weight, ctx.eps), None
    unit, inverse_rms = normalize(x.float(), ctx.eps)
    grad, z, w = grad.float(), gate.float(), weight.float()
    sigmoid = torch.sigmoid(z)
    silu = z * sigmoid
    dweight = (grad * unit * silu).sum((0, 1)).to(weight.dtype)
    dgate = grad * unit * w * sigmoid * (1.0 + z * (1.0 - sigmoid))
    dx = normalize_backward(grad * w * silu, unit, inverse_rms)
    return dx.to(x.dtype), dgate.to(gate.dtype), dweight, None


gated_rms_norm.register_autograd(_backward, setup_context=_setup_context)
