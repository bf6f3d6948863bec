"""Conversion rules of the hybrids, for the tables of the architectures."""

from collections.abc import Callable

from isomodels.layers.hybrid_config import HybridConfig
from isomodels.layers.weights import mlp_rules
from isomodels.weights_conv.rules import Carried, Concat, Rule, Same, Source, Tied, Widened

# name of a layer's feed-forward in the module, the layer's index -> its rules
FeedForward = Callable[[str, int], list[Rule]]


def hybrid_rules(
    config: HybridConfig, *, hf_prefix: str = "model", feed_forward: FeedForward | None = None
) -> tuple[Rule, ...]:
    """The table of a hybrid decoder with its embedding and its head.

    `hf_prefix` is what HF files have for "model". Names of the feed-forward are the module's.
    """
    table, hidden = (config.vocab_size, config.hidden_size), (config.hidden_size,)
    rules: list[Rule] = [Same("model.embed_tokens.weight", table)]
    for index, kind in enumerate(config.layer_types):
        layer = f"model.layers.{index}"
        rules.append(Same(f"{layer}.input_layernorm.weight", hidden))
        if kind == "full_attention":
            rules += gated_attention_rules(f"{layer}.self_attn", config)
        else:
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


def delta_rules(prefix: str, config: HybridConfig) -> list[Rule]:
    """`in_proj` is the rows [q | k | v | z | b | a]; three small tensors are float32."""
    hidden, heads = config.hidden_size, config.linear_num_value_heads
    values = heads * config.linear_value_head_dim
    channels = 2 * config.linear_num_key_heads * config.linear_key_head_dim + values
    rows = {"qkv": channels, "z": values, "b": heads, "a": heads}
    return [
        Concat(
            f"{prefix}.in_proj.weight",
            tuple(Source(f"{prefix}.in_proj_{p}.weight", (n, hidden)) for p, n in rows.items()),
        ),
        Same(f"{prefix}.conv1d.weight", (channels, 1, config.linear_conv_kernel_dim)),
        *(Widened(f"{prefix}.gates.{n}", (heads,), f"{prefix}.{n}") for n in ("A_log", "dt_bias")),
        Widened(f"{prefix}.norm.weight", (config.linear_value_head_dim,)),
        Same(f"{prefix}.out_proj.weight", (hidden, values)),
    ]


def carried_rules(shapes: dict[str, tuple[int, ...]]) -> tuple[Rule, ...]:
    """Tensors that are only kept for the next save, under their HF names."""
    return tuple(Carried(name, shape) for name, shape in shapes.items())
