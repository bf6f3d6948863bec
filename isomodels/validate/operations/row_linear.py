"""`isomodels::row_linear`."""

import torch
import torch.nn.functional as F
from torch import Tensor

from isomodels.kernels.linear import linear_input_gradient, linear_weight_gradient
from isomodels.kernels.row_linear import LEAVES, row_linear, row_linear_partial, tree_sum
from isomodels.validate.battery import Place
from isomodels.validate.cases import Case, Inputs, row_operation
from isomodels.validate.operations.linear import assert_exact_integers


# Qwen3-8B's down and o projections; MiMo's down, whose leaf of 2,752 no K block divides
@row_operation(
    "row_linear",
    "linear_input_gradient",
    "linear_weight_gradient",
    small=((40, 96), (65, 8 * 33), (7, 8)),
    real=((4096, 4096), (4096, 11008)),
)
def checks(draw: Inputs, n: int, k: int) -> Case:
    """y = x W^T as a tree over leaves of k."""

    def backward(grad: Tensor, x: Tensor, weight: Tensor) -> tuple[Tensor, ...]:
        return linear_input_gradient(grad, weight), linear_weight_gradient(grad, x)

    return Case(
        run=row_linear,
        exact=F.linear,
        rows=(draw.floats(draw.num_rows, k),),
        shared=(draw.floats(n, k, seed=1),),
        terms=max(k, n, draw.num_rows),
        backward=backward,
    )


@checks.check("ranks")
def ranks_fold_to_the_whole(place: Place) -> None:
    """Ranks of tensor parallelism send subtrees: folded, they are the whole, bit for bit."""
    if place.interpreted:
        return  # the partial has no operator of its own
    n, k = (4096, 11008) if place.on_gpu else (65, 8 * 33)
    dtype = place.sharp
    for rows in (1, 60) if place.brief else (1, 16, 60, 256, place.num_rows):
        x, weight = place.hard(rows, k, dtype=dtype), place.hard(n, k, seed=1, dtype=dtype)
        whole = row_linear(x, weight)
        for ranks in (2, 4):
            parts = zip(x.chunk(ranks, 1), weight.chunk(ranks, 1), strict=True)
            partials = [row_linear_partial(a, b, LEAVES // ranks) for a, b in parts]
            folded = tree_sum(partials).to(dtype)
            place.same(folded, whole, f"{ranks} ranks, {rows} rows")


@checks.check("rounding")
def exact_integers(place: Place) -> None:
    """One rounding to nearest, ties to even."""
    assert_exact_integers(place, row_linear)


@checks.check("leaves")
def a_leaf_never_reads_the_next(place: Place) -> None:
    """A K block at the end of a leaf is filled with zeros, whatever lies behind."""
    length = 24
    x = torch.ones(3, LEAVES * length, dtype=torch.float32, device=place.device)
    weight = torch.ones(5, LEAVES * length, dtype=torch.float32, device=place.device)
    x[:, length:] = 0.0
    weight[:, length:] = 3e38
    expected = torch.full((3, 5), float(length), dtype=torch.float32, device=place.device)
    place.same(row_linear(x, weight), expected, "first leaf before leaves of zeros")
