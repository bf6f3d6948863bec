"""Qwen3.5-MoE inside a checkpoint with a vision tower, used for text only.

The tower's tensors, like the MTP layers', are carried by a trainer as they are.
"""

from isomodels.hybrid.qwen3_5_moe import weights
from isomodels.hybrid.qwen3_5_moe.config import TINY as TEXT
from isomodels.hybrid.qwen3_5_moe.config import Qwen3_5MoeConfig
from isomodels.layers.multimodal import (
    MultimodalConfig,
    MultimodalForCausalLM,
    multimodal_megatron_table,
    multimodal_rules,
    multimodal_tiny,
)
from isomodels.weights_conv.rules import ForeignTable, Rule


class Qwen3_5MoeMultimodalConfig(MultimodalConfig, Qwen3_5MoeConfig):
    """The text model's config and the sizes of the vision tower."""


class Qwen3_5MoeForConditionalGeneration(MultimodalForCausalLM):
    """The module that both hosts run: text only."""


def rules(config: Qwen3_5MoeMultimodalConfig) -> tuple[Rule, ...]:
    """The conversion table of one config."""
    return multimodal_rules(weights.rules(config), config.vision_config)


def megatron_table(config: Qwen3_5MoeMultimodalConfig) -> ForeignTable:
    """The table of the same model in Megatron, without its vision tower."""
    return multimodal_megatron_table(weights.megatron_table(config))


TINY = multimodal_tiny("Qwen3_5MoeForConditionalGeneration", TEXT)
