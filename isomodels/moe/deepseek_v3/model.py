"""DeepSeek-V3: latent attention with YaRN, grouped sigmoid routing, shared experts, MTP carried.

Architecture: "DeepSeek-V3 Technical Report" (2024), and transformers' `modeling_deepseek_v3.py`.
"""

from isomodels.layers.mla_moe import LatentMoEForCausalLM


class DeepseekV3ForCausalLM(LatentMoEForCausalLM):
    """The module that both hosts run."""
