"""Qwen3.5-MoE, text only: by itself, and inside a checkpoint with a vision tower."""

from isomodels.registry import ArchSpec

SPEC = (
    ArchSpec(
        architecture="Qwen3_5MoeForCausalLM",
        family="hybrid",
        model_type="qwen3_5_moe_text",
        config="isomodels.hybrid.qwen3_5_moe.config:Qwen3_5MoeConfig",
        model="isomodels.hybrid.qwen3_5_moe.model:Qwen3_5MoeForCausalLM",
        weights="isomodels.hybrid.qwen3_5_moe.weights:rules",
        tiny="isomodels.hybrid.qwen3_5_moe.config:TINY",
        transformers="Qwen3_5MoeForCausalLM",
    ),
    ArchSpec(
        architecture="Qwen3_5MoeForConditionalGeneration",
        family="hybrid",
        model_type="qwen3_5_moe",
        config="isomodels.hybrid.qwen3_5_moe.multimodal:Qwen3_5MoeMultimodalConfig",
        model="isomodels.hybrid.qwen3_5_moe.multimodal:Qwen3_5MoeForConditionalGeneration",
        weights="isomodels.hybrid.qwen3_5_moe.multimodal:rules",
        tiny="isomodels.hybrid.qwen3_5_moe.multimodal:TINY",
        transformers="Qwen3_5MoeForConditionalGeneration",
    ),
)
