"""Norms whose stored weight is the distance from one."""

from typing import Unpack

import torch
from torch import Tensor, nn

from isomodels.kernels.one_plus import one_plus
from isomodels.kernels.partial_rope import partial_rope
from isomodels.kernels.rms_norm import add_rms_norm, rms_norm
from isomodels.kernels.rope import rope_table
from isomodels.layers.collectives import sum_gradients
from isomodels.layers.linear import Placed, parameter
from isomodels.layers.norm import RMSNorm
from isomodels.layers.parallel import ALONE


class ZeroCentredRMSNorm(RMSNorm):
    """RMSNorm with the factor 1 + weight."""

    def forward(self, x: Tensor, residual: Tensor | None) -> tuple[Tensor, Tensor]:
        """See `RMSNorm`."""
        factor = one_plus(sum_gradients(self.weight, self.sharing))
        if residual is None:
            return rms_norm(x, factor, self.eps), x
        return add_rms_norm(x, residual, factor, self.eps)


class PartialRope(nn.Module):
    """qk-norm with the factor 1 + weight, then a rotation of a head's first channels.

    Named after the norm (`q_norm`, `k_norm`), as its weight is in HF files.
    """

    def __init__(
        self,
        head_dim: int,
        rotary_dim: int,
        theta: float,
        max_positions: int,
        eps: float,
        **placed: Unpack[Placed],
    ):
        super().__init__()
        self.table_key = (rotary_dim, theta, max_positions)
        self.parallel = placed.get("layout", ALONE).tensor  # each rank norms its own heads
        self.weight = parameter(head_dim, **placed)
        self.eps = eps
        # Made once, here: a forward then runs operators only.
        rope_table(*self.table_key, torch.device(placed.get("device") or "cpu"))

    def forward(self, x: Tensor, positions: Tensor) -> Tensor:
        """x [T, heads, D], positions [T] int64 -> [T, heads, D]."""
        factor = one_plus(sum_gradients(self.weight, self.parallel))
        return partial_rope(x, positions, self._table(x.device), factor, self.eps)

    # torch.compile then takes the table as it is, and does not look into its making.
    @torch.compiler.assume_constant_result
    def _table(self, device: torch.device) -> Tensor:
        return rope_table(*self.table_key, device)
