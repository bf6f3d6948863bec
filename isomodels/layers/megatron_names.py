"""Megatron's own names and layouts, as Megatron-Bridge and Megatron-LM save a `GPTModel`.

Tables for the architectures, in the same rules as their own ones: here the module is Megatron's.
A number in a name may also be an index into a tensor of all layers or all experts, which is how
`dist_checkpointing` stacks them (`weights_conv.dist_read.ModuleTensors`).

Source: megatron-core's `sharded_state_dict` methods, and Megatron-Bridge's parameter mappings.
"""

from collections.abc import Callable, Sequence
from typing import Any

import torch

from isomodels.layers.hybrid_config import HybridConfig
from isomodels.weights_conv.rules import (
    Concat,
    Cropped,
    ForeignTable,
    Grouped,
    Ranked,
    Resolved,
    Same,
    Shifted,
    Source,
    Swapped,
)

# Other names of the same tensors: of layers built without Transformer Engine, of parameters as
# Megatron-Bridge calls them, of newer versions.
ALIASES = (
    (r"\.self_attention\.(linear_qkv|in_proj)\.layer_norm_weight$", ".input_layernorm.weight"),
    (r"\.input_layernorm\.weight$", ".self_attention.linear_qkv.layer_norm_weight"),
    (r"\.mlp\.linear_fc1\.layer_norm_weight$", ".pre_mlp_layernorm.weight"),
    (r"\.pre_mlp_layernorm\.weight$", ".mlp.linear_fc1.layer_norm_weight"),
    (r"\.linear_(q|kv)_up_proj\.layer_norm_weight$", r".\1_layernorm.weight"),
    (r"\.experts\.experts\.(\d+)\.(\w+)\.weight$", r".experts.\2.weight\1"),
    (r"\.experts\.experts\.(\d+)\.(\w+)\.weight$", r".experts.local_experts.\1.\2.weight"),
    (r"(mtp\.layers\.\d+)\.transformer_layer\.", r"\1.mtp_model_layer."),
)
# name of a layer in Megatron, in HF, its index -> rules
Layer = Callable[[str, str, int], list[Resolved]]


def megatron_table(config: Any, layer: Layer, mtp: Sequence[Resolved] = ()) -> ForeignTable:
    """The table of a model: embedding, layers, final norm and head; the vocabulary may be padded.

    Args:
        config: the architecture's.
        layer: the rules of one layer.
        mtp: those of the multi-token-prediction layers.
    """
    table = (config.vocab_size, config.hidden_size)
    rules: list[Resolved] = [
        Cropped("embedding.word_embeddings.weight", table, "model.embed_tokens.weight"),
        Same("decoder.final_layernorm.weight", (config.hidden_size,), "model.norm.weight"),
    ]
    if not config.tie_word_embeddings:
        rules.append(Cropped("output_layer.weight", table, "lm_head.weight"))
    for index in range(config.num_hidden_layers):
        rules += layer(f"decoder.layers.{index}", f"model.layers.{index}", index)
    return ForeignTable((*rules, *mtp), ALIASES)


def decoder_layer(config: Any, *, qkv_bias: bool = False, qk_norm: bool = True) -> Layer:
    """Layers of grouped-query attention, dense or with experts."""

    def layer(mcore: str, hf: str, index: int) -> list[Resolved]:
        rules = attention_rules(mcore, hf, config, qkv_bias=qkv_bias, qk_norm=qk_norm)
        return rules + feed_forward_rules(mcore, hf, config, index)

    return layer


def latent_layer(config: Any) -> Layer:
    """Layers of latent attention; those after the last are MTP's, with experts."""

    def layer(mcore: str, hf: str, index: int) -> list[Resolved]:
        rules = latent_attention_rules(mcore, hf, config)
        return rules + feed_forward_rules(mcore, hf, config, index)

    return layer


