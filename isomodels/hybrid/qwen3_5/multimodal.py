"""Qwen3.5 inside a checkpoint with a vision tower, used for text only.

The tower's tensors, like the MTP layers', are carried by a trainer as they are.
"""

from isomodels.hybrid.qwen3_5 import weights
from isomodels.hybrid.qwen3_5.config import TINY as TEXT
from isomodels.hybrid.qwen3_5.config import Qwen3_5Config
from isomodels.layers.multimodal import (
    MultimodalConfig,
    MultimodalForCausalLM,
    multimodal_megatron_table,
    multimodal_rules,
    multimodal_tiny,
)
from isomodels.weights_conv.rules import ForeignTable, Rule


class Qwen3_5MultimodalConfig(MultimodalConfig, Qwen3_5Config):
    """The text model's config and the sizes of the vision tower."""


class Qwen3_5ForConditionalGeneration(MultimodalForCausalLM):
    """The module that both hosts run: text only."""


def rules(config: Qwen3_5MultimodalConfig) -> tuple[Rule, ...]:
    """The conversion table of one config."""
    return multimodal_rules(weights.rules(config), config.vision_config)


def megatron_table(config: Qwen3_5MultimodalConfig) -> ForeignTable:
    """The table of the same model in Megatron, without its vision tower."""
    return multimodal_megatron_table(weights.megatron_table(config))


TINY = multimodal_tiny("Qwen3_5ForConditionalGeneration", TEXT)
