"""Qwen3-Next: the layers of Qwen3.5-MoE; only its files hold the projections in another order.

Architecture: transformers' `modeling_qwen3_next.py`. The multi-token-prediction layers are not
run; a trainer carries their tensors as they are.
"""

import torch
from torch import nn

from isomodels.hybrid.qwen3_next.config import Qwen3NextConfig
from isomodels.layers.carried import CarriedTensors
from isomodels.layers.hybrid_decoder import HybridCausalLM
from isomodels.layers.hybrid_moe import make_moe, moe_shapes
from isomodels.layers.hybrid_weights import mtp_shapes
from isomodels.layers.linear import Placed
from isomodels.layers.parallel import ALONE, Layout


class Qwen3NextForCausalLM(HybridCausalLM):
    """The module that both hosts run."""

    def __init__(
        self,
        config: Qwen3NextConfig,
        *,
        dtype: torch.dtype,
        device: torch.device | None = None,
        carry_mtp: bool = False,
        layout: Layout = ALONE,
    ):
        placed: Placed = {"dtype": dtype, "device": device, "layout": layout}

        def make_mlp(layer_index: int) -> nn.Module:
            return make_moe(config, layer_index, **placed)

        super().__init__(config, make_mlp=make_mlp, **placed)
        if carry_mtp and config.mtp_num_hidden_layers and layout.stage.heads:
            self.mtp = CarriedTensors(mtp_shapes(config, moe_shapes(config)), dtype, device)
