"""Qwen3.5 dense: three gated delta rule layers to one of gated attention, SwiGLU.

Architecture: transformers' `modeling_qwen3_5.py`; Yang et al., "Gated Delta Networks" (2024). The
multi-token-prediction layers are not run; a trainer carries their tensors as they are.
"""

import torch

from isomodels.hybrid.qwen3_5.config import Qwen3_5Config
from isomodels.layers.carried import CarriedTensors
from isomodels.layers.hybrid_decoder import HybridCausalLM
from isomodels.layers.hybrid_weights import mtp_shapes
from isomodels.layers.linear import Placed
from isomodels.layers.parallel import ALONE, Layout


class Qwen3_5ForCausalLM(HybridCausalLM):
    """The module that both hosts run."""

    def __init__(
        self,
        config: Qwen3_5Config,
        *,
        dtype: torch.dtype,
        device: torch.device | None = None,
        carry_mtp: bool = False,
        layout: Layout = ALONE,
    ):
        placed: Placed = {"dtype": dtype, "device": device, "layout": layout}
        super().__init__(config, **placed)
        if carry_mtp and config.mtp_num_hidden_layers and layout.stage.heads:
            self.mtp = CarriedTensors(mtp_shapes(config), dtype, device)
