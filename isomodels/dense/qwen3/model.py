"""Qwen3 dense: grouped-query attention with qk-norm, SwiGLU, tied or untied head.

Architecture: "Qwen3 Technical Report" (2025), and transformers' `modeling_qwen3.py`.
"""

import torch

from isomodels.dense.qwen3.config import Qwen3Config
from isomodels.layers.attention import SelfAttention
from isomodels.layers.decoder import CausalLM, DecoderLayer
from isomodels.layers.linear import Placed
from isomodels.layers.parallel import ALONE, Layout


class Qwen3ForCausalLM(CausalLM):
    """The module that both hosts run."""

    def __init__(
        self,
        config: Qwen3Config,
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
