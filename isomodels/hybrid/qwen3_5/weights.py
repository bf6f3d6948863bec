"""Checkpoint tensors of Qwen3.5 dense; the MTP layers are only carried."""

from isomodels.hybrid.qwen3_5.config import Qwen3_5Config
from isomodels.layers.hybrid_weights import carried_rules, gated_attention_shapes, hybrid_rules
from isomodels.weights_conv.rules import Rule


def rules(config: Qwen3_5Config) -> tuple[Rule, ...]:
    """The conversion table of one config."""
    mtp = {f"mtp.{name}": shape for name, shape in mtp_shapes(config).items()}
    return hybrid_rules(config) + carried_rules(mtp)


def mtp_shapes(config: Qwen3_5Config) -> dict[str, tuple[int, ...]]:
    """HF names below `mtp.` and their shapes: gated attention layers after one projection."""
    if not config.mtp_num_hidden_layers:
        return {}
    hidden, intermediate = config.hidden_size, config.intermediate_size
    layer = {f"self_attn.{name}": shape for name, shape in gated_attention_shapes(config).items()}
    layer |= {
        "mlp.gate_proj.weight": (intermediate, hidden),
        "mlp.up_proj.weight": (intermediate, hidden),
        "mlp.down_proj.weight": (hidden, intermediate),
        "input_layernorm.weight": (hidden,),
        "post_attention_layernorm.weight": (hidden,),
    }
    norms = ("pre_fc_norm_embedding", "pre_fc_norm_hidden", "norm")
    return {
        "fc.weight": (hidden, 2 * hidden),
        **{f"{norm}.weight": (hidden,) for norm in norms},
        **{
            f"layers.{index}.{name}": shape
            for index in range(config.mtp_num_hidden_layers)
            for name, shape in layer.items()
        },
    }
