"""Conversion rules of the hybrids, for the tables of the architectures."""

from collections.abc import Callable

from isomodels.layers.hybrid_config import HybridConfig
from isomodels.layers.weights import (
    carried_rules,
    causal_lm_rules,
    hf_sources,
    layer_rules,
)
from isomodels.weights_conv.rules import (
    CarriedFused,
    CarriedStack,
    Concat,
    Either,
    Rule,
    Same,
    Source,
    Widened,
)

DeltaRules = Callable[[str, HybridConfig], list[Rule]]


def hybrid_rules(
    config: HybridConfig, *, projections: DeltaRules | None = None
) -> tuple[Rule, ...]:
    """The table of a hybrid decoder, its head, and its MTP layers, which are only carried.

    Args:
        config: the architecture's.
        projections: of a gated delta rule layer, where HF has them in another layout.
    """

    def attention(layer: str, index: int) -> list[Rule]:
        if config.layer_types[index] == "full_attention":
            return gated_attention_rules(f"{layer}.self_attn", config)
        prefix = f"{layer}.linear_attn"
        return (projections or delta_projections)(prefix, config) + delta_rules(prefix, config)

    return causal_lm_rules(config, attention) + carried_mtp_rules(config)


def gated_attention_rules(prefix: str, config: HybridConfig) -> list[Rule]:
    """`qkv_proj` is the rows [q and gate of each head | k | v]."""
    hidden, dim = config.hidden_size, config.head_dim
    queries, keys = config.num_attention_heads * dim, config.num_key_value_heads * dim
    rows = {"q_proj": 2 * queries, "k_proj": keys, "v_proj": keys}
    return [
        Concat(
            f"{prefix}.qkv_proj.weight",
            tuple(Source(f"{prefix}.{name}.weight", (n, hidden)) for name, n in rows.items()),
        ),
        Same(f"{prefix}.q_norm.weight", (dim,)),
        Same(f"{prefix}.k_norm.weight", (dim,)),
        Same(f"{prefix}.o_proj.weight", (hidden, queries)),
    ]


def delta_rows(config: HybridConfig) -> dict[str, int]:
    """Rows of a gated delta rule layer's projection, in the module's order."""
    heads = config.linear_num_value_heads
    values = heads * config.linear_value_head_dim
    channels = 2 * config.linear_num_key_heads * config.linear_key_head_dim + values
    return {"qkv": channels, "z": values, "b": heads, "a": heads}


def delta_projections(prefix: str, config: HybridConfig) -> list[Rule]:
    """`in_proj` is the rows [q | k | v | z | b | a]."""
    return [
        Concat(
            f"{prefix}.in_proj.weight",
            tuple(
                Source(f"{prefix}.in_proj_{part}.weight", (rows, config.hidden_size))
                for part, rows in delta_rows(config).items()
            ),
        )
    ]


def delta_rules(prefix: str, config: HybridConfig) -> list[Rule]:
    """What a gated delta rule layer has beside its projection; three small ones are float32."""
    hidden, heads = config.hidden_size, config.linear_num_value_heads
    rows = delta_rows(config)
    return [
        Same(f"{prefix}.conv1d.weight", (rows["qkv"], 1, config.linear_conv_kernel_dim)),
        *(Widened(f"{prefix}.gates.{n}", (heads,), f"{prefix}.{n}") for n in ("A_log", "dt_bias")),
        Widened(f"{prefix}.norm.weight", (config.linear_value_head_dim,)),
        Same(f"{prefix}.out_proj.weight", (hidden, rows["z"])),
    ]


def mtp_sources(config: HybridConfig) -> dict[str, Source]:
    """HF tensors below `mtp.`, with fused experts: gated attention layers after one projection."""
    if not config.mtp_num_hidden_layers:
        return {}
    hidden = config.hidden_size
    norms = ("pre_fc_norm_embedding", "pre_fc_norm_hidden", "norm")
    rules: list[Rule] = [Same("mtp.fc.weight", (hidden, 2 * hidden))]
    rules += [Same(f"mtp.{norm}.weight", (hidden,)) for norm in norms]
    for index in range(config.mtp_num_hidden_layers):
        rules += _mtp_layer_rules(f"mtp.layers.{index}", config)
    return hf_sources(rules, "mtp", fused=True)


def carried_mtp_rules(config: HybridConfig) -> tuple[Rule, ...]:
    """The MTP layers, which are only carried; a file has their experts apart or fused."""
    experts = {
        rule.name: Either(
            CarriedStack(rule.name, rule.apart.slices),
            CarriedFused(rule.name, rule.fused.shape, layout_known=rule.fused.layout_known),
        )
        for index in range(config.mtp_num_hidden_layers)
        for rule in _mtp_layer_rules(f"mtp.layers.{index}", config)
        if isinstance(rule, Either)
    }
    return tuple(experts.get(rule.name, rule) for rule in carried_rules("mtp", mtp_sources(config)))


def _mtp_layer_rules(prefix: str, config: HybridConfig) -> list[Rule]:
    def attention(layer: str, _: int) -> list[Rule]:
        return gated_attention_rules(f"{layer}.self_attn", config)

    return layer_rules(prefix, config, config.num_hidden_layers, attention)
