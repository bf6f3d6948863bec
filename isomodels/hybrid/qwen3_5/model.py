"""Qwen3.5 dense: three gated delta rule layers to one of gated attention, SwiGLU.

Architecture: transformers' `modeling_qwen3_5.py`; Yang et al., "Gated Delta Networks" (2024). The
multi-token-prediction layers are not run; a trainer carries their tensors as they are.
"""

import torch

from isomodels.hybrid.qwen3_5.config import Qwen3_5Config
from isomodels.layers.carried import CarriedTensors
from isomodels.layers.hybrid_decoder import HybridCausalLM
from isomodels.layers.hybrid_weights import mtp_shapes


class Qwen3_5ForCausalLM(HybridCausalLM):
    """The module that both hosts run."""

    def __init__(
        self,
        config: Qwen3_5Config,
        *,
        dtype: torch.dtype,
        device: torch.device | None = None,
        carry_mtp: bool = False,
    ):
        super().__init__(config, dtype=dtype, device=device)
        if carry_mtp and config.mtp_num_hidden_layers:
            self.mtp = CarriedTensors(mtp_shapes(config), dtype, device)
