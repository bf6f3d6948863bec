"""Qwen3-MoE."""

from isomodels.registry import ArchSpec

SPEC = ArchSpec(
    architecture="Qwen3MoeForCausalLM",
    family="moe",
    model_type="qwen3_moe",
    config="isomodels.moe.qwen3_moe.config:Qwen3MoeConfig",
    model="isomodels.moe.qwen3_moe.model:Qwen3MoeForCausalLM",
    weights="isomodels.moe.qwen3_moe.weights:rules",
    tiny="isomodels.moe.qwen3_moe.config:TINY",
    transformers="Qwen3MoeForCausalLM",
)
