"""Qwen3-MoE: the attention of Qwen3, experts with softmax routing in place of the feed-forward.

Architecture: "Qwen3 Technical Report" (2025), and transformers' `modeling_qwen3_moe.py`.
"""

import torch

from isomodels.layers.attention import SelfAttention
from isomodels.layers.decoder import CausalLM, DecoderLayer
from isomodels.layers.linear import Placed
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

        def make_layer(layer_index: int) -> DecoderLayer:
            attention = SelfAttention(config, layer_index, qkv_bias=False, qk_norm=True, **placed)
            return DecoderLayer(config, layer_index, attention, **placed)

        super().__init__(config, make_layer, **placed)
