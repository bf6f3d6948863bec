"""The decoder of the hybrids: gated delta rule and gated attention layers, zero-centred norms."""

from typing import Unpack

import torch
from torch import nn

from isomodels.layers.carried import CarriedTensors
from isomodels.layers.decoder import CausalLM, DecoderLayer
from isomodels.layers.gated_attention import GatedAttention
from isomodels.layers.gated_delta import GatedDeltaNet
from isomodels.layers.hybrid_config import HybridConfig
from isomodels.layers.hybrid_weights import mtp_sources
from isomodels.layers.linear import Placed
from isomodels.layers.parallel import ALONE, Layout
from isomodels.layers.zero_centred import ZeroCentredRMSNorm


def hybrid_layer(config: HybridConfig, layer_index: int, **placed: Unpack[Placed]) -> DecoderLayer:
    """A layer of the kind that the config states; its attention has the name in HF files."""
    kind = config.layer_types[layer_index]
    place = config.layers_of(kind).index(layer_index)
    if kind == "full_attention":
        name = "self_attn"
        attention: nn.Module = GatedAttention(config, place, **placed)
    else:
        name = "linear_attn"
        attention = GatedDeltaNet(config, place, **placed)
    return DecoderLayer(
        config, layer_index, attention, attention_name=name, norm=ZeroCentredRMSNorm, **placed
    )


class HybridForCausalLM(CausalLM):
    """The module that both hosts run.

    Multi-token-prediction layers are not run; with `carry_mtp` their tensors are kept for saves.
    """

    def __init__(
        self,
        config: HybridConfig,
        *,
        dtype: torch.dtype,
        device: torch.device | None = None,
        carry_mtp: bool = False,
        layout: Layout = ALONE,
    ):
        placed: Placed = {"dtype": dtype, "device": device, "layout": layout}

        def make_layer(layer_index: int) -> DecoderLayer:
            return hybrid_layer(config, layer_index, **placed)

        super().__init__(config, make_layer, norm=ZeroCentredRMSNorm, **placed)
        if carry_mtp and config.mtp_num_hidden_layers and layout.stage.heads:
            self.mtp = CarriedTensors(mtp_sources(config), dtype, device)