def hybrid_layer(config: HybridConfig, *, by_head: bool = False) -> Layer:
    """Layers of gated attention and of the gated delta rule; MTP's have gated attention."""

    def layer(mcore: str, hf: str, index: int) -> list[Resolved]:
        kinds = config.layer_types or []
        if index < len(kinds) and kinds[index] != "full_attention":
            rules = delta_rules(mcore, hf, config, by_head=by_head)
        else:
            rules = attention_rules(mcore, hf, config)
        return rules + feed_forward_rules(mcore, hf, config, index)

    return layer


def latent_table(config: Any) -> ForeignTable:
    """A decoder of latent attention and its MTP layers, which HF gives copies of the tables."""
    layer, table = latent_layer(config), (config.vocab_size, config.hidden_size)
    mtp: list[Resolved] = []
    for index in range(config.num_nextn_predict_layers):
        hf = f"model.layers.{config.num_hidden_layers + index}"
        mtp += mtp_rules(index, hf, config, layer)
        mtp.append(Cropped("embedding.word_embeddings.weight", table, f"{hf}.embed_tokens.weight"))
        mtp.append(Cropped("output_layer.weight", table, f"{hf}.shared_head.head.weight"))
    return megatron_table(config, layer, mtp)


def hybrid_table(config: HybridConfig, *, by_head: bool = False) -> ForeignTable:
    """A hybrid decoder and its MTP layer; `by_head` as of `delta_rules`."""
    layer = hybrid_layer(config, by_head=by_head)
    mtp: list[Resolved] = []
    if config.mtp_num_hidden_layers:
        mtp = mtp_rules(
            0,
            "mtp",
            config,
            layer,
            enorm="pre_fc_norm_embedding",
            hnorm="pre_fc_norm_hidden",
            eh_proj="fc",
            final_layernorm="norm",
            at=".layers.0",
        )
    return megatron_table(config, layer, mtp)


def attention_rules(
    mcore: str, hf: str, config: Any, *, qkv_bias: bool = False, qk_norm: bool = True
) -> list[Resolved]:
    """Grouped-query attention behind its norm; a gated one has a gate a head beside the query.

    Rows of `linear_qkv` are, for each key head, [queries | their gates | key | value].
    """
    mcore, hf_norm = f"{mcore}.self_attention", f"{hf}.input_layernorm.weight"
    hf = f"{hf}.self_attn"
    hidden, dim, groups = config.hidden_size, config.head_dim, config.num_key_value_heads
    each = config.num_attention_heads // groups
    gated = isinstance(config, HybridConfig)
    queries = (each * dim,) * (2 if gated else 1)
    sizes, heads = (queries, (dim,), (dim,)), (each if gated else 0, 0, 0)
    rows = {f"{n}_proj": groups * sum(size) for n, size in zip("qkv", sizes, strict=True)}

    def joined(kind: str, *width: int) -> Resolved:
        parts = tuple(Source(f"{hf}.{n}.{kind}", (count, *width)) for n, count in rows.items())
        name = f"{mcore}.linear_qkv.{kind}"
        return Grouped(name, parts, groups=groups, sizes=sizes, heads=heads)

    rules: list[Resolved] = [
        Same(f"{mcore}.linear_qkv.layer_norm_weight", (hidden,), hf_norm),
        joined("weight", hidden),
    ]
    if qkv_bias:
        rules.append(joined("bias"))
    if qk_norm:
        rules += [
            Same(f"{mcore}.{n}_layernorm.weight", (dim,), f"{hf}.{n}_norm.weight") for n in "qk"
        ]
    width = config.num_attention_heads * dim
    rules.append(Same(f"{mcore}.linear_proj.weight", (hidden, width), f"{hf}.o_proj.weight"))
    return rules


