"""Qwen3.5 inside a checkpoint with a vision tower, whose tensors a trainer only carries."""

import torch

from isomodels.hybrid.qwen3_5.model import Qwen3_5ForCausalLM
from isomodels.hybrid.qwen3_5_multimodal.config import Qwen3_5MultimodalConfig
from isomodels.layers.carried import CarriedTensors
from isomodels.layers.multimodal import vision_shapes


class Qwen3_5ForConditionalGeneration(Qwen3_5ForCausalLM):
    """The module that both hosts run: text only."""

    def __init__(
        self,
        config: Qwen3_5MultimodalConfig,
        *,
        dtype: torch.dtype,
        device: torch.device | None = None,
        carry_mtp: bool = False,
    ):
        super().__init__(config, dtype=dtype, device=device, carry_mtp=carry_mtp)
        if carry_mtp:
            self.visual = CarriedTensors(vision_shapes(config.vision_config), dtype, device)
