"""Checkpoints as Megatron-Bridge's stock models save them, from what is known of those models.

Written from descriptions of Megatron's layouts, without the package's tables: each function takes
Hugging Face tensors and gives chunks as the ranks of a parallel layout would save them.
"""

from typing import Any

import torch
from torch import Tensor

from tests.weights.dcp import Chunks, rows, whole
from tests.weights.support import any_bits

Tensors = dict[str, Tensor]
Saved = dict[str, Chunks]


def stock_qwen3(hf: Tensors, raw: dict[str, Any], tp: int) -> Saved:
    """Dense layers, all alike: each parameter is one tensor [layers, ...], a layer a chunk."""
    saved = tables(hf, raw, tp)
    for index in range(raw["num_hidden_layers"]):
        theirs = f"model.layers.{index}"
        layer = attention(hf, f"{theirs}.", raw, tp) | dense(hf, f"{theirs}.", tp)
        for name, chunks in layer.items():
            stack(saved, f"decoder.layers.{name}", (index,), chunks)
    return saved


def stock_qwen3_moe(hf: Tensors, raw: dict[str, Any], tp: int) -> Saved:
    """Dense and sparse layers under their numbers; experts stacked [experts, ...]."""
    saved = tables(hf, raw, tp)
    for index in range(raw["num_hidden_layers"]):
        ours, theirs = f"decoder.layers.{index}.", f"model.layers.{index}."
        prefixed(saved, ours, attention(hf, theirs, raw, tp))
        if index in raw["mlp_only_layers"]:
            prefixed(saved, ours, dense(hf, theirs, tp))
        else:
            prefixed(saved, ours, experts(hf, theirs, raw["num_experts"], tp))
    return saved


def stock_mimo(hf: Tensors, raw: dict[str, Any], tp: int) -> Saved:
    """Biases, and MTP layers whose projection takes [embedding | hidden] instead."""
    saved = tables(hf, raw, tp)
    for index in range(raw["num_hidden_layers"]):
        theirs = f"model.layers.{index}."
        layer = attention(hf, theirs, raw, tp, norms=False) | dense(hf, theirs, tp)
        prefixed(saved, f"decoder.layers.{index}.", layer)
    for index in range(raw["num_nextn_predict_layers"]):
        ours, theirs = f"mtp.layers.{index}.", f"model.mtp_layers.{index}."
        layer = attention(hf, theirs, raw, tp, norms=False) | dense(hf, theirs, tp)
        prefixed(saved, f"{ours}mtp_model_layer.", layer)
        hidden, embedding = hf[f"{theirs}input_proj.weight"].chunk(2, 1)
        saved[f"{ours}eh_proj.weight"] = rows(torch.cat([embedding, hidden], 1), tp)
        names = {"enorm": "token", "hnorm": "hidden", "final_layernorm": "final"}
        for name, hf_name in names.items():
            saved[f"{ours}{name}.weight"] = whole(hf[f"{theirs}{hf_name}_layernorm.weight"])
    return saved


def stock_latent(hf: Tensors, raw: dict[str, Any], tp: int, *, local: bool = False) -> Saved:
    """Latent attention; `local`: norms have names of their own, without Transformer Engine."""
    saved = tables(hf, raw, tp)
    layers = raw["num_hidden_layers"]
    for index in range(layers + raw["num_nextn_predict_layers"]):
        theirs = f"model.layers.{index}."
        layer: Saved = {"input_layernorm.weight": whole(hf[f"{theirs}input_layernorm.weight"])}
        norms = {
            "q": "linear_q_up_proj.layer_norm_weight",
            "kv": "linear_kv_up_proj.layer_norm_weight",
        }
        if local:
            norms = {kind: f"{kind}_layernorm.weight" for kind in norms}
        names = {
            "kv_a_proj_with_mqa.weight": ("linear_kv_down_proj.weight", 1),
            "kv_a_layernorm.weight": (norms["kv"], 1),
            "kv_b_proj.weight": ("linear_kv_up_proj.weight", tp),
        }
        if raw["q_lora_rank"] is None:
            names["q_proj.weight"] = ("linear_q_proj.weight", tp)
        else:
            names["q_a_proj.weight"] = ("linear_q_down_proj.weight", 1)
            names["q_a_layernorm.weight"] = (norms["q"], 1)
            names["q_b_proj.weight"] = ("linear_q_up_proj.weight", tp)
        for hf_name, (name, ranks) in names.items():
            layer[f"self_attention.{name}"] = rows(hf[f"{theirs}self_attn.{hf_name}"], ranks)
        layer["self_attention.linear_proj.weight"] = rows(
            hf[f"{theirs}self_attn.o_proj.weight"], tp, 1
        )
        if index < raw["first_k_dense_replace"]:
            layer |= dense(hf, theirs, tp)
        else:
            layer |= experts(hf, theirs, raw["n_routed_experts"], tp, shared="shared_experts")
            bias = hf[f"{theirs}mlp.gate.e_score_correction_bias"]
            layer["mlp.router.expert_bias"] = whole(bias)
        if index < layers:
            prefixed(saved, f"decoder.layers.{index}.", layer)
            continue
        ours = f"mtp.layers.{index - layers}."
        prefixed(saved, f"{ours}transformer_layer.", layer)
        saved[f"{ours}eh_proj.weight"] = rows(hf[f"{theirs}eh_proj.weight"], tp)
        for name, hf_name in (
            ("enorm", "enorm"),
            ("hnorm", "hnorm"),
            ("final_layernorm", "shared_head.norm"),
        ):
            saved[f"{ours}{name}.weight"] = whole(hf[f"{theirs}{hf_name}.weight"])
    return saved


