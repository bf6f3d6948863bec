"""Qwen3.5, text only: by itself, and inside a checkpoint with a vision tower."""

from isomodels.registry import ArchSpec

SPEC = (
    ArchSpec(
        architecture="Qwen3_5ForCausalLM",
        family="hybrid",
        model_type="qwen3_5_text",
        config="isomodels.hybrid.qwen3_5.config:Qwen3_5Config",
        model="isomodels.hybrid.qwen3_5.model:Qwen3_5ForCausalLM",
        weights="isomodels.hybrid.qwen3_5.weights:rules",
        tiny="isomodels.hybrid.qwen3_5.config:TINY",
        transformers="Qwen3_5ForCausalLM",
    ),
    ArchSpec(
        architecture="Qwen3_5ForConditionalGeneration",
        family="hybrid",
        model_type="qwen3_5",
        config="isomodels.hybrid.qwen3_5.multimodal:Qwen3_5MultimodalConfig",
        model="isomodels.hybrid.qwen3_5.multimodal:Qwen3_5ForConditionalGeneration",
        weights="isomodels.hybrid.qwen3_5.multimodal:rules",
        tiny="isomodels.hybrid.qwen3_5.multimodal:TINY",
        transformers="Qwen3_5ForConditionalGeneration",
    ),
)
