"""Qwen3-MoE: the attention of Qwen3, experts with softmax routing in place of the feed-forward.

Architecture: "Qwen3 Technical Report" (2025), and transformers' `modeling_qwen3_moe.py`.
"""

import torch
from torch import nn

from isomodels.layers.decoder import CausalLM
from isomodels.layers.linear import Placed
from isomodels.layers.mlp import MLP
from isomodels.layers.moe import MoE
from isomodels.layers.parallel import ALONE, Layout
from isomodels.moe.qwen3_moe.config import Qwen3MoeConfig


class Qwen3MoeForCausalLM(CausalLM):
    """The module that both hosts run."""

    def __init__(
        self,
        config: Qwen3MoeConfig,
        *,
        dtype: torch.dtype,
        device: torch.device | None = None,
        carry_mtp: bool = False,
        layout: Layout = ALONE,
    ):
        placed: Placed = {"dtype": dtype, "device": device, "layout": layout}

        def make_mlp(layer_index: int) -> nn.Module:
            hidden = config.hidden_size
            if not config.is_sparse(layer_index):
                return MLP(hidden, config.intermediate_size, **placed)
            width = config.moe_intermediate_size
            return MoE(hidden, width, config.routing, layer_index, **placed)

        super().__init__(config, qkv_bias=False, qk_norm=True, make_mlp=make_mlp, **placed)
