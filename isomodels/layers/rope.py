"""Rotary positions with optional qk-norm, as a module."""

from typing import Unpack

import torch
from torch import Tensor, nn

from isomodels.kernels.rope import rope_table
from isomodels.kernels.rope_qkv import rope_qkv, rope_qkv_to_cache
from isomodels.layers.linear import Placed, parameter


class HeadNorm(nn.Module):
    """The weight of a qk-norm, under the name that it has in HF files; `Rope` applies the norm."""

    def __init__(self, head_dim: int, **placed: Unpack[Placed]):
        super().__init__()
        self.weight = parameter(head_dim, **placed)


class Rope(nn.Module):
    """Rotates queries and keys of a fused projection, after their norms if there are any."""

    def __init__(
        self,
        head_dim: int,
        theta: float,
        max_positions: int,
        *,
        num_heads: int,
        norm_eps: float,
        device: torch.device | None = None,
    ):
        super().__init__()
        self.table_key = (head_dim, theta, max_positions)
        self.num_heads = num_heads
        self.eps = norm_eps
        # Made once, here: a forward then runs operators only.
        rope_table(*self.table_key, torch.device(device or "cpu"))

    def forward(
        self,
        qkv: Tensor,
        positions: Tensor,
        q_weight: Tensor | None,
        k_weight: Tensor | None,
        cache: tuple[Tensor, Tensor] | None,
    ) -> tuple[Tensor, Tensor, Tensor]:
        """qkv [T, heads + 2 kv_heads, D] -> (q [T, heads, D], k and v [T, kv_heads, D]).

        With an engine's cache of this layer and the slot of each token, k and v are also put there.
        """
        table = self._table(qkv.device)
        args = (qkv, positions, table, q_weight, k_weight, self.num_heads, self.eps)
        return rope_qkv(*args) if cache is None else rope_qkv_to_cache(*args, *cache)

    # torch.compile then takes the table as it is, and does not look into its making.
    @torch.compiler.assume_constant_result
    def _table(self, device: torch.device) -> Tensor:
        return rope_table(*self.table_key, device)
