"""DeepSeek-V3."""

from isomodels.registry import ArchSpec

SPEC = ArchSpec(
    architecture="DeepseekV3ForCausalLM",
    family="moe",
    model_type="deepseek_v3",
    config="isomodels.moe.deepseek_v3.config:DeepseekV3Config",
    model="isomodels.moe.deepseek_v3.model:DeepseekV3ForCausalLM",
    weights="isomodels.moe.deepseek_v3.weights:rules",
    tiny="isomodels.moe.deepseek_v3.config:TINY",
    transformers="DeepseekV3ForCausalLM",
)
