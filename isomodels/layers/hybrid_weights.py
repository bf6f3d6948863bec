"""Conversion rules of the hybrids, for the tables of the architectures."""

from collections.abc import Callable

from isomodels.layers.hybrid_config import HybridConfig
from isomodels.layers.weights import mlp_rules
from isomodels.weights_conv.rules import CarriedSame, Concat, Rule, Same, Source, Tied, Widened

# name of a layer's feed-forward in the module, the layer's index -> its rules
FeedForward = Callable[[str, int], list[Rule]]
DeltaRules = Callable[[str, HybridConfig], list[Rule]]


def hybrid_rules(
    config: HybridConfig,
    *,
    delta: DeltaRules | None = None,
    feed_forward: FeedForward | None = None,
) -> tuple[Rule, ...]:
    """The table of a hybrid decoder with its embedding and its head.

    Args:
        config: the architecture's.
        delta: the projections of a gated delta rule layer, where HF has them in another layout.
        feed_forward: the rules of a layer's feed-forward, where it is not dense.
    """
    table, hidden = (config.vocab_size, config.hidden_size), (config.hidden_size,)
    rules: list[Rule] = [Same("model.embed_tokens.weight", table)]
    for index, kind in enumerate(config.layer_types):
        layer = f"model.layers.{index}"
        rules.append(Same(f"{layer}.input_layernorm.weight", hidden))
        if kind == "full_attention":
            rules += gated_attention_rules(f"{layer}.self_attn", config)
        else:
            rules += (delta or delta_projections)(f"{layer}.linear_attn", config)
            rules += delta_rules(f"{layer}.linear_attn", config)
        rules.append(Same(f"{layer}.post_attention_layernorm.weight", hidden))
        if feed_forward is None:
            rules += mlp_rules(f"{layer}.mlp", config.hidden_size, config.intermediate_size)
        else:
            rules += feed_forward(f"{layer}.mlp", index)
    rules.append(Same("model.norm.weight", hidden))
    if config.tie_word_embeddings:
        rules.append(Tied("lm_head.weight", table, to="model.embed_tokens.weight"))
    else:
        rules.append(Same("lm_head.weight", table))
    return tuple(rules)


def gated_attention_rules(prefix: str, config: HybridConfig) -> list[Rule]:
    """`qkv_proj` is the rows [q and gate of each head | k | v]."""
    shapes = gated_attention_shapes(config)
    parts = ("q_proj.weight", "k_proj.weight", "v_proj.weight")
    return [
        Concat(
            f"{prefix}.qkv_proj.weight",
            tuple(Source(f"{prefix}.{name}", shapes[name]) for name in parts),
        ),
        *(Same(f"{prefix}.{n}", shape) for n, shape in shapes.items() if n not in parts),
    ]


def gated_attention_shapes(config: HybridConfig) -> dict[str, tuple[int, ...]]:
    """HF names below an attention and their shapes."""
    hidden, dim = config.hidden_size, config.head_dim
    queries, keys = config.num_attention_heads * dim, config.num_key_value_heads * dim
    return {
        "q_proj.weight": (2 * queries, hidden),
        "k_proj.weight": (keys, hidden),
        "v_proj.weight": (keys, hidden),
        "q_norm.weight": (dim,),
        "k_norm.weight": (dim,),
        "o_proj.weight": (hidden, queries),
    }


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


def mtp_shapes(
    config: HybridConfig, feed_forward: dict[str, tuple[int, ...]] | None = None
) -> dict[str, tuple[int, ...]]:
    """HF names below `mtp.` and their shapes: gated attention layers after one projection.

    `feed_forward`: those below a layer's `mlp.`, where it is not dense.
    """
    if not config.mtp_num_hidden_layers:
        return {}
    hidden, inner = config.hidden_size, config.intermediate_size
    dense = {
        "gate_proj.weight": (inner, hidden),
        "up_proj.weight": (inner, hidden),
        "down_proj.weight": (hidden, inner),
    }
    layer = {f"self_attn.{name}": shape for name, shape in gated_attention_shapes(config).items()}
    layer |= {f"mlp.{name}": shape for name, shape in (feed_forward or dense).items()}
    layer |= {f"{n}_layernorm.weight": (hidden,) for n in ("input", "post_attention")}
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


def carried_rules(
    prefix: str, shapes: dict[str, tuple[int, ...]], hf_prefix: str | None = None
) -> tuple[Rule, ...]:
    """Tensors below `prefix` that are only kept for the next save."""
    theirs = hf_prefix or prefix
    return tuple(CarriedSame(f"{prefix}.{n}", s, f"{theirs}.{n}") for n, s in shapes.items())
