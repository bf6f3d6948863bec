"""`isomodels::rope`: rotary position embedding, after an optional per-head RMSNorm (qk-norm).

Mathematics: Su et al., "RoFormer" (2021), in the half-split order of GPT-NeoX that the Qwen
checkpoints use. Norm and rotation in fp32 from an fp32 table, with one rounding at the end.
"""

import functools
from typing import Any

import torch
from torch import Tensor

from isomodels.kernels.fixed_order import one_thread
from isomodels.kernels.rms_norm import normalize, normalize_backward
from isomodels.kernels.schedule import Schedule, declare

_ANGLES: dict[str, int | str] = {
    "angle": "float32 position times float32 frequency",
    "table": "cosine in float64, rounded once to float32",
    "order": "half-split",
    "roundings": 1,
}
CONSTANTS = {**_ANGLES, "norm_sum": "halving"}
TRITON_CONSTANTS = {
    **_ANGLES,
    "accumulate": "float32, products and sums rounded apart",
    "norm_sum": "halves added, then neighbours first",
}
SCHEDULE = declare(Schedule("rope", "torch", 1, CONSTANTS))
TRITON_SCHEDULE = declare(Schedule("rope", "triton", 1, TRITON_CONSTANTS))


@functools.lru_cache(maxsize=8)
def rope_table(
    head_dim: int, theta: float, max_positions: int, device: torch.device | None = None
) -> Tensor:
    """Cosines and sines for every position.

    Frequencies and angles are rounded to fp32, as in the libraries that trained the checkpoints
    (transformers' `modeling_rope_utils.py`); the cosine of that angle is taken in fp64 and rounded
    once. Not a buffer of any module: hosts cast buffers to the model dtype.

    Returns:
        [max_positions, head_dim] fp32; the first half cosines, the second half sines.
    """
    # A table first made while scoring in inference mode must serve training later.
    with one_thread(), torch.inference_mode(False):
        exponents = torch.arange(0, head_dim, 2, dtype=torch.float32, device="cpu") / head_dim
        frequencies = 1.0 / theta**exponents  # [D/2]
        positions = torch.arange(max_positions, dtype=torch.float32, device="cpu")
        angles = (positions[:, None] * frequencies).double()  # [P, D/2]
        # Made on the CPU wherever it is used: one table for every device.
        return torch.cat((angles.cos(), angles.sin()), dim=1).float().to(device)


@torch.library.custom_op("isomodels::rope", mutates_args=(), device_types="cpu")
def rope(
    x: Tensor, positions: Tensor, table: Tensor, norm_weight: Tensor | None, eps: float
) -> Tensor:
    """Rotate each head by its token's position.

    Args:
        x: [T, heads, head_dim], float32 or bfloat16.
        positions: [T] int64, each below the table's length.
        table: [max_positions, head_dim] fp32 from `rope_table`.
        norm_weight: [head_dim] for qk-norm before the rotation, or None for no norm.
        eps: of the qk-norm.

    Returns:
        [T, heads, head_dim] in the dtype of `x`.

    Raises:
        ValueError: naming shapes that do not fit.
        IndexError: for a position outside the table. A GPU, which would have to wait, does not
            check.
    """
    _check(x, positions, table, norm_weight)
    with one_thread():
        return rotated(x, positions, table, norm_weight, eps)


def rotated(
    x: Tensor, positions: Tensor, table: Tensor, norm_weight: Tensor | None, eps: float
) -> Tensor:
    """`rope` on the CPU; on one thread."""
    unit = x.float()
    if norm_weight is not None:
        unit = normalize(unit, eps)[0] * norm_weight.float()
    # Not table[positions]: that takes -1 for the last position.
    rows = torch.nn.functional.embedding(positions, table)
    cos, sin = rows.unsqueeze(1).chunk(2, -1)  # [T, 1, D/2]
    return _rotate(unit, cos, sin).to(x.dtype, copy=True)


