"""Checkpoint tensors of Qwen3.5 with a vision tower; MTP layers and vision are only carried."""

from isomodels.hybrid.qwen3_5 import weights
from isomodels.hybrid.qwen3_5_multimodal.config import Qwen3_5MultimodalConfig
from isomodels.layers.multimodal import multimodal_rules
from isomodels.weights_conv.rules import Rule


def rules(config: Qwen3_5MultimodalConfig) -> tuple[Rule, ...]:
    """The conversion table of one config."""
    return multimodal_rules(weights.rules(config), config.vision_config)
