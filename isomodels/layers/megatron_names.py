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
Layer = Callable[[str, str, int], list[Resolved]]  # names of Megatron and of HF, index -> rules


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


def decoder_layer(config: Any, *, bias: bool = False, qk_norm: bool = True) -> Layer:
    """Layers of grouped-query attention, dense or with experts."""

    def layer(ours: str, theirs: str, index: int) -> list[Resolved]:
        rules = attention_rules(ours, theirs, config, bias=bias, qk_norm=qk_norm)
        sparse = index < config.num_hidden_layers and config.is_sparse(index)
        return rules + (moe_rules if sparse else mlp_rules)(ours, theirs, config)

    return layer


def latent_layer(config: Any) -> Layer:
    """Layers of latent attention; those after the last are MTP's, with experts."""

    def layer(ours: str, theirs: str, index: int) -> list[Resolved]:
        rules = latent_attention_rules(ours, theirs, config)
        if index < config.num_hidden_layers and not config.is_sparse(index):
            return rules + mlp_rules(ours, theirs, config)
        return rules + moe_rules(ours, theirs, config, shared="shared_experts", bias=True)

    return layer


def hybrid_layer(config: HybridConfig, *, by_head: bool = False) -> Layer:
    """Layers of gated attention and of the gated delta rule; MTP's have gated attention."""

    def layer(ours: str, theirs: str, index: int) -> list[Resolved]:
        kinds = config.layer_types or []
        if index < len(kinds) and kinds[index] != "full_attention":
            rules = delta_rules(ours, theirs, config, by_head=by_head)
        else:
            rules = attention_rules(ours, theirs, config)
        if config.routing is None:
            return rules + mlp_rules(ours, theirs, config)
        return rules + moe_rules(ours, theirs, config, shared="shared_expert")

    return layer


def latent_table(config: Any) -> ForeignTable:
    """A decoder of latent attention and its MTP layers, which HF gives copies of the tables."""
    layer, table = latent_layer(config), (config.vocab_size, config.hidden_size)
    mtp: list[Resolved] = []
    for index in range(config.num_nextn_predict_layers):
        theirs = f"model.layers.{config.num_hidden_layers + index}"
        mtp += mtp_rules(index, theirs, config, layer)
        mtp.append(
            Cropped("embedding.word_embeddings.weight", table, f"{theirs}.embed_tokens.weight")
        )
        mtp.append(Cropped("output_layer.weight", table, f"{theirs}.shared_head.head.weight"))
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
    ours: str, theirs: str, config: Any, *, bias: bool = False, qk_norm: bool = True
) -> list[Resolved]:
    """Grouped-query attention behind its norm; a gated one has a gate a head beside the query.

    Rows of `linear_qkv` are, for each key head, [queries | their gates | key | value].
    """
    ours, their_norm = f"{ours}.self_attention", f"{theirs}.input_layernorm.weight"
    theirs = f"{theirs}.self_attn"
    hidden, dim, groups = config.hidden_size, config.head_dim, config.num_key_value_heads
    each = config.num_attention_heads // groups
    gated = isinstance(config, HybridConfig)
    queries = (each * dim,) * (2 if gated else 1)
    sizes, heads = (queries, (dim,), (dim,)), (each if gated else 0, 0, 0)
    rows = {f"{n}_proj": groups * sum(size) for n, size in zip("qkv", sizes, strict=True)}

    def joined(kind: str, *width: int) -> Resolved:
        parts = tuple(Source(f"{theirs}.{n}.{kind}", (count, *width)) for n, count in rows.items())
        name = f"{ours}.linear_qkv.{kind}"
        return Grouped(name, parts, groups=groups, sizes=sizes, heads=heads)

    rules: list[Resolved] = [
        Same(f"{ours}.linear_qkv.layer_norm_weight", (hidden,), their_norm),
        joined("weight", hidden),
    ]
    if bias:
        rules.append(joined("bias"))
    if qk_norm:
        rules += [
            Same(f"{ours}.{n}_layernorm.weight", (dim,), f"{theirs}.{n}_norm.weight") for n in "qk"
        ]
    width = config.num_attention_heads * dim
    rules.append(Same(f"{ours}.linear_proj.weight", (hidden, width), f"{theirs}.o_proj.weight"))
    return rules


def latent_attention_rules(ours: str, theirs: str, config: Any) -> list[Resolved]:
    """Latent attention (MLA) behind its norm."""
    rules: list[Resolved] = [_norm(f"{ours}.input_layernorm", f"{theirs}.input_layernorm", config)]
    ours, theirs = f"{ours}.self_attention", f"{theirs}.self_attn"
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
        Same(f"{ours}.{name}", shape, f"{theirs}.{hf}") for name, (hf, shape) in shapes.items()
    ]


