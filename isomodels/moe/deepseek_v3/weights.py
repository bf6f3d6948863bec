"""Checkpoint tensors of DeepSeek-V3."""

from isomodels.layers import megatron_names as megatron
from isomodels.layers.mla_moe import latent_moe_rules
from isomodels.moe.deepseek_v3.config import DeepseekV3Config
from isomodels.weights_conv.rules import ForeignTable, Rule


def rules(config: DeepseekV3Config) -> tuple[Rule, ...]:
    """The conversion table of one config."""
    return latent_moe_rules(config)


def megatron_table(config: DeepseekV3Config) -> ForeignTable:
    """The table of the same model in Megatron."""
    return megatron.latent_table(config)
