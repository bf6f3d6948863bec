"""GLM-4.7-Flash: latent attention, sigmoid routing, shared experts, MTP carried.

Architecture: transformers' `modeling_glm4_moe_lite.py`; its parts are those of DeepSeek-V3.
"""

from isomodels.layers.mla_moe import LatentMoEForCausalLM


class Glm4MoeLiteForCausalLM(LatentMoEForCausalLM):
    """The module that both hosts run."""