def delta_rules(ours: str, theirs: str, config: HybridConfig, *, by_head: bool) -> list[Resolved]:
    """A gated delta rule layer behind its norm.

    A rank has its share of [q | k | v | z | b | a] in one projection and of [q | k | v] in one
    convolution. The gated norm is stored around zero, as all norms of such a model are.

    Args:
        ours, theirs: names of the layer.
        config: the architecture's.
        by_head: HF has the projection's rows key head by key head, in two tensors.
    """
    their_norm = f"{theirs}.input_layernorm.weight"
    ours, theirs = f"{ours}.self_attention", f"{theirs}.linear_attn"
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
        Same(f"{ours}.in_proj.layer_norm_weight", (hidden,), their_norm),
        Ranked(
            f"{ours}.in_proj.weight",
            tuple(
                Source(f"{theirs}.in_proj_{n}.weight", (sum(size), hidden))
                for n, size in own.items()
            ),
            sizes=tuple(own.values()),
            heads=(groups,) * len(own),
            pieces=pieces,
        ),
        Ranked(
            f"{ours}.conv1d.weight",
            (Source(f"{theirs}.conv1d.weight", convolution),),
            sizes=((keys, keys, values),),
            heads=(0,),
            pieces=pieces[:3],
        ),
        *(Same(f"{ours}.{n}", (heads,), f"{theirs}.{n}") for n in ("A_log", "dt_bias")),
        Shifted(
            f"{ours}.out_norm.weight", (config.linear_value_head_dim,), f"{theirs}.norm.weight"
        ),
        Same(f"{ours}.out_proj.weight", (hidden, values), f"{theirs}.out_proj.weight"),
    ]


def mlp_rules(ours: str, theirs: str, config: Any) -> list[Resolved]:
    """A dense feed-forward behind its norm."""
    norm, hf = f"{ours}.mlp.linear_fc1.layer_norm_weight", f"{theirs}.post_attention_layernorm"
    return [
        Same(norm, (config.hidden_size,), f"{hf}.weight"),
        *_swiglu(f"{ours}.mlp", f"{theirs}.mlp", config.hidden_size, config.intermediate_size),
    ]


def moe_rules(
    ours: str, theirs: str, config: Any, *, shared: str | None = None, bias: bool = False
) -> list[Resolved]:
    """Router and experts behind their norm.

    Args:
        ours, theirs: names of the layer.
        config: the architecture's.
        shared: HF's name of the shared experts, where there are any; one of "shared_expert" has a
            gate.
        bias: the router has a correction bias.
    """
    norm = _norm(f"{ours}.pre_mlp_layernorm", f"{theirs}.post_attention_layernorm", config)
    ours, theirs = f"{ours}.mlp", f"{theirs}.mlp"
    hidden, count = config.hidden_size, config.num_experts
    rules = [norm, Same(f"{ours}.router.weight", (count, hidden), f"{theirs}.gate.weight")]
    if bias:
        hf = f"{theirs}.gate.e_score_correction_bias"
        rules.append(Same(f"{ours}.router.expert_bias", (count,), hf, torch.float32))
    experts: list[Resolved] = []
    for index in range(count):
        own, hf = f"{ours}.experts.experts.{index}", f"{theirs}.experts.{index}"
        experts += _swiglu(own, hf, hidden, config.moe_intermediate_size)
    rules += experts[::2] + experts[1::2]  # one tensor of all experts is read in its order
    if shared is not None:
        own, hf = f"{ours}.shared_experts", f"{theirs}.{shared}"
        rules += _swiglu(own, hf, hidden, config.shared_experts_size)
        if shared == "shared_expert":
            rules.append(Same(f"{own}.gate_weight", (1, hidden), f"{hf}_gate.weight"))
    return rules


def _swiglu(ours: str, theirs: str, hidden: int, width: int) -> list[Resolved]:
    halves = tuple(Source(f"{theirs}.{n}_proj.weight", (width, hidden)) for n in ("gate", "up"))
    return [
        Concat(f"{ours}.linear_fc1.weight", halves),
        Same(f"{ours}.linear_fc2.weight", (hidden, width), f"{theirs}.down_proj.weight"),
    ]


def mtp_rules(
    index: int,
    theirs: str,
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
        theirs: HF's name of it.
        config: the architecture's.
        layer: the rules of its decoder layer.
        enorm, hnorm, eh_proj, final_layernorm: HF's names below `theirs`.
        at: where below `theirs` HF has the decoder layer.
        swapped: HF projects [hidden | embedding] and not [embedding | hidden].
    """
    ours, hidden = f"mtp.layers.{index}", config.hidden_size
    norms = {"enorm": enorm, "hnorm": hnorm, "final_layernorm": final_layernorm}
    project = Swapped if swapped else Same
    return [
        *(
            Same(f"{ours}.{n}.weight", (hidden,), f"{theirs}.{hf}.weight")
            for n, hf in norms.items()
        ),
        project(f"{ours}.eh_proj.weight", (hidden, 2 * hidden), f"{theirs}.{eh_proj}.weight"),
        *layer(f"{ours}.transformer_layer", theirs + at, config.num_hidden_layers + index),
    ]


def _norm(ours: str, theirs: str, config: Any) -> Resolved:
    return Same(f"{ours}.weight", (config.hidden_size,), f"{theirs}.weight")
