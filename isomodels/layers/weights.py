"""Conversion rules of the shared bricks, for the tables of the architectures."""

from collections.abc import Callable, Mapping, Sequence

import torch

from isomodels.config import DenseConfig, MoEConfig
from isomodels.weights_conv.rules import (
    CarriedSame,
    Concat,
    Either,
    Fused,
    Rule,
    Same,
    Source,
    Stack,
    Tied,
)

AttentionRules = Callable[[str, int], list[Rule]]  # name of a layer, its index -> its attention's


def causal_lm_rules(config: DenseConfig, attention: AttentionRules) -> tuple[Rule, ...]:
    """The table of a `CausalLM`: embedding, layers, final norm, head."""
    table = (config.vocab_size, config.hidden_size)
    rules: list[Rule] = [Same("model.embed_tokens.weight", table)]
    for index in range(config.num_hidden_layers):
        rules += layer_rules(f"model.layers.{index}", config, index, attention)
    rules.append(Same("model.norm.weight", (config.hidden_size,)))
    if config.tie_word_embeddings:
        rules.append(Tied("lm_head.weight", table, to="model.embed_tokens.weight"))
    else:
        rules.append(Same("lm_head.weight", table))
    return tuple(rules)


def layer_rules(
    prefix: str, config: DenseConfig, index: int, attention: AttentionRules
) -> list[Rule]:
    """A `DecoderLayer`; the config says whether that of this index has experts."""
    mlp = f"{prefix}.mlp"
    if isinstance(config, MoEConfig) and config.is_sparse(index):
        feed_forward = moe_rules(mlp, config)
    else:
        feed_forward = mlp_rules(mlp, config.hidden_size, config.intermediate_size)
    return [
        Same(f"{prefix}.input_layernorm.weight", (config.hidden_size,)),
        *attention(prefix, index),
        Same(f"{prefix}.post_attention_layernorm.weight", (config.hidden_size,)),
        *feed_forward,
    ]


def decoder_rules(config: DenseConfig, *, qkv_bias: bool, qk_norm: bool) -> tuple[Rule, ...]:
    """The table of a decoder of grouped-query attention."""

    def attention(layer: str, _: int) -> list[Rule]:
        return attention_rules(f"{layer}.self_attn", config, qkv_bias=qkv_bias, qk_norm=qk_norm)

    return causal_lm_rules(config, attention)


def attention_rules(
    prefix: str, config: DenseConfig, *, qkv_bias: bool, qk_norm: bool
) -> list[Rule]:
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
    if qkv_bias:
        parts = tuple(Source(f"{prefix}.{p}.bias", (n,)) for p, n in rows.items())
        rules.append(Concat(f"{prefix}.qkv_proj.bias", parts))
    if qk_norm:
        rules += [
            Same(f"{prefix}.{norm}.weight", (config.head_dim,)) for norm in ("q_norm", "k_norm")
        ]
    rules.append(Same(f"{prefix}.o_proj.weight", (config.hidden_size, queries)))
    return rules


def mlp_rules(
    prefix: str, hidden_size: int, intermediate_size: int, hf_prefix: str | None = None
) -> list[Rule]:
    """SwiGLU: `gate_up_proj` is the rows [gate | up]."""
    hf, wide = hf_prefix or prefix, (intermediate_size, hidden_size)
    return [
        Concat(
            f"{prefix}.gate_up_proj.weight",
            (Source(f"{hf}.gate_proj.weight", wide), Source(f"{hf}.up_proj.weight", wide)),
        ),
        Same(
            f"{prefix}.down_proj.weight",
            (hidden_size, intermediate_size),
            f"{hf}.down_proj.weight",
        ),
    ]


def moe_rules(prefix: str, config: MoEConfig) -> list[Rule]:
    """An `MoE`: router, experts, and the shared experts that the config states."""
    hidden, experts = config.hidden_size, config.num_experts
    rules: list[Rule] = [Same(f"{prefix}.gate.weight", (experts, hidden))]
    rules += expert_rules(prefix, config)
    if config.routing is not None and config.routing.correction_bias:
        bias = f"{prefix}.gate.e_score_correction_bias"
        rules.append(Same(bias, (experts,), dtype=torch.float32))
    if config.shared_experts_size is not None:
        shared = f"{prefix}.shared_experts"
        # one that has a gate is a single expert in HF names
        hf = f"{prefix}.shared_expert" if config.shared_experts_gated else shared
        rules += mlp_rules(shared, hidden, config.shared_experts_size, hf)
    if config.shared_experts_gated:
        rules.append(Same(f"{prefix}.shared_expert_gate.weight", (1, hidden)))
    return rules


def expert_rules(prefix: str, config: MoEConfig) -> list[Rule]:
    """Experts: `gate_up_proj` is [E, 2I, H], `down_proj` [E, H, I]."""
    hidden, width = config.hidden_size, config.moe_intermediate_size
    names = [f"{prefix}.experts.{expert}" for expert in range(config.num_experts)]
    wide, narrow = (width, hidden), (hidden, width)
    gate_up = [
        (Source(f"{n}.gate_proj.weight", wide), Source(f"{n}.up_proj.weight", wide)) for n in names
    ]
    down = [(Source(f"{n}.down_proj.weight", narrow),) for n in names]
    known = config.fused_layout_known
    rules: list[Rule] = []
    for name, slices in (("gate_up_proj", gate_up), ("down_proj", down)):
        apart = Stack(f"{prefix}.experts.{name}", tuple(slices))
        rules.append(Either(apart, Fused(apart.name, apart.shape, layout_known=known)))
    return rules


def hf_sources(rules: Sequence[Rule], prefix: str, *, fused: bool = False) -> dict[str, Source]:
    """HF tensors of some rules by their names below `prefix`; experts apart, or `fused`."""
    chosen = (
        (rule.fused if fused else rule.apart) if isinstance(rule, Either) else rule
        for rule in rules
    )
    sources = (source for rule in chosen for source in rule.sources)
    return {source.name.removeprefix(f"{prefix}."): source for source in sources}


def carried_rules(
    prefix: str, sources: Mapping[str, Source], hf_prefix: str | None = None
) -> tuple[Rule, ...]:
    """Tensors that are only kept for the next save.

    Args:
        prefix: of their names in the module.
        sources: by their names below it.
        hf_prefix: of their names in HF files, where it is another.
    """
    hf = hf_prefix or prefix
    return tuple(
        CarriedSame(f"{prefix}.{name}", source.shape, f"{hf}.{name}", source.dtype)
        for name, source in sources.items()
    )
