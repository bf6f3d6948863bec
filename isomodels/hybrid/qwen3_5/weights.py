"""Checkpoint tensors of Qwen3.5 dense; the MTP layers are only carried."""

from isomodels.hybrid.qwen3_5.config import Qwen3_5Config
from isomodels.layers import megatron_names as megatron
from isomodels.layers.hybrid_weights import hybrid_rules
from isomodels.weights_conv.rules import ForeignTable, Rule


def rules(config: Qwen3_5Config) -> tuple[Rule, ...]:
    """The conversion table of one config."""
    return hybrid_rules(config)


def megatron_table(config: Qwen3_5Config) -> ForeignTable:
    """The table of the same model in Megatron."""
    return megatron.hybrid_table(config)
