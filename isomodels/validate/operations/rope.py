"""`isomodels::rope`."""

import torch
from torch import Tensor

from isomodels.kernels.rope import rope, rope_backward, rope_table
from isomodels.validate.battery import Place
from isomodels.validate.cases import Case, Inputs, row_operation
from isomodels.validate.operations.rms_norm import EPS
from isomodels.validate.operations.rms_norm import exact as exact_norm

POSITIONS = 2048


def exact(x: Tensor, positions: Tensor, table: Tensor, weight: Tensor | None) -> Tensor:
    """RoFormer's rotation in pairs (i, i + D/2), after qk-norm where there is a weight."""
    x = x if weight is None else exact_norm(x, weight)
    cos, sin = table.to(x.dtype)[positions].unsqueeze(1).chunk(2, -1)  # [T, 1, D/2]
    first, second = x.chunk(2, -1)
    return torch.cat((first * cos - second * sin, second * cos + first * sin), -1)


# (heads, head_dim, qk-norm): Qwen3's q and k, MiMo's without the norm
@row_operation(
    "rope",
    "rope_backward",
    small=((3, 40, 1), (1, 10, 0), (2, 128, 1)),
    real=((32, 128, 1), (8, 128, 1), (32, 128, 0)),
    gradient_roundings=4,
)
def checks(draw: Inputs, heads: int, head_dim: int, norm: int) -> Case:
    """Each row has its position; the table is the library's own."""
    table = rope_table(head_dim, 1e6, POSITIONS).to(draw.place.device)
    weights = (draw.floats(head_dim, seed=1, kind="normal"),) if norm else ()

    def backward(grad: Tensor, x: Tensor, positions: Tensor, *weight: Tensor) -> list[Tensor]:
        own = weight[0] if weight else None
        dx, dweight = rope_backward(grad, x, positions, table, own, EPS)
        return [dx, dweight] if weight else [dx]

    return Case(
        run=lambda x, at, *w: rope(x, at, table, *(w or (None,)), EPS),
        exact=lambda x, at, *w: exact(x, at, table, *(w or (None,))),
        rows=(draw.floats(draw.num_rows, heads, head_dim), draw.integers(POSITIONS)),
        shared=weights,
        terms=head_dim + heads * draw.num_rows,
        backward=backward,
    )


@checks.check("heads")
def a_head_stands_alone(place: Place) -> None:
    """A rank of tensor parallelism holds some heads; k is a view of the fused projection."""
    dtype, heads = place.sharp, 8
    head_dim = 128 if place.on_gpu else 32
    table = rope_table(head_dim, 1e6, POSITIONS).to(place.device)
    weight = place.hard(head_dim, kind="normal", seed=1, dtype=dtype)
    rows = min(place.num_rows, 100)
    fused = place.hard(rows, heads + 3, head_dim, dtype=dtype)
    positions = torch.arange(rows, device=place.device) * 17
    view = fused[:, 1 : 1 + heads]
    whole = rope(view.contiguous(), positions, table, weight, EPS)
    place.same(rope(view, positions, table, weight, EPS), whole, "a view of qkv")
    for ranks in (2, 8):
        parts = [rope(x, positions, table, weight, EPS) for x in view.chunk(ranks, 1)]
        place.same(torch.cat(parts, 1), whole, f"{ranks} ranks")
