"""Checkpoint tensors of MiMo-7B: those of Qwen2, and the MTP layers, which are only carried."""

from isomodels.dense.mimo.config import MiMoConfig
from isomodels.dense.mimo.model import mtp_sources
from isomodels.layers import megatron_names as megatron
from isomodels.layers.weights import carried_rules, decoder_rules
from isomodels.weights_conv.rules import ForeignTable, Rule


def rules(config: MiMoConfig) -> tuple[Rule, ...]:
    """The conversion table of one config."""
    rules = decoder_rules(config, qkv_bias=True, qk_norm=False)
    for index in range(config.num_nextn_predict_layers):
        rules += carried_rules(f"model.mtp_layers.{index}", mtp_sources(config))
    return rules


def megatron_table(config: MiMoConfig) -> ForeignTable:
    """The table of the same model in Megatron."""
    layer = megatron.decoder_layer(config, qkv_bias=True, qk_norm=False)
    mtp = [
        rule
        for index in range(config.num_nextn_predict_layers)
        for rule in megatron.mtp_rules(
            index,
            f"model.mtp_layers.{index}",
            config,
            layer,
            enorm="token_layernorm",
            hnorm="hidden_layernorm",
            eh_proj="input_proj",
            final_layernorm="final_layernorm",
            swapped=True,
        )
    ]
    return megatron.megatron_table(config, layer, mtp)
