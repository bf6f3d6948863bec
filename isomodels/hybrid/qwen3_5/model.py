"""Qwen3.5 dense: three gated delta rule layers to one of gated attention, SwiGLU.

Architecture: transformers' `modeling_qwen3_5.py`; Yang et al., "Gated Delta Networks" (2024).
"""

from isomodels.layers.hybrid_decoder import HybridForCausalLM


class Qwen3_5ForCausalLM(HybridForCausalLM):
    """The module that both hosts run."""
