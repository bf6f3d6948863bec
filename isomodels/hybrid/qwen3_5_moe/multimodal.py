"""Qwen3.5-MoE inside a checkpoint with a vision tower, used for text only.

The tower's tensors, like the MTP layers', are carried by a trainer as they are.
"""

import torch

from isomodels.hybrid.qwen3_5_moe import weights
from isomodels.hybrid.qwen3_5_moe.config import TINY as TEXT
from isomodels.hybrid.qwen3_5_moe.config import Qwen3_5MoeConfig
from isomodels.hybrid.qwen3_5_moe.model import Qwen3_5MoeForCausalLM
from isomodels.layers.carried import CarriedTensors
from isomodels.layers.multimodal import (
    MultimodalConfig,
    multimodal_megatron_table,
    multimodal_rules,
    vision_shapes,
)
from isomodels.weights_conv.rules import ForeignTable, Rule


class Qwen3_5MoeMultimodalConfig(MultimodalConfig, Qwen3_5MoeConfig):
    """The text model's config and the sizes of the vision tower."""


class Qwen3_5MoeForConditionalGeneration(Qwen3_5MoeForCausalLM):
    """The module that both hosts run: text only."""

    def __init__(
        self,
        config: Qwen3_5MoeMultimodalConfig,
        *,
        dtype: torch.dtype,
        device: torch.device | None = None,
        carry_mtp: bool = False,
    ):
        super().__init__(config, dtype=dtype, device=device, carry_mtp=carry_mtp)
        if carry_mtp:
            self.visual = CarriedTensors(vision_shapes(config.vision_config), dtype, device)


def rules(config: Qwen3_5MoeMultimodalConfig) -> tuple[Rule, ...]:
    """The conversion table of one config."""
    return multimodal_rules(weights.rules(config), config.vision_config)


def megatron_table(config: Qwen3_5MoeMultimodalConfig) -> ForeignTable:
    """The table of the same model in Megatron, without its vision tower."""
    return multimodal_megatron_table(weights.megatron_table(config))


TINY = {
    "architectures": ["Qwen3_5MoeForConditionalGeneration"],
    "model_type": "qwen3_5_moe",
    "text_config": {k: v for k, v in TEXT.items() if k != "architectures"},
    "tie_word_embeddings": False,
    "image_token_id": 1,
    "video_token_id": 2,
    "vision_start_token_id": 3,
    "vision_end_token_id": 4,
    "vision_config": {
        "model_type": "qwen3_5_moe",
        "depth": 1,
        "hidden_size": 32,
        "hidden_act": "gelu_pytorch_tanh",
        "intermediate_size": 64,
        "num_heads": 2,
        "in_channels": 3,
        "patch_size": 4,
        "temporal_patch_size": 2,
        "spatial_merge_size": 2,
        "out_hidden_size": 128,
        "num_position_embeddings": 16,
    },
}
