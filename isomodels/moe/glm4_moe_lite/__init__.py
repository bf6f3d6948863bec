"""GLM-4.7-Flash."""

from isomodels.registry import ArchSpec

SPEC = ArchSpec(
    architecture="Glm4MoeLiteForCausalLM",
    family="moe",
    model_type="glm4_moe_lite",
    config="isomodels.moe.glm4_moe_lite.config:Glm4MoeLiteConfig",
    model="isomodels.moe.glm4_moe_lite.model:Glm4MoeLiteForCausalLM",
    weights="isomodels.moe.glm4_moe_lite.weights:rules",
    tiny="isomodels.moe.glm4_moe_lite.config:TINY",
    transformers="Glm4MoeLiteForCausalLM",
)