def stock_hybrid(hf: Tensors, raw: dict[str, Any], tp: int, *, pieces: bool) -> Saved:
    """Gated attention and gated delta rule; `pieces`: the projection's parts have their own names.

    Without, a rank's projection is [q | k | v | z | b | a] of its own heads, and the whole tensor
    is one such block below the other.
    """
    saved = tables(hf, raw, tp)
    for index, kind in enumerate(raw["layer_types"]):
        ours, theirs = f"decoder.layers.{index}.", f"model.layers.{index}."
        if kind == "full_attention":
            layer = attention(hf, theirs, raw, tp, gated=True)
        else:
            layer = delta(hf, theirs, raw, tp, pieces)
        prefixed(saved, ours, layer)
        prefixed(saved, ours, feed_forward(hf, theirs, raw, tp))
    if raw.get("mtp_num_hidden_layers"):
        layer = attention(hf, "mtp.layers.0.", raw, tp, gated=True)
        layer |= feed_forward(hf, "mtp.layers.0.", raw, tp)
        prefixed(saved, "mtp.layers.0.transformer_layer.", layer)
        saved["mtp.layers.0.eh_proj.weight"] = rows(hf["mtp.fc.weight"], tp)
        names = {
            "enorm": "pre_fc_norm_embedding",
            "hnorm": "pre_fc_norm_hidden",
            "final_layernorm": "norm",
        }
        for name, hf_name in names.items():
            saved[f"mtp.layers.0.{name}.weight"] = whole(hf[f"mtp.{hf_name}.weight"])
    return saved


def tables(hf: Tensors, raw: dict[str, Any], tp: int) -> Saved:
    """Embedding, final norm and head; the vocabulary padded to a multiple, with anything."""
    vocab, hidden = raw["vocab_size"], raw["hidden_size"]
    count = -vocab % (96 * tp)
    saved = {"decoder.final_layernorm.weight": whole(hf["model.norm.weight"])}
    for name, hf_name in (
        ("embedding.word_embeddings", "model.embed_tokens"),
        ("output_layer", "lm_head"),
    ):
        if f"{hf_name}.weight" in hf:
            tensor = hf[f"{hf_name}.weight"]
            padding = any_bits(count, hidden, dtype=tensor.dtype, seed=5)
            saved[f"{name}.weight"] = rows(torch.cat([tensor, padding]), tp)
    return saved


def attention(
    hf: Tensors,
    theirs: str,
    raw: dict[str, Any],
    tp: int,
    *,
    gated: bool = False,
    norms: bool = True,
) -> Saved:
    """linear_qkv: for each key head, its queries (all their gates), its key, its value."""
    groups, dim = raw["num_key_value_heads"], raw["head_dim"]
    each = raw["num_attention_heads"] // groups
    saved = {}
    for kind in ("weight", "bias"):
        if f"{theirs}self_attn.q_proj.{kind}" not in hf:
            continue
        q, k, v = (hf[f"{theirs}self_attn.{n}_proj.{kind}"] for n in "qkv")
        blocks = []
        for group in range(groups):
            gates = []
            for head in range(group * each, (group + 1) * each):
                width = 2 * dim if gated else dim
                own = q[head * width : (head + 1) * width]
                blocks.append(own[:dim])
                gates.append(own[dim:])
            blocks += gates
            blocks += [x[group * dim : (group + 1) * dim] for x in (k, v)]
        saved[f"self_attention.linear_qkv.{kind}"] = rows(torch.cat(blocks), tp)
    saved["self_attention.linear_qkv.layer_norm_weight"] = whole(
        hf[f"{theirs}input_layernorm.weight"]
    )
    saved["self_attention.linear_proj.weight"] = rows(hf[f"{theirs}self_attn.o_proj.weight"], tp, 1)
    for n in "qk" if norms else "":
        saved[f"self_attention.{n}_layernorm.weight"] = whole(
            hf[f"{theirs}self_attn.{n}_norm.weight"]
        )
    return saved


