"""Checkpoint tensors of GLM-4.7-Flash."""

from isomodels.layers import megatron_names as megatron
from isomodels.layers.mla_moe import latent_moe_rules
from isomodels.moe.glm4_moe_lite.config import Glm4MoeLiteConfig
from isomodels.weights_conv.rules import ForeignTable, Rule


def rules(config: Glm4MoeLiteConfig) -> tuple[Rule, ...]:
    """The conversion table of one config."""
    return latent_moe_rules(config)


def megatron_table(config: Glm4MoeLiteConfig) -> ForeignTable:
    """The table of the same model in Megatron."""
    return megatron.latent_table(config)
