"""Qwen3-Next: the layers of Qwen3.5-MoE; only its files hold the projections in another order.

Architecture: transformers' `modeling_qwen3_next.py`.
"""

from isomodels.layers.hybrid_decoder import HybridForCausalLM


class Qwen3NextForCausalLM(HybridForCausalLM):
    """The module that both hosts run."""