def delta(hf: Tensors, theirs: str, raw: dict[str, Any], tp: int, pieces: bool) -> Saved:
    theirs = f"{theirs}linear_attn."
    heads, value_heads = raw["linear_num_key_heads"], raw["linear_num_value_heads"]
    keys = heads * raw["linear_key_head_dim"]
    if f"{theirs}in_proj_qkvz.weight" in hf:  # Qwen3-Next: key head by key head
        parts = ungrouped(hf, theirs, raw)
    else:
        q, k, v = hf[f"{theirs}in_proj_qkv.weight"].tensor_split([keys, 2 * keys])
        parts = [q, k, v, *(hf[f"{theirs}in_proj_{n}.weight"] for n in "zba")]
    channels = hf[f"{theirs}conv1d.weight"].tensor_split([keys, 2 * keys])
    norm = hf[theirs.replace("linear_attn.", "input_layernorm.weight")]
    saved = {
        "in_proj.layer_norm_weight": whole(norm),
        "out_norm.weight": whole((hf[f"{theirs}norm.weight"].float() - 1).bfloat16()),
        "out_proj.weight": rows(hf[f"{theirs}out_proj.weight"], tp, 1),
        "A_log": rows(hf[f"{theirs}A_log"].bfloat16(), tp),
        "dt_bias": rows(hf[f"{theirs}dt_bias"], tp),
    }
    assert len(saved["A_log"][0][1]) == value_heads // tp
    for name, own in (("in_proj.weight", parts), ("conv1d.weight", channels)):
        if pieces:
            names = ("query", "key", "value", "z", "beta", "alpha")
            for piece, part in zip(names, own, strict=False):
                saved[f"{name}.{piece}"] = rows(part, tp)
        else:
            ranks = [torch.cat([part.chunk(tp)[rank] for part in own]) for rank in range(tp)]
            saved[name] = rows(torch.cat(ranks), tp)
    return {f"self_attention.{name}": chunks for name, chunks in saved.items()}


def ungrouped(hf: Tensors, theirs: str, raw: dict[str, Any]) -> list[Tensor]:
    heads, each = raw["linear_num_key_heads"], raw["linear_num_value_heads"]
    each //= heads
    dim, width = raw["linear_key_head_dim"], each * raw["linear_value_head_dim"]
    parts: list[list[Tensor]] = [[] for _ in range(6)]
    for block in hf[f"{theirs}in_proj_qkvz.weight"].chunk(heads):
        for part, piece in zip(parts, block.split([dim, dim, width, width]), strict=False):
            part.append(piece)
    for block in hf[f"{theirs}in_proj_ba.weight"].chunk(heads):
        for part, piece in zip(parts[4:], block.split([each, each]), strict=True):
            part.append(piece)
    return [torch.cat(part) for part in parts]


def feed_forward(hf: Tensors, theirs: str, raw: dict[str, Any], tp: int) -> Saved:
    if f"{theirs}mlp.gate.weight" not in hf:
        return dense(hf, theirs, tp)
    saved = experts(hf, theirs, raw["num_experts"], tp, shared="shared_expert")
    saved["mlp.shared_experts.gate_weight"] = whole(hf[f"{theirs}mlp.shared_expert_gate.weight"])
    return saved


def dense(hf: Tensors, theirs: str, tp: int) -> Saved:
    norm = whole(hf[f"{theirs}post_attention_layernorm.weight"])
    return {"mlp.linear_fc1.layer_norm_weight": norm, **swiglu(hf, f"{theirs}mlp", "mlp", tp)}


def swiglu(hf: Tensors, theirs: str, ours: str, tp: int) -> Saved:
    """linear_fc1: each rank has its share of gate and of up; the whole is [gate | up]."""
    gate, up = (hf[f"{theirs}.{n}_proj.weight"] for n in ("gate", "up"))
    lower = [((at + len(gate), zero), part) for (at, zero), part in rows(up, tp)]
    return {
        f"{ours}.linear_fc1.weight": [*rows(gate, tp), *lower],
        f"{ours}.linear_fc2.weight": rows(hf[f"{theirs}.down_proj.weight"], tp, 1),
    }


def experts(hf: Tensors, theirs: str, count: int, tp: int, shared: str | None = None) -> Saved:
    """An expert a chunk of one tensor of all experts."""
    saved = {
        "pre_mlp_layernorm.weight": whole(hf[f"{theirs}post_attention_layernorm.weight"]),
        "mlp.router.weight": whole(hf[f"{theirs}mlp.gate.weight"]),
    }
    for expert in range(count):
        own = swiglu(hf, f"{theirs}mlp.experts.{expert}", "mlp.experts.experts", tp)
        for name, chunks in own.items():
            stack(saved, name, (expert,), chunks)
    if shared is not None:
        saved |= swiglu(hf, f"{theirs}mlp.{shared}", "mlp.shared_experts", tp)
    return saved


def stack(saved: Saved, name: str, place: tuple[int, ...], chunks: Chunks) -> None:
    """Add chunks as slices of a tensor with more dimensions in front."""
    more = [((*place, *at), part[(None,) * len(place)]) for at, part in chunks]
    saved.setdefault(name, []).extend(more)


def prefixed(saved: Saved, prefix: str, more: Saved) -> None:
    saved |= {f"{prefix}{name}": chunks for name, chunks in more.items()}
