"""`isomodels::swiglu`."""

import torch
import torch.nn.functional as F
from torch import Tensor

from isomodels.kernels.swiglu import swiglu, swiglu_backward
from isomodels.validate.battery import Place
from isomodels.validate.bits import Fault
from isomodels.validate.cases import Case, Inputs, row_operation


def exact(gate_up: Tensor) -> Tensor:
    """silu(gate) * up (Shazeer, 2020)."""
    gate, up = gate_up.chunk(2, -1)
    return F.silu(gate) * up


@row_operation("swiglu", "swiglu_backward", small=((33,), (7,), (1376,)), real=((12288,), (1000,)))
def checks(draw: Inputs, width: int) -> Case:
    """Gate and up of `width` each."""
    return Case(
        run=swiglu,
        exact=exact,
        rows=(draw.floats(draw.num_rows, 2 * width),),
        terms=8,
        backward=lambda grad, x: [swiglu_backward(grad, x)],
    )


@checks.check("range")
def ends_of_the_range(place: Place) -> None:
    """exp overflows on the way to results that do not."""
    gate = torch.tensor([-200.0, -89.0, -88.0, -0.0, 0.0, 88.0, 200.0, 3e38], dtype=torch.float32)
    gate_up = torch.stack((gate, torch.ones_like(gate)), 1).to(place.device)
    out = swiglu(gate_up)
    right = exact(gate_up.double())
    worst = ((out.double() - right).abs() - 1e-36 - 1e-6 * right.abs()).max()
    if not worst <= 0.0:
        raise Fault(f"silu at the ends of the range: {out[:, 0].tolist()}")
