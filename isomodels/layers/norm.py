"""RMSNorm, with the residual add that comes before it in a decoder."""

from typing import Unpack

from torch import Tensor, nn

from isomodels.kernels.rms_norm import add_rms_norm, rms_norm
from isomodels.layers.collectives import sum_gradients
from isomodels.layers.linear import Placed, parameter
from isomodels.layers.parallel import ALONE, TensorParallel


class RMSNorm(nn.Module):
    """Plain RMSNorm (weight as stored, no shift).

    `partial`: ranks of tensor parallelism use the same rows, each for its own heads, so that the
    gradients of the weight add up.
    """

    def __init__(
        self,
        hidden_size: int,
        eps: float,
        *,
        partial: bool = False,
        **placed: Unpack[Placed],
    ):
        super().__init__()
        self.weight = parameter(hidden_size, **placed)
        self.eps = eps
        self.sharing = placed.get("layout", ALONE).tensor if partial else TensorParallel()

    def forward(self, x: Tensor, residual: Tensor | None) -> tuple[Tensor, Tensor]:
        """Add the residual stream, if there is one, and normalise.

        x [T, H], residual [T, H] or None at the first layer
        -> (normed [T, H], the new residual stream [T, H]).
        """
        weight = sum_gradients(self.weight, self.sharing)
        if residual is None:
            return rms_norm(x, weight, self.eps), x
        return add_rms_norm(x, residual, weight, self.eps)
