"""The gated feed-forward of the Qwen line."""

from typing import Unpack

from torch import Tensor, nn

from isomodels.kernels.swiglu import swiglu
from isomodels.layers.linear import Linear, Placed, RowLinear


class SwiGLU(nn.Module):
    """gate_up [T, 2I] -> silu(gate) * up [T, I]."""

    def forward(self, gate_up: Tensor) -> Tensor:
        """[T, 2I] -> [T, I]."""
        return swiglu(gate_up)


class MLP(nn.Module):
    """down(silu(gate(x)) * up(x)), gate and up as one projection."""

    def __init__(
        self,
        hidden_size: int,
        intermediate_size: int,
        **placed: Unpack[Placed],
    ):
        super().__init__()
        self.gate_up_proj = Linear(hidden_size, 2 * intermediate_size, **placed)
        self.act = SwiGLU()
        self.down_proj = RowLinear(intermediate_size, hidden_size, **placed)

    def forward(self, x: Tensor) -> Tensor:
        """[T, H] -> [T, H]."""
        return self.down_proj(self.act(self.gate_up_proj(x)))
