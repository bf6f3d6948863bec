"""Qwen3.5-MoE: the layers of Qwen3.5 with experts and a gated shared expert in each.

Architecture: transformers' `modeling_qwen3_5_moe.py`.
"""

from isomodels.layers.hybrid_decoder import HybridForCausalLM


class Qwen3_5MoeForCausalLM(HybridForCausalLM):
    """The module that both hosts run."""
