"""MiMo."""

from isomodels.registry import ArchSpec

SPEC = ArchSpec(
    architecture="MiMoForCausalLM",
    family="dense",
    model_type="mimo",
    config="isomodels.dense.mimo.config:MiMoConfig",
    model="isomodels.dense.mimo.model:MiMoForCausalLM",
    weights="isomodels.dense.mimo.weights:rules",
    tiny="isomodels.dense.mimo.config:TINY",
    transformers="Qwen2ForCausalLM",
)
