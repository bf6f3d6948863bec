"""`isomodels::linear`."""

import torch
import torch.nn.functional as F

from isomodels.kernels.linear import linear, linear_input_gradient, linear_weight_gradient
from isomodels.validate.battery import Place
from isomodels.validate.cases import Case, Inputs, row_operation


# Qwen3-8B's qkv, and an o projection of Qwen3.5-35B-A3B; odd: no tile and no bulk copy fits
@row_operation(
    "linear",
    "linear_input_gradient",
    "linear_weight_gradient",
    small=((65, 100), (130, 1001), (8, 7)),
    real=((6144, 4096), (512, 2048), (1000, 1376)),
)
def checks(draw: Inputs, n: int, k: int) -> Case:
    """y = x W^T + b with n columns over sums of k."""

    def backward(grad, x, weight, bias):  # type: ignore[no-untyped-def]
        return linear_input_gradient(grad, weight), linear_weight_gradient(grad, x), grad.sum(0)

    return Case(
        run=linear,
        exact=F.linear,
        rows=(draw.floats(draw.num_rows, k),),
        shared=(draw.floats(n, k, seed=1), draw.floats(n, seed=2)),
        terms=max(k, n, draw.num_rows),
        backward=backward,
    )


@checks.check("column shards")
def column_shards(place: Place) -> None:
    """A rank of tensor parallelism holds some columns: their bits are those of the whole."""
    n, k = (6144, 4096) if place.on_gpu else (130, 100)
    for rows in (1, 5) if place.brief else (1, 5, 60, min(place.num_rows, 300)):
        dtype = place.dtypes[-1]
        x, weight = place.hard(rows, k, dtype=dtype), place.hard(n, k, seed=1, dtype=dtype)
        for shards in (2,) if place.brief else (2, 4, 8):
            parts = [linear(x, part) for part in weight.chunk(shards)]
            place.same(torch.cat(parts, 1), linear(x, weight), f"{shards} shards, {rows} rows")
