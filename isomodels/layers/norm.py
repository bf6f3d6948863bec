"""RMSNorm, with the residual add that comes before it in a decoder."""

from typing import Unpack

from torch import Tensor, nn

from isomodels.kernels.rms_norm import add_rms_norm, rms_norm
from isomodels.layers.linear import Placed, parameter


class RMSNorm(nn.Module):
    """Plain RMSNorm (weight as stored, no shift)."""

    def __init__(
        self,
        hidden_size: int,
        eps: float,
        **placed: Unpack[Placed],
    ):
        super().__init__()
        self.weight = parameter(hidden_size, **placed)
        self.eps = eps

    def forward(self, x: Tensor, residual: Tensor | None) -> tuple[Tensor, Tensor]:
        """Add the residual stream, if there is one, and normalise.

        x [T, H], residual [T, H] or None at the first layer
        -> (normed [T, H], the new residual stream [T, H]).
        """
        if residual is None:
            return rms_norm(x, self.weight, self.eps), x
        return add_rms_norm(x, residual, self.weight, self.eps)