def latent_attention_rules(mcore: str, hf: str, config: Any) -> list[Resolved]:
    """Latent attention (MLA) behind its norm."""
    rules: list[Resolved] = [_norm(f"{mcore}.input_layernorm", f"{hf}.input_layernorm", config)]
    mcore, hf = f"{mcore}.self_attention", f"{hf}.self_attn"
    hidden, rank, heads = config.hidden_size, config.q_lora_rank, config.num_attention_heads
    queries, values = heads * config.head_dim, heads * config.v_head_dim
    latent = config.kv_lora_rank
    expanded = heads * config.qk_nope_head_dim + values
    shapes: dict[str, tuple[str, tuple[int, ...]]] = {
        "linear_kv_down_proj.weight": ("kv_a_proj_with_mqa.weight", (config.latent_width, hidden)),
        "linear_kv_up_proj.layer_norm_weight": ("kv_a_layernorm.weight", (latent,)),
        "linear_kv_up_proj.weight": ("kv_b_proj.weight", (expanded, latent)),
        "linear_proj.weight": ("o_proj.weight", (hidden, values)),
    }
    if rank is None:
        shapes["linear_q_proj.weight"] = ("q_proj.weight", (queries, hidden))
    else:
        shapes["linear_q_down_proj.weight"] = ("q_a_proj.weight", (rank, hidden))
        shapes["linear_q_up_proj.layer_norm_weight"] = ("q_a_layernorm.weight", (rank,))
        shapes["linear_q_up_proj.weight"] = ("q_b_proj.weight", (queries, rank))
    return rules + [
        Same(f"{mcore}.{name}", shape, f"{hf}.{below}") for name, (below, shape) in shapes.items()
    ]


def delta_rules(mcore: str, hf: str, config: HybridConfig, *, by_head: bool) -> list[Resolved]:
    """A gated delta rule layer behind its norm.

    A rank has its share of [q | k | v | z | b | a] in one projection and of [q | k | v] in one
    convolution. The gated norm is stored around zero, as all norms of such a model are.

    Args:
        mcore, hf: names of the layer.
        config: the architecture's.
        by_head: HF has the projection's rows key head by key head, in two tensors.
    """
    hf_norm = f"{hf}.input_layernorm.weight"
    mcore, hf = f"{mcore}.self_attention", f"{hf}.linear_attn"
    hidden, heads = config.hidden_size, config.linear_num_value_heads
    keys = config.linear_num_key_heads * config.linear_key_head_dim
    values = heads * config.linear_value_head_dim
    own: dict[str, tuple[int, ...]] = {"qkv": (keys, keys, values)}
    own |= {"z": (values,), "b": (heads,), "a": (heads,)}
    if by_head:
        own = {"qkvz": (keys, keys, values, values), "ba": (heads, heads)}
    groups = config.linear_num_key_heads if by_head else 0
    convolution = (2 * keys + values, 1, config.linear_conv_kernel_dim)
    pieces = ("query", "key", "value", "z", "beta", "alpha")
    return [
        Same(f"{mcore}.in_proj.layer_norm_weight", (hidden,), hf_norm),
        Ranked(
            f"{mcore}.in_proj.weight",
            tuple(
                Source(f"{hf}.in_proj_{n}.weight", (sum(size), hidden)) for n, size in own.items()
            ),
            sizes=tuple(own.values()),
            heads=(groups,) * len(own),
            pieces=pieces,
        ),
        Ranked(
            f"{mcore}.conv1d.weight",
            (Source(f"{hf}.conv1d.weight", convolution),),
            sizes=((keys, keys, values),),
            heads=(0,),
            pieces=pieces[:3],
        ),
        *(Same(f"{mcore}.{n}", (heads,), f"{hf}.{n}") for n in ("A_log", "dt_bias")),
        Shifted(f"{mcore}.out_norm.weight", (config.linear_value_head_dim,), f"{hf}.norm.weight"),
        Same(f"{mcore}.out_proj.weight", (hidden, values), f"{hf}.out_proj.weight"),
    ]


def feed_forward_rules(mcore: str, hf: str, config: Any, index: int) -> list[Resolved]:
    """A layer's feed-forward behind its norm: of experts where the config says so."""
    return (moe_rules if config.is_sparse(index) else mlp_rules)(mcore, hf, config)


