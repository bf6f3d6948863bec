"""The gated feed-forward of the Qwen line."""

from typing import Unpack

from torch import Tensor, nn

from isomodels.kernels.swiglu import swiglu
from isomodels.layers.collectives import enter
from isomodels.layers.linear import Linear, Placed, RowLinear
from isomodels.layers.parallel import ALONE, split


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
        parallel = self.parallel = placed.get("layout", ALONE).tensor
        shard = split([intermediate_size] * 2, parallel.rank, parallel.size)
        self.gate_up_proj = Linear(hidden_size, 2 * intermediate_size, shard=shard, **placed)
        self.act = SwiGLU()
        self.down_proj = RowLinear(intermediate_size, hidden_size, **placed)

    def forward(self, x: Tensor) -> Tensor:
        """[T, H] -> [T, H]."""
        x = enter(x, self.parallel)
        return self.down_proj(self.act(self.gate_up_proj(x)))
