"""Checkpoint tensors of Qwen3-MoE."""

from isomodels.layers import megatron_names as megatron
from isomodels.layers.weights import decoder_rules
from isomodels.moe.qwen3_moe.config import Qwen3MoeConfig
from isomodels.weights_conv.rules import ForeignTable, Rule


def rules(config: Qwen3MoeConfig) -> tuple[Rule, ...]:
    """The conversion table of one config."""
    return decoder_rules(config, qkv_bias=False, qk_norm=True)


def megatron_table(config: Qwen3MoeConfig) -> ForeignTable:
    """The table of the same model in Megatron."""
    return megatron.megatron_table(config, megatron.decoder_layer(config))
