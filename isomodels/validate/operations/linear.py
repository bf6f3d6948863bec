"""`isomodels::linear`."""

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor

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

    def backward(grad: Tensor, x: Tensor, weight: Tensor, bias: Tensor) -> tuple[Tensor, ...]:
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
    for rows in (
        (5,)
        if place.interpreted
        else (1, 5)
        if place.brief
        else (1, 5, 60, min(place.num_rows, 300))
    ):
        dtype = place.sharp
        x, weight = place.hard(rows, k, dtype=dtype), place.hard(n, k, seed=1, dtype=dtype)
        for shards in (2,) if place.brief else (2, 4, 8):
            parts = [linear(x, part) for part in weight.chunk(shards)]
            place.same(torch.cat(parts, 1), linear(x, weight), f"{shards} shards, {rows} rows")


def assert_exact_integers(
    place: Place, product: Callable[[Tensor, Tensor], Tensor], out_dtype: torch.dtype | None = None
) -> None:
    """Products of small integers are exact in fp32, so every bit of the result is known.

    Many results are ties of the last rounding of bf16, which goes to the even neighbour.
    """
    for dtype in place.dtypes:
        generator = torch.Generator("cpu").manual_seed(3)
        x, weight = (
            torch.randint(-low, low + 1, (rows, 8), generator=generator, device="cpu")
            for rows, low in ((place.few_rows, 64), (65, 16))
        )
        right = (x @ weight.t()).float().to(out_dtype or dtype).to(place.device)
        y = product(*(t.to(place.device, dtype) for t in (x, weight)))
        place.same(y, right, f"integers in {dtype}")


@checks.check("rounding")
def exact_integers(place: Place) -> None:
    """One rounding to nearest, ties to even."""
    assert_exact_integers(place, linear)
