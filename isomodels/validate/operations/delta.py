"""The small operations around the gated delta rule: gates, norms and rope of its models."""

import torch
import torch.nn.functional as F
from torch import Tensor

from isomodels.kernels.delta_gates import DECAY_FLOOR, delta_gates, delta_gates_backward
from isomodels.kernels.gated_norm import gated_rms_norm, gated_rms_norm_backward
from isomodels.kernels.one_plus import one_plus
from isomodels.kernels.partial_rope import partial_rope, partial_rope_backward
from isomodels.kernels.rope import rope_table
from isomodels.kernels.sigmoid_gate import sigmoid_gate, sigmoid_gate_backward
from isomodels.validate.cases import Case, Inputs, row_operation
from isomodels.validate.operations.rms_norm import EPS
from isomodels.validate.operations.rms_norm import exact as exact_norm
from isomodels.validate.operations.rope import POSITIONS
from isomodels.validate.operations.rope import exact as exact_rope

_MODERATE = ("normal", "subnormal", "zeros", "ties", "tiny")  # others leave the range of exp


@row_operation("one_plus", small=((1,),), real=((1,),))
def shifted(draw: Inputs, _: int) -> Case:
    """1 + weight in fp32; a row is an element."""
    return Case(
        run=one_plus, exact=lambda w: 1.0 + w, rows=(draw.floats(draw.num_rows, kind=draw.kind),)
    )


@row_operation("sigmoid_gate", "sigmoid_gate_backward", small=((3, 20), (1, 7)), real=((16, 256),))
def gate(draw: Inputs, heads: int, dim: int) -> Case:
    """x * sigmoid(gate)."""
    shape = (draw.num_rows, heads, dim)
    return Case(
        run=sigmoid_gate,
        exact=lambda x, gate: x * gate.sigmoid(),
        rows=(draw.floats(*shape), draw.floats(*shape, seed=1)),
        backward=lambda *x: sigmoid_gate_backward(*x),
    )


@row_operation(
    "gated_rms_norm",
    "gated_rms_norm_backward",
    small=((3, 40), (1, 7)),
    real=((32, 128),),
    gradient_roundings=4,
)
def norm(draw: Inputs, heads: int, dim: int) -> Case:
    """The norm of each head, then silu of the gate."""
    shape = (draw.num_rows, heads, dim)
    return Case(
        run=lambda x, gate, weight: gated_rms_norm(x, gate, weight, EPS),
        exact=lambda x, gate, weight: exact_norm(x, weight) * F.silu(gate),
        rows=(draw.floats(*shape), draw.floats(*shape, seed=1)),
        shared=(draw.floats(dim, seed=2, kind="normal"),),
        terms=dim + heads * draw.num_rows,
        backward=lambda *x: gated_rms_norm_backward(*x, EPS),
    )


@row_operation(
    "delta_gates", "delta_gates_backward", small=((6,), (1,)), real=((32,),), kinds=_MODERATE
)
def gates(draw: Inputs, heads: int) -> Case:
    """Log decay and writing strength side by side."""

    def exact(a: Tensor, b: Tensor, a_log: Tensor, dt_bias: Tensor) -> Tensor:
        g = (-a_log.exp() * F.softplus(a + dt_bias)).clamp(min=DECAY_FLOOR)
        return torch.cat((g, b.sigmoid()), 1)

    def backward(grad: Tensor, *x: Tensor) -> tuple[Tensor, ...]:
        dg, dbeta = grad.chunk(2, 1)
        return delta_gates_backward(dg, dbeta, *x, *delta_gates(*x))

    parameters = [draw.floats(heads, seed=i, kind="normal").float() for i in (2, 3)]
    return Case(
        run=lambda *x: torch.cat(delta_gates(*x), 1),
        exact=exact,
        rows=(draw.floats(draw.num_rows, heads), draw.floats(draw.num_rows, heads, seed=1)),
        shared=tuple(parameters),
        terms=draw.num_rows,
        backward=backward,
    )


# (heads, head_dim, rotated channels)
@row_operation(
    "partial_rope",
    "partial_rope_backward",
    small=((3, 40, 10), (1, 16, 16)),
    real=((16, 256, 64), (2, 256, 64)),
    gradient_roundings=4,
)
def rope(draw: Inputs, heads: int, dim: int, rotated: int) -> Case:
    """The norm of each head, then its first channels by position."""
    table = rope_table(rotated, 1e6, POSITIONS).to(draw.place.device)

    def exact(x: Tensor, at: Tensor, weight: Tensor) -> Tensor:
        x = exact_norm(x, weight)
        turned = exact_rope(x[..., :rotated], at, table, None)
        return torch.cat((turned, x[..., rotated:]), -1)

    def backward(grad: Tensor, x: Tensor, at: Tensor, weight: Tensor) -> tuple[Tensor, ...]:
        return partial_rope_backward(grad, x, at, table, weight, EPS)

    return Case(
        run=lambda x, at, weight: partial_rope(x, at, table, weight, EPS),
        exact=exact,
        rows=(draw.floats(draw.num_rows, heads, dim), draw.integers(POSITIONS)),
        shared=(draw.floats(dim, seed=1, kind="normal"),),
        terms=dim + heads * draw.num_rows,
        backward=backward,
    )
