"""Qwen3.5-MoE checkpoints with a vision tower, used for text only."""

from isomodels.registry import ArchSpec

SPEC = ArchSpec(
    architecture="Qwen3_5MoeForConditionalGeneration",
    family="hybrid",
    model_type="qwen3_5_moe",
    config="isomodels.hybrid.qwen3_5_moe_multimodal.config:Qwen3_5MoeMultimodalConfig",
    model="isomodels.hybrid.qwen3_5_moe_multimodal.model:Qwen3_5MoeForConditionalGeneration",
    weights="isomodels.hybrid.qwen3_5_moe_multimodal.weights:rules",
    tiny="isomodels.hybrid.qwen3_5_moe_multimodal.config:TINY",
    transformers="Qwen3_5MoeForConditionalGeneration",
)
