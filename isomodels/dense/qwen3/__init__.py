"""Qwen3."""

from isomodels.registry import ArchSpec

SPEC = ArchSpec(
    architecture="Qwen3ForCausalLM",
    family="dense",
    model_type="qwen3",
    config="isomodels.dense.qwen3.config:Qwen3Config",
    model="isomodels.dense.qwen3.model:Qwen3ForCausalLM",
    weights="isomodels.dense.qwen3.weights:rules",
    tiny="isomodels.dense.qwen3.config:TINY",
    transformers="Qwen3ForCausalLM",
)