def mlp_rules(mcore: str, hf: str, config: Any) -> list[Resolved]:
    """A dense feed-forward behind its norm."""
    hf_norm = f"{hf}.post_attention_layernorm.weight"
    return [
        Same(f"{mcore}.mlp.linear_fc1.layer_norm_weight", (config.hidden_size,), hf_norm),
        *_swiglu(f"{mcore}.mlp", f"{hf}.mlp", config.hidden_size, config.intermediate_size),
    ]


def moe_rules(mcore: str, hf: str, config: Any) -> list[Resolved]:
    """Router, experts, and the shared experts that the config states, behind their norm."""
    norm = _norm(f"{mcore}.pre_mlp_layernorm", f"{hf}.post_attention_layernorm", config)
    mcore, hf = f"{mcore}.mlp", f"{hf}.mlp"
    hidden, count = config.hidden_size, config.num_experts
    rules = [norm, Same(f"{mcore}.router.weight", (count, hidden), f"{hf}.gate.weight")]
    if config.routing.correction_bias:
        hf_bias = f"{hf}.gate.e_score_correction_bias"
        rules.append(Same(f"{mcore}.router.expert_bias", (count,), hf_bias, torch.float32))
    experts: list[Resolved] = []
    for index in range(count):
        expert, hf_expert = f"{mcore}.experts.experts.{index}", f"{hf}.experts.{index}"
        experts += _swiglu(expert, hf_expert, hidden, config.moe_intermediate_size)
    rules += experts[::2] + experts[1::2]  # one tensor of all experts is read in its order
    if config.shared_experts_size is not None:
        shared = f"{mcore}.shared_experts"
        # one that has a gate is a single expert in HF names
        hf_shared = f"{hf}.shared_expert" + ("" if config.shared_experts_gated else "s")
        rules += _swiglu(shared, hf_shared, hidden, config.shared_experts_size)
        if config.shared_experts_gated:
            rules.append(Same(f"{shared}.gate_weight", (1, hidden), f"{hf_shared}_gate.weight"))
    return rules


def _swiglu(mcore: str, hf: str, hidden: int, width: int) -> list[Resolved]:
    halves = tuple(Source(f"{hf}.{n}_proj.weight", (width, hidden)) for n in ("gate", "up"))
    return [
        Concat(f"{mcore}.linear_fc1.weight", halves),
        Same(f"{mcore}.linear_fc2.weight", (hidden, width), f"{hf}.down_proj.weight"),
    ]


def mtp_rules(
    index: int,
    hf: str,
    config: Any,
    layer: Layer,
    *,
    enorm: str = "enorm",
    hnorm: str = "hnorm",
    eh_proj: str = "eh_proj",
    final_layernorm: str = "shared_head.norm",
    at: str = "",
    swapped: bool = False,
) -> list[Resolved]:
    """A multi-token-prediction layer: two norms, a projection, a decoder layer, a norm.

    Args:
        index: which.
        hf: HF's name of it.
        config: the architecture's.
        layer: the rules of its decoder layer.
        enorm, hnorm, eh_proj, final_layernorm: HF's names below `hf`.
        at: where below `hf` HF has the decoder layer.
        swapped: HF projects [hidden | embedding] and not [embedding | hidden].
    """
    mcore, hidden = f"mtp.layers.{index}", config.hidden_size
    norms = {"enorm": enorm, "hnorm": hnorm, "final_layernorm": final_layernorm}
    project = Swapped if swapped else Same
    return [
        *(
            Same(f"{mcore}.{n}.weight", (hidden,), f"{hf}.{below}.weight")
            for n, below in norms.items()
        ),
        project(f"{mcore}.eh_proj.weight", (hidden, 2 * hidden), f"{hf}.{eh_proj}.weight"),
        *layer(f"{mcore}.transformer_layer", hf + at, config.num_hidden_layers + index),
    ]


def _norm(mcore: str, hf: str, config: Any) -> Resolved:
    return Same(f"{mcore}.weight", (config.hidden_size,), f"{hf}.weight")
