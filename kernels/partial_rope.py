"""`isomodels::partial_rope`: RMSNorm of each head, then rotation of its first channels by position.

Mathematics: Su et al., "RoFormer" (2021), in half-split order over the first `rotary_dim` channels;
the others carry no position. Norm and rotation in fp32 from an fp32 table (`rope.rope_table`), with
one rounding at the end.
"""

from typing import Any

import torch
from torch import Tensor

from isomodels.kernels.fixed_order import one_thread
from isomodels.kernels.rms_norm import normalize, normalize_backward
from isomodels.kernels.schedule import Schedule, declare

SCHEDULE = declare(
    Schedule(
        operation="partial_rope",
        backend="torch",
        version=1,
        constants={"order": "half-split", "norm_sum": "halving", "roundings": 1},
    )
)
TRITON_SCHEDULE = declare(
    Schedule(
        operation="partial_rope",
        backend="triton",
        version=1,
        constants={
            "order": "half-split, products and sums rounded apart",
            "norm_sum": "squares of a pair, then neighbours; the channels not rotated last",
            "inverse": "1 / sqrt, each rounded to nearest",
            "roundings": 1,
        },
    )
)


@torch.library.custom_op("isomodels::partial_rope", mutates_args=(), device_types="cpu")
def partial_rope(
    x: Tensor, positions: Tensor, table: Tensor, norm_weight: Tensor, eps: float
) -> Tensor:
    """Norm over each head, then rotate its first channels by the token's position.

    Args:
        x: [T, heads, head_dim], float32 or bfloat16, any strides.
        positions: [T] int64, each below the table's length.
        table: [max_positions, rotary_dim] fp32; rotary_dim is even and at most head_dim.
        norm_weight: [head_dim], the factor itself (1 + w for a zero-centred norm).
        eps: of the norm.

    Returns:
        [T, heads, head_dim] in the dtype of `x`.

    Raises:
        ValueError: naming shapes that do not fit.
        IndexError: for a position outside the table. A GPU, which would have to wait, does not
            check.
    """
    _check(x, positions, table, norm_weight)
    with one_thread():
        unit, _ = normalize(x.float(), eps)
        # Not table[positions]: that takes -1 for the last position.
        rows = torch.nn.functional.embedding(positions, table).unsqueeze(1)  # [T, 1, rotary_dim]
        return _rotate(unit * norm_weight.float(), *rows.chunk(2, -1)).to(x.dtype)


def _rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    half = cos.shape[-1]
    first, second, rest = x.split([half, half, x.shape[-1] - 2 * half], -1)
    return torch.cat((first * cos - second * sin, second * cos + first * sin, rest), -1)


def _check(x: Tensor, positions: Tensor, table: Tensor, norm_weight: Tensor) -> None:
    fits = x.dim() == 3 and positions.shape == x.shape[:1] and norm_weight.shape == x.shape[2:]
    if not fits or table.dim() != 2 or table.shape[1] > x.shape[2]:
        raise ValueError(
            "partial_rope needs x [T, heads, head_dim], positions [T], a table [positions, at most "
            f"head_dim] and a weight [head_dim], got {list(x.shape)}, {list(positions.shape)}, "
            f"{list(table.shape)} and {list(norm_weight.shape)}"
        )


@partial_rope.register_kernel("cuda")
def _(x: Tensor, positions: Tensor, table: Tensor, norm_weight: Tensor, eps: float) -> Tensor:
    from isomodels.kernels import partial_rope_triton

    _check(x, positions, table, norm_weight)
    return partial_rope_triton.partial_rope(x, positions, table, norm_weight, eps)


@partial_rope.register_fake
def _(x: Tensor, positions: Tensor, table: Tensor, norm_weight: Tensor, eps: float) -> Tensor:
    return torch.empty_like(x, memory_format=torch.contiguous_format)


# An operator of its own, so that torch.compile need not look into Triton launches.
@torch.library.custom_op("isomodels::partial_rope_backward", mutates_args=(), device_types="cuda")
def partial_rope_backward(
    grad: Tensor, x: Tensor, positions: Tensor, table: Tensor, norm_weight: Tensor, eps: float
) -> tuple[Tensor, Tensor]:
    """Gradients of `partial_rope` on the GPU: of x and of the norm's weight."""
    from isomodels.kernels import partial_rope_triton

    return partial_rope_triton.partial_rope_backward(grad, x, positions, table, norm_weight, eps)


@partial_rope_backward.register_fake
def _(
    grad: Tensor, x: Tensor, positions: Tensor, table: Tensor, norm_weight: Tensor, eps: float
) -> tuple[Tensor, Tensor]:
    return x.new_empty(x.shape), norm_weight.new_empty(norm_weight.shape)


def _setup_context(ctx: Any, inputs: tuple, output: Any) -> None:
    *tensors, ctx.eps = inputs
    ctx.save_for_backward(*tensors)


def _backward(ctx: Any, grad: Tensor) -> tuple:
    x, positions, table, norm_weight = ctx.saved_tensors
    if grad.is_cuda:
        dx, dweight = partial_rope_backward(grad, x, positions, table, norm_weight, ctx.eps)
        return dx, None, None, dweight, None
    cos, sin = table[positions].unsqueeze(1).chunk(2, -1)
    grad = _rotate(grad.float(), cos, -sin)
    unit, inverse_rms = normalize(x.float(), ctx.eps)
    dweight = (grad * unit).sum((0, 1)).to(norm_weight.dtype)
    dx = normalize_backward(grad * norm_weight.float(), unit, inverse_rms)
    return dx.to(x.dtype), None, None, dweight, None


partial_rope.register_autograd(_backward, setup_context=_setup_context)
