"""Checkpoint tensors of MiMo-7B: those of Qwen2, and the MTP layers, which are only carried."""

from isomodels.dense.mimo.config import MiMoConfig
from isomodels.dense.mimo.model import mtp_shapes
from isomodels.layers import megatron_names as megatron
from isomodels.layers.weights import decoder_rules
from isomodels.weights_conv.rules import CarriedSame, ForeignTable, Rule


def rules(config: MiMoConfig) -> tuple[Rule, ...]:
    """The conversion table of one config."""
    return decoder_rules(config, qkv_bias=True, qk_norm=False) + tuple(
        CarriedSame(f"model.mtp_layers.{index}.{name}", shape)
        for index in range(config.num_nextn_predict_layers)
        for name, shape in mtp_shapes(config).items()
    )


def megatron_table(config: MiMoConfig) -> ForeignTable:
    """The table of the same model in Megatron."""
    layer = megatron.decoder_layer(config, bias=True, qk_norm=False)
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
