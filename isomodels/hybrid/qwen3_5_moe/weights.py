"""Checkpoint tensors of Qwen3.5-MoE; the MTP layers are only carried."""

from isomodels.hybrid.qwen3_5_moe.config import Qwen3_5MoeConfig
from isomodels.layers import megatron_names as megatron
from isomodels.layers.hybrid_weights import hybrid_rules
from isomodels.weights_conv.rules import ForeignTable, Rule


def rules(config: Qwen3_5MoeConfig) -> tuple[Rule, ...]:
    """The conversion table of one config."""
    return hybrid_rules(config)


def megatron_table(config: Qwen3_5MoeConfig) -> ForeignTable:
    """The table of the same model in Megatron."""
    return megatron.hybrid_table(config)
