"""Qwen3.5 checkpoints with a vision tower, used for text only."""

from isomodels.registry import ArchSpec

SPEC = ArchSpec(
    architecture="Qwen3_5ForConditionalGeneration",
    family="hybrid",
    model_type="qwen3_5",
    config="isomodels.hybrid.qwen3_5_multimodal.config:Qwen3_5MultimodalConfig",
    model="isomodels.hybrid.qwen3_5_multimodal.model:Qwen3_5ForConditionalGeneration",
    weights="isomodels.hybrid.qwen3_5_multimodal.weights:rules",
    tiny="isomodels.hybrid.qwen3_5_multimodal.config:TINY",
    transformers="Qwen3_5ForConditionalGeneration",
)
