"""MiMo-7B: a dense decoder with the attention of Qwen2 and carried MTP weights.

Architecture: "MiMo: Unlocking the Reasoning Potential of Language Model" (2025), and vLLM's
`mimo.py`. The multi-token-prediction layers are not run; a trainer carries their tensors from
checkpoint to checkpoint as they are.
"""

import torch
from torch import nn

from isomodels.dense.mimo.config import MiMoConfig
from isomodels.layers.carried import CarriedTensors
from isomodels.layers.decoder import CausalLM
from isomodels.layers.linear import Placed
from isomodels.layers.parallel import ALONE, Layout


class MiMoForCausalLM(CausalLM):
    """The module that both hosts run."""

    def __init__(
        self,
        config: MiMoConfig,
        *,
        dtype: torch.dtype,
        device: torch.device | None = None,
        carry_mtp: bool = False,
        layout: Layout = ALONE,
    ):
        placed: Placed = {"dtype": dtype, "device": device, "layout": layout}
        super().__init__(config, qkv_bias=True, qk_norm=False, **placed)
        if carry_mtp and layout.stage.heads:
            self.model.mtp_layers = nn.ModuleList(
                CarriedTensors(mtp_shapes(config), dtype, device)
                for _ in range(config.num_nextn_predict_layers)
            )


def mtp_shapes(config: MiMoConfig) -> dict[str, tuple[int, ...]]:
    """HF names below `model.mtp_layers.{i}.` and their shapes."""
    hidden, intermediate = config.hidden_size, config.intermediate_size
    queries = config.num_attention_heads * config.head_dim
    keys = config.num_key_value_heads * config.head_dim
    norms = (
        "token_layernorm",
        "hidden_layernorm",
        "input_layernorm",
        "post_attention_layernorm",
        "final_layernorm",
    )
    return {
        **{f"{norm}.weight": (hidden,) for norm in norms},
        "input_proj.weight": (hidden, 2 * hidden),
        "self_attn.q_proj.weight": (queries, hidden),
        "self_attn.q_proj.bias": (queries,),
        "self_attn.k_proj.weight": (keys, hidden),
        "self_attn.k_proj.bias": (keys,),
        "self_attn.v_proj.weight": (keys, hidden),
        "self_attn.v_proj.bias": (keys,),
        "self_attn.o_proj.weight": (hidden, queries),
        "mlp.gate_proj.weight": (intermediate, hidden),
        "mlp.up_proj.weight": (intermediate, hidden),
        "mlp.down_proj.weight": (hidden, intermediate),
    }
