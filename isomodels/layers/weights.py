"""Conversion rules of the shared bricks, for the tables of the architectures."""

from isomodels.config import DenseConfig, MoEConfig
from isomodels.weights_conv.rules import (
    Concat,
    Either,
    Fused,
    Rule,
    Same,
    Source,
    Stack,
    Tied,
)


def decoder_rules(config: DenseConfig, *, qkv_bias: bool, qk_norm: bool) -> tuple[Rule, ...]:
    """The table of a decoder with its embedding and its head; its layers dense or with experts."""
    table = (config.vocab_size, config.hidden_size)
    hidden = (config.hidden_size,)
    rules: list[Rule] = [Same("model.embed_tokens.weight", table)]
    for index in range(config.num_hidden_layers):
        layer = f"model.layers.{index}"
        rules.append(Same(f"{layer}.input_layernorm.weight", hidden))
        rules += attention_rules(f"{layer}.self_attn", config, bias=qkv_bias, qk_norm=qk_norm)
        rules.append(Same(f"{layer}.post_attention_layernorm.weight", hidden))
        if isinstance(config, MoEConfig) and config.is_sparse(index):
            rules += moe_rules(f"{layer}.mlp", config)
        else:
            rules += mlp_rules(f"{layer}.mlp", config.hidden_size, config.intermediate_size)
    rules.append(Same("model.norm.weight", hidden))
    if config.tie_word_embeddings:
        rules.append(Tied("lm_head.weight", table, to="model.embed_tokens.weight"))
    else:
        rules.append(Same("lm_head.weight", table))
    return tuple(rules)


def attention_rules(prefix: str, config: DenseConfig, *, bias: bool, qk_norm: bool) -> list[Rule]:
    """Grouped-query attention: `qkv_proj` is the rows [q | k | v]."""
    queries = config.num_attention_heads * config.head_dim
    keys = config.num_key_value_heads * config.head_dim
    rows = {"q_proj": queries, "k_proj": keys, "v_proj": keys}
    rules: list[Rule] = [
        Concat(
            f"{prefix}.qkv_proj.weight",
            tuple(Source(f"{prefix}.{p}.weight", (n, config.hidden_size)) for p, n in rows.items()),
        )
    ]
    if bias:
        parts = tuple(Source(f"{prefix}.{p}.bias", (n,)) for p, n in rows.items())
        rules.append(Concat(f"{prefix}.qkv_proj.bias", parts))
    if qk_norm:
        rules += [
            Same(f"{prefix}.{norm}.weight", (config.head_dim,)) for norm in ("q_norm", "k_norm")
        ]
    rules.append(Same(f"{prefix}.o_proj.weight", (config.hidden_size, queries)))
    return rules


def mlp_rules(prefix: str, hidden_size: int, intermediate_size: int) -> list[Rule]:
    """SwiGLU: `gate_up_proj` is the rows [gate | up]."""
    wide = (intermediate_size, hidden_size)
    return [
        Concat(
            f"{prefix}.gate_up_proj.weight",
            (Source(f"{prefix}.gate_proj.weight", wide), Source(f"{prefix}.up_proj.weight", wide)),
        ),
        Same(f"{prefix}.down_proj.weight", (hidden_size, intermediate_size)),
    ]


def moe_rules(prefix: str, config: MoEConfig) -> list[Rule]:
    """Router and experts: `gate_up_proj` is [E, 2I, H], `down_proj` [E, H, I]."""
    hidden, width, experts = config.hidden_size, config.moe_intermediate_size, config.num_experts
    names = [f"{prefix}.experts.{expert}" for expert in range(experts)]
    wide, narrow = (width, hidden), (hidden, width)
    gate_up = [
        (Source(f"{n}.gate_proj.weight", wide), Source(f"{n}.up_proj.weight", wide)) for n in names
    ]
    down = [(Source(f"{n}.down_proj.weight", narrow),) for n in names]
    known = config.fused_layout_known
    rules: list[Rule] = [Same(f"{prefix}.gate.weight", (experts, hidden))]
    for name, slices in (("gate_up_proj", gate_up), ("down_proj", down)):
        apart = Stack(f"{prefix}.experts.{name}", tuple(slices))
        rules.append(Either(apart, Fused(apart.name, apart.shape, layout_known=known)))
    return rules