def rotated_backward(
    grad: Tensor,
    x: Tensor,
    positions: Tensor,
    table: Tensor,
    norm_weight: Tensor | None,
    eps: float,
) -> tuple[Tensor, Tensor | None]:
    """Gradients of `rotated`: (of x [T, heads, head_dim], of the weight [head_dim] or None)."""
    cos, sin = table[positions].unsqueeze(1).chunk(2, -1)
    grad = _rotate(grad.float(), cos, -sin)
    if norm_weight is None:
        return grad.to(x.dtype), None
    unit, inverse_rms = normalize(x.float(), eps)
    dweight = (grad * unit).sum((0, 1)).to(norm_weight.dtype)
    dx = normalize_backward(grad * norm_weight.float(), unit, inverse_rms)
    return dx.to(x.dtype), dweight


def _check(x: Tensor, positions: Tensor, table: Tensor, norm_weight: Tensor | None) -> None:
    if x.dim() != 3 or positions.shape != x.shape[:1] or table.shape[1:] != x.shape[2:]:
        raise ValueError(
            "rope needs x [T, heads, head_dim], positions [T] and a table [positions, head_dim], "
            f"got {list(x.shape)}, {list(positions.shape)} and {list(table.shape)}"
        )
    if norm_weight is not None and norm_weight.shape != x.shape[2:]:
        raise ValueError(
            "rope needs x [T, heads, head_dim] and a norm weight [head_dim], "
            f"got {list(x.shape)} and {list(norm_weight.shape)}"
        )


def _rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    first, second = x.chunk(2, -1)
    return torch.cat((first * cos - second * sin, second * cos + first * sin), -1)


@rope.register_kernel("cuda")
def _(
    x: Tensor, positions: Tensor, table: Tensor, norm_weight: Tensor | None, eps: float
) -> Tensor:
    from isomodels.kernels import rope_triton

    _check(x, positions, table, norm_weight)
    return rope_triton.rope(x, positions, table, norm_weight, eps)


@rope.register_fake
def _(
    x: Tensor, positions: Tensor, table: Tensor, norm_weight: Tensor | None, eps: float
) -> Tensor:
    return torch.empty_like(x)


# An operator of its own, so that torch.compile need not look into Triton launches.
@torch.library.custom_op("isomodels::rope_backward", mutates_args=(), device_types="cuda")
def rope_backward(
    grad: Tensor,
    x: Tensor,
    positions: Tensor,
    table: Tensor,
    norm_weight: Tensor | None,
    eps: float,
) -> tuple[Tensor, Tensor]:
    """Gradients of `rope` on the GPU: (of x [T, heads, head_dim], of the weight [D] or [0])."""
    from isomodels.kernels import rope_triton

    dx, dweight = rope_triton.rope_backward(grad, x, positions, table, norm_weight, eps)
    return dx, x.new_empty(0) if dweight is None else dweight


@rope_backward.register_fake
def _(
    grad: Tensor,
    x: Tensor,
    positions: Tensor,
    table: Tensor,
    norm_weight: Tensor | None,
    eps: float,
) -> tuple[Tensor, Tensor]:
    dweight = x.new_empty(0) if norm_weight is None else norm_weight.new_empty(norm_weight.shape)
    return x.new_empty(x.shape), dweight


def _setup_context(ctx: Any, inputs: tuple, output: Any) -> None:
    x, positions, table, norm_weight, ctx.eps = inputs
    ctx.save_for_backward(x, positions, table, norm_weight)


def _backward(ctx: Any, grad: Tensor) -> tuple:
    x, positions, table, norm_weight = ctx.saved_tensors
    if grad.is_cuda:
        dx, dweight = rope_backward(grad, x, positions, table, norm_weight, ctx.eps)
        return dx, None, None, None if norm_weight is None else dweight, None
    dx, dweight = rotated_backward(grad, x, positions, table, norm_weight, ctx.eps)
    return dx, None, None, dweight, None


rope.register_autograd(_backward, setup_context=_setup_context)
