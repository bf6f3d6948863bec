"""Rotary positions with optional qk-norm, as a module."""

from typing import Unpack

import torch
from torch import Tensor, nn

from isomodels.kernels.rope import rope, rope_table
from isomodels.layers.linear import Placed, parameter


class Rope(nn.Module):
    """Rotates heads by position; holds the qk-norm weight where the architecture has one.

    The module is named after that norm (`q_norm`, `k_norm`), the name its weight has in HF files.
    """

    def __init__(
        self,
        head_dim: int,
        theta: float,
        max_positions: int,
        *,
        norm_eps: float | None,
        **placed: Unpack[Placed],
    ):
        super().__init__()
        self.table_key = (head_dim, theta, max_positions)
        self.weight = None if norm_eps is None else parameter(head_dim, **placed)
        self.eps = norm_eps or 0.0
        # Made once, here: a forward then runs operators only.
        rope_table(*self.table_key, torch.device(placed.get("device") or "cpu"))

    def forward(self, x: Tensor, positions: Tensor) -> Tensor:
        """x [T, heads, D], positions [T] int64 -> [T, heads, D]."""
        return rope(x, positions, self._table(x.device), self.weight, self.eps)

    # torch.compile then takes the table as it is, and does not look into its making.
    @torch.compiler.assume_constant_result
    def _table(self, device: torch.device) -> Tensor:
        return rope_table(*self.table_key, device)
