"""Qwen3.5, dense, text only."""

from isomodels.registry import ArchSpec

SPEC = ArchSpec(
    architecture="Qwen3_5ForCausalLM",
    family="hybrid",
    model_type="qwen3_5_text",
    config="isomodels.hybrid.qwen3_5.config:Qwen3_5Config",
    model="isomodels.hybrid.qwen3_5.model:Qwen3_5ForCausalLM",
    weights="isomodels.hybrid.qwen3_5.weights:rules",
    tiny="isomodels.hybrid.qwen3_5.config:TINY",
    transformers="Qwen3_5ForCausalLM",
)
