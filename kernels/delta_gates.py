"""`isomodels::delta_gates`: decay and writing strength of the gated delta rule.

g = -exp(A_log) softplus(a + dt_bias), beta = sigmoid(b), all in fp32 and never rounded to the model
dtype: a decay acts over thousands of tokens.

Mathematics: Yang et al., "Gated Delta Networks" (2024); the decay of Mamba-2 (Dao and Gu, 2024).
"""

from typing import Any

import torch
from torch import Tensor

from isomodels.kernels.fixed_order import one_thread
from isomodels.kernels.schedule import Schedule, declare

# exp(-104) is 0 in fp32. A sum of decays holds the small ones better where no term is beyond it.
DECAY_FLOOR = -104.0

SCHEDULE = declare(
    Schedule(
        operation="delta_gates",
        backend="torch",
        version=1,
        constants={
            "accumulate": "float32",
            "softplus": "max(x, 0) + log1p(exp(-|x|))",
            "sigmoid": "1 / (1 + exp(-x))",
            "decay_floor": str(DECAY_FLOOR),
            "roundings": 0,
        },
    )
)
TRITON_SCHEDULE = declare(
    Schedule(
        operation="delta_gates",
        backend="triton",
        version=1,
        constants={
            "accumulate": "float32, products and sums rounded apart",
            "softplus": "max(x, 0) + log1p(exp(-|x|))",
            "log1p": "2 artanh(z / (2 + z)), 8 terms",
            "sigmoid": "1 / (1 + exp(-x)), the quotient rounded to nearest",
            "exp": "the GPU's own power of two of x times log2(e)",
            "decay_floor": str(DECAY_FLOOR),
            "roundings": 0,
        },
    )
)


@torch.library.custom_op("isomodels::delta_gates", mutates_args=(), device_types="cpu")
def delta_gates(a: Tensor, b: Tensor, A_log: Tensor, dt_bias: Tensor) -> tuple[Tensor, Tensor]:
    """Log decay and writing strength of each token and value head.

    Args:
        a, b: [T, num_v_heads], float32 or bfloat16, any strides.
        A_log, dt_bias: [num_v_heads] float32.

    Returns:
        (g [T, num_v_heads] fp32, the natural logarithm of the decay, from -104 to 0,
        beta [T, num_v_heads] fp32, from 0 to 1).

    Raises:
        ValueError: naming shapes that do not fit.
        TypeError: for parameters that are not float32.
    """
    _check(a, b, A_log, dt_bias)
    with one_thread():
        x = a.float() + dt_bias
        # torch's softplus and sigmoid round differently in their vector body and scalar tail.
        softplus = x.clamp(min=0.0) + torch.log1p(torch.exp(-x.abs()))
        g = (-(torch.exp(A_log) * softplus)).clamp_(min=DECAY_FLOOR)
        return g, 1.0 / (1.0 + torch.exp(-b.float()))


def _check(a: Tensor, b: Tensor, A_log: Tensor, dt_bias: Tensor) -> None:
    heads = a.shape[1:]
    if a.dim() != 2 or b.shape != a.shape or A_log.shape != heads or dt_bias.shape != heads:
        raise ValueError(
            "delta_gates needs a and b [T, heads], A_log and dt_bias [heads], got "
            f"{list(a.shape)}, {list(b.shape)}, {list(A_log.shape)} and {list(dt_bias.shape)}"
        )
    if A_log.dtype != torch.float32 or dt_bias.dtype != torch.float32:
        raise TypeError(
            "delta_gates needs A_log and dt_bias in float32 (bfloat16 moves every decay), "
            f"got {A_log.dtype} and {dt_bias.dtype}"
        )


@delta_gates.register_kernel("cuda")
def _(a: Tensor, b: Tensor, A_log: Tensor, dt_bias: Tensor) -> tuple[Tensor, Tensor]:
    from isomodels.kernels import delta_gates_triton

    _check(a, b, A_log, dt_bias)
    return delta_gates_triton.delta_gates(a, b, A_log, dt_bias, DECAY_FLOOR)


@delta_gates.register_fake
def _(a: Tensor, b: Tensor, A_log: Tensor, dt_bias: Tensor) -> tuple[Tensor, Tensor]:
    g = a.new_empty(a.shape, dtype=torch.float32)
    return g, torch.empty_like(g)


# An operator of its own, so that torch.compile need not look into Triton launches.
@torch.library.custom_op("isomodels::delta_gates_backward", mutates_args=(), device_types="cuda")
def delta_gates_backward(
    dg: Tensor,
    dbeta: Tensor,
    a: Tensor,
    b: Tensor,
    A_log: Tensor,
    dt_bias: Tensor,
    g: Tensor,
    beta: Tensor,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Gradients of `delta_gates`, whose results are g and beta, on the GPU."""
    from isomodels.kernels import delta_gates_triton

    tensors = (dg, dbeta, a, b, A_log, dt_bias, g, beta)
    return delta_gates_triton.delta_gates_backward(*tensors, DECAY_FLOOR)


@delta_gates_backward.register_fake
def _(
    dg: Tensor,
    dbeta: Tensor,
    a: Tensor,
    b: Tensor,
    A_log: Tensor,
    dt_bias: Tensor,
    g: Tensor,
    beta: Tensor,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    da, db, dA_log, ddt_bias = (x.new_empty(x.shape) for x in (a, b, A_log, dt_bias))
    return da, db, dA_log, ddt_bias


def _setup_context(ctx: Any, inputs: tuple, output: Any) -> None:
    ctx.save_for_backward(*inputs, *output)


def _backward(ctx: Any, dg: Tensor, dbeta: Tensor) -> tuple:
    if dg.is_cuda:
        return delta_gates_backward(dg, dbeta, *ctx.saved_tensors)
    a, b, A_log, dt_bias, g, beta = ctx.saved_tensors
    dg = dg.masked_fill(g <= DECAY_FLOOR, 0.0)
    db = (dbeta * beta * (1.0 - beta)).to(b.dtype)
    dx = dg * -torch.exp(A_log) * torch.sigmoid(a.float() + dt_bias)
    return dx.to(a.dtype), db, (dg * g).sum(0), dx.sum(0)


delta_gates.register_autograd(_backward, setup_context=_setup_context)
