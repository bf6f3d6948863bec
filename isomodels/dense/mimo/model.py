"""MiMo-7B: a dense decoder with the attention of Qwen2 and carried MTP weights.

Architecture: "MiMo: Unlocking the Reasoning Potential of Language Model" (2025), and vLLM's
`mimo.py`. The multi-token-prediction layers are not run; a trainer carries their tensors from
checkpoint to checkpoint as they are.
"""

import torch
from torch import nn

from isomodels.dense.mimo.config import MiMoConfig
from isomodels.layers.attention import SelfAttention
from isomodels.layers.carried import CarriedTensors
from isomodels.layers.decoder import CausalLM, DecoderLayer
from isomodels.layers.linear import Placed
from isomodels.layers.parallel import ALONE, Layout
from isomodels.layers.weights import attention_rules, hf_sources, layer_rules
from isomodels.weights_conv.rules import Rule, Same, Source


class MiMoForCausalLM(CausalLM):
    """The module that both hosts run."""

    def __init__(
        self,
        config: MiMoConfig,
        *,
        dtype: torch.dtype,
        device: torch.device | None = None,
        carry_mtp: bool = False,
        layout: Layout = ALONE,
    ):
        placed: Placed = {"dtype": dtype, "device": device, "layout": layout}

        def make_layer(layer_index: int) -> DecoderLayer:
            attention = SelfAttention(config, layer_index, qkv_bias=True, qk_norm=False, **placed)
            return DecoderLayer(config, layer_index, attention, **placed)

        super().__init__(config, make_layer, **placed)
        if carry_mtp and layout.stage.heads:
            self.model.mtp_layers = nn.ModuleList(
                CarriedTensors(mtp_sources(config), dtype, device)
                for _ in range(config.num_nextn_predict_layers)
            )


def mtp_sources(config: MiMoConfig) -> dict[str, Source]:
    """HF tensors of an MTP layer by their names below it: norms and a projection, then a layer."""

    def attention(layer: str, _: int) -> list[Rule]:
        return attention_rules(f"{layer}.self_attn", config, qkv_bias=True, qk_norm=False)

    hidden = config.hidden_size
    norms = ("token_layernorm", "hidden_layernorm", "final_layernorm")
    rules: list[Rule] = [Same(f"layer.{norm}.weight", (hidden,)) for norm in norms]
    rules.append(Same("layer.input_proj.weight", (hidden, 2 * hidden)))
    rules += layer_rules("layer", config, config.num_hidden_layers, attention)
    return hf_sources(rules, "layer")
