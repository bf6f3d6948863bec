"""Error against a reference in fp64, of results and of gradients."""

import math
from collections.abc import Callable

import torch
from torch import Tensor

from isomodels.validate.bits import Fault, assert_same_bits

Function = Callable[..., Tensor]
Same = Callable[[Tensor, Tensor, str], None]


def relative_rms(actual: Tensor, reference: Tensor) -> float:
    """RMS of the error over RMS of the reference, in fp64; 0 where both are zero."""
    reference = reference.detach().double()
    error = float((actual.detach().double() - reference).square().mean().sqrt())
    size = float(reference.square().mean().sqrt())
    return error / size if size else math.inf * error if error else 0.0


def unit_error(dtype: torch.dtype, length: int = 1) -> float:
    """A generous bound on the relative RMS error of one rounding and a sum of `length` terms."""
    return torch.finfo(dtype).eps + torch.finfo(torch.float32).eps * 4 * math.sqrt(length)


def assert_close(actual: Tensor, reference: Tensor, bound: float, what: str) -> None:
    """The relative RMS error must not exceed `bound`; NaN fails.

    Raises:
        Fault: naming `what`, the error, and the place where it is largest.
    """
    error = relative_rms(actual, reference)
    if error <= bound:
        return
    distance = (actual.double() - reference.double()).abs().nan_to_num(torch.inf, torch.inf)
    at = tuple(int(i) for i in torch.unravel_index(distance.argmax(), distance.shape))
    raise Fault(
        f"{what}: relative error {error:.3g} above {bound:.3g}, largest at {list(at)}: "
        f"{actual[at].item():.9g} against {reference[at].item():.9g}"
    )


def gradients(
    function: Function, inputs: tuple[Tensor, ...], dtype: torch.dtype | None = None
) -> list[Tensor]:
    """Gradients of all floating inputs from a fixed random gradient of the output.

    Args:
        function: of `inputs`; gives one tensor.
        inputs: those of integers are passed as they are.
        dtype: to which floating inputs are cast first, if given.
    """
    leaves = [
        x.detach().to(dtype or x.dtype).requires_grad_() if x.is_floating_point() else x
        for x in inputs
    ]
    out = function(*leaves)
    return list(
        torch.autograd.grad(out, [x for x in leaves if x.requires_grad], seed_of(out, inputs))
    )


def seed_of(out: Tensor, inputs: tuple[Tensor, ...]) -> Tensor:
    """The gradient of the output: random, exact in the dtype of the first floating input."""
    generator = torch.Generator("cpu").manual_seed(7)
    seed = torch.randn(out.shape, generator=generator, dtype=torch.float32, device="cpu")
    own = next(x.dtype for x in inputs if x.is_floating_point())
    return seed.to(own).to(out.device, out.dtype)


def assert_gradients(
    op: Function, reference: Function, *inputs: Tensor, bound: float, same: Same = assert_same_bits
) -> None:
    """Gradients of all floating inputs against fp64 autograd of `reference`; equal run to run.

    Raises:
        Fault: naming the input whose gradient is wrong or differs between two runs.
    """
    exact = gradients(reference, inputs, torch.float64)
    first, second = gradients(op, inputs), gradients(op, inputs)
    for i, (one, two, right) in enumerate(zip(first, second, exact, strict=True)):
        same(one, two, f"gradient {i}, second run")
        assert_close(one, right, bound, f"gradient {i}")
