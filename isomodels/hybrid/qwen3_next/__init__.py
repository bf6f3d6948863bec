"""Qwen3-Next."""

from isomodels.registry import ArchSpec

SPEC = ArchSpec(
    architecture="Qwen3NextForCausalLM",
    family="hybrid",
    model_type="qwen3_next",
    config="isomodels.hybrid.qwen3_next.config:Qwen3NextConfig",
    model="isomodels.hybrid.qwen3_next.model:Qwen3NextForCausalLM",
    weights="isomodels.hybrid.qwen3_next.weights:rules",
    tiny="isomodels.hybrid.qwen3_next.config:TINY",
    transformers="Qwen3NextForCausalLM",
)
