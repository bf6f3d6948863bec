"""`isomodels::rms_norm` and `isomodels::add_rms_norm`."""

import torch
from torch import Tensor

from isomodels.kernels.rms_norm import add_rms_norm, rms_norm, rms_norm_backward
from isomodels.validate.battery import Place
from isomodels.validate.cases import Case, Inputs, row_operation
from isomodels.validate.inputs import KINDS

EPS = 1e-6
_SMALL = ((200,), (65,), (1000,), (1,))
_REAL = ((4096,), (128,))


def exact(x: Tensor, weight: Tensor) -> Tensor:
    """RMSNorm by its definition (Zhang and Sennrich, 2019)."""
    return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + EPS) * weight


@row_operation("rms_norm", "rms_norm_backward", small=_SMALL, real=_REAL)
def norm(draw: Inputs, n: int) -> Case:
    """RMSNorm over n."""
    return Case(
        run=lambda x, weight: rms_norm(x, weight, EPS),
        exact=exact,
        rows=(draw.floats(draw.num_rows, n),),
        shared=(draw.floats(n, seed=1, kind="normal"),),
        terms=n + draw.num_rows,
        backward=lambda grad, x, weight: rms_norm_backward(grad, None, x, weight, EPS),
    )


def _both(x: Tensor, residual: Tensor, weight: Tensor) -> Tensor:
    return torch.cat(add_rms_norm(x, residual, weight, EPS), 1)


@row_operation("add_rms_norm", "rms_norm_backward", small=_SMALL[:3], real=_REAL)
def add_norm(draw: Inputs, n: int) -> Case:
    """The residual add and the norm of its rounded result."""
    dtype = draw.dtype

    def exactly(x: Tensor, residual: Tensor, weight: Tensor) -> Tensor:
        total = x + residual
        # the norm sees the rounded sum; the gradient passes the rounding by
        total = total + (total.detach().to(dtype).double() - total.detach())
        return torch.cat((exact(total, weight), total), 1)

    def backward(grad: Tensor, x: Tensor, residual: Tensor, weight: Tensor) -> list[Tensor]:
        of_norm, of_total = grad.chunk(2, 1)
        total = (x.float() + residual.float()).to(x.dtype)
        args = (of_norm.contiguous(), of_total.contiguous(), total, weight, EPS)
        dx, dweight = rms_norm_backward(*args)
        return [dx, dx, dweight]

    return Case(
        run=_both,
        exact=exactly,
        rows=(draw.floats(draw.num_rows, n), draw.floats(draw.num_rows, n, seed=3)),
        shared=(draw.floats(n, seed=1, kind="normal"),),
        terms=n + draw.num_rows,
        backward=backward,
    )


@add_norm.check("sum")
def is_the_sum_and_its_norm(place: Place) -> None:
    """The stream is x + residual rounded once, and the norm that of the stream."""
    n = 4096 if place.on_gpu else 65
    for dtype in place.dtypes:
        for kind in KINDS[:1] if place.interpreted else KINDS:
            x, residual = (place.hard(16, n, kind=kind, seed=i, dtype=dtype) for i in (0, 1))
            weight = place.hard(n, kind="normal", seed=2, dtype=dtype)
            normed, total = add_rms_norm(x, residual, weight, EPS)
            place.same(total, (x.float() + residual.float()).to(dtype), f"{kind}: the stream")
            place.same(normed, rms_norm(total, weight, EPS), f"{kind}: norm of the stream")
