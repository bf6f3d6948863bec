"""Tiny random hybrids in the layout of the released ones, written without the code under test."""

import json
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from tests.checkpoints import EOS, VOCAB, _Draw, _write

SIZES: dict[str, Any] = {
    "vocab_size": VOCAB,
    "hidden_size": 128,
    "intermediate_size": 256,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 64,
    "linear_conv_kernel_dim": 4,
    "linear_key_head_dim": 16,
    "linear_value_head_dim": 32,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
}


EXPERTS: dict[str, Any] = {
    "num_experts": 8,
    "num_experts_per_tok": 3,
    "moe_intermediate_size": 64,
    "shared_expert_intermediate_size": 96,
    "router_aux_loss_coef": 0.001,
}
VISION: dict[str, Any] = {
    "deepstack_visual_indexes": [],
    "depth": 2,
    "hidden_act": "gelu_pytorch_tanh",
    "hidden_size": 32,
    "in_channels": 3,
    "initializer_range": 0.02,
    "intermediate_size": 48,
    "model_type": "qwen3_5",
    "num_heads": 2,
    "num_position_embeddings": 16,
    "out_hidden_size": 128,
    "patch_size": 4,
    "spatial_merge_size": 2,
    "temporal_patch_size": 2,
}


def text_config(architecture: str, model_type: str, dtype: torch.dtype) -> dict[str, Any]:
    """Fields as in the released text_config of Qwen3.5."""
    return {
        "architectures": [architecture],
        "model_type": model_type,
        **SIZES,
        "attention_bias": False,
        "attention_dropout": 0.0,
        "attn_output_gate": True,
        "dtype": str(dtype).removeprefix("torch."),
        "eos_token_id": EOS,
        "full_attention_interval": 4,
        "hidden_act": "silu",
        "initializer_range": 0.02,
        "layer_types": [*["linear_attention"] * 3, "full_attention"],
        "mamba_ssm_dtype": "float32",
        "max_position_embeddings": 2048,
        "mlp_only_layers": [],
        "mtp_num_hidden_layers": 1,
        "mtp_use_dedicated_embeddings": False,
        "rms_norm_eps": 1e-6,
        "rope_parameters": {
            "mrope_interleaved": True,
            "mrope_section": [3, 3, 2],
            "partial_rotary_factor": 0.25,
            "rope_theta": 10000000,
            "rope_type": "default",
        },
        "tie_word_embeddings": False,
        "transformers_version": "5.0.0",
        "use_cache": True,
    }


def make_qwen3_5(
    path: Path | str,
    dtype: torch.dtype = torch.float32,
    tied: bool = False,
    *,
    seed: int = 0,
    **overrides: Any,
) -> Path:
    """Writes a dense Qwen3.5 text checkpoint with one MTP layer and returns its folder."""
    config = text_config("Qwen3_5ForCausalLM", "qwen3_5_text", dtype)
    config = {**config, "tie_word_embeddings": tied, **overrides}
    draw = _Draw(seed, dtype)
    tensors = decoder(draw, config, lambda draw, config: mlp(draw, config))
    if not tied:
        tensors["lm_head.weight"] = draw.matrix(config["vocab_size"], config["hidden_size"], 3.0)
    if config.get("mtp_num_hidden_layers"):
        tensors |= mtp(draw, config, mlp)
    return _write(path, config, tensors)


def make_qwen3_5_moe(
    path: Path | str, dtype: torch.dtype = torch.float32, *, seed: int = 0, **overrides: Any
) -> Path:
    """Writes a Qwen3.5-MoE text checkpoint, experts apart, with one MTP layer."""
    config = text_config("Qwen3_5MoeForCausalLM", "qwen3_5_moe_text", dtype) | EXPERTS
    del config["intermediate_size"]
    config |= overrides
    draw = _Draw(seed, dtype)
    tensors = decoder(draw, config, moe) | mtp(draw, config, moe)
    tensors["lm_head.weight"] = draw.matrix(config["vocab_size"], config["hidden_size"], 3.0)
    return _write(path, config, tensors)


def make_qwen3_next(
    path: Path | str, dtype: torch.dtype = torch.float32, *, seed: int = 0, **overrides: Any
) -> Path:
    """Writes a Qwen3-Next checkpoint: the projections of a key head's rows lie together."""
    config = text_config("Qwen3NextForCausalLM", "qwen3_next", dtype) | EXPERTS
    qwen3_5 = ("attn_output_gate", "mamba_ssm_dtype", "rope_parameters")
    for name in (*qwen3_5, "mtp_num_hidden_layers", "mtp_use_dedicated_embeddings"):
        del config[name]
    config |= {"rope_theta": 10000000, "partial_rotary_factor": 0.25, "rope_scaling": None}
    config |= {"norm_topk_prob": True, "decoder_sparse_step": 1, **overrides}
    draw = _Draw(seed, dtype)
    tensors = decoder(draw, config, moe)
    tensors["lm_head.weight"] = draw.matrix(config["vocab_size"], config["hidden_size"], 3.0)
    for name in [n for n in tensors if n.endswith("in_proj_qkv.weight")]:
        prefix = name.removesuffix("qkv.weight")
        own = {part: tensors.pop(f"{prefix}{part}.weight") for part in ("qkv", "z", "b", "a")}
        tensors |= {f"{prefix}{n}.weight": t for n, t in grouped(own, config).items()}
    return _write(path, config, tensors)


def make_multimodal(
    path: Path | str, dtype: torch.dtype = torch.float32, *, seed: int = 0, **overrides: Any
) -> Path:
    """Writes a dense Qwen3.5 with a vision tower: the text model is `model.language_model`."""
    text = text_config("", "qwen3_5_text", dtype) | overrides
    del text["architectures"]
    name = str(dtype).removeprefix("torch.")
    config = {
        "architectures": ["Qwen3_5ForConditionalGeneration"],
        "model_type": "qwen3_5",
        "image_token_id": 500,
        "text_config": text,
        "tie_word_embeddings": False,
        "transformers_version": "5.0.0",
        "video_token_id": 501,
        "vision_config": {**VISION, "dtype": name},
        "vision_end_token_id": 502,
        "vision_start_token_id": 503,
        "vocab_size": VOCAB,  # for the tokenizer
    }
    draw = _Draw(seed, dtype)
    inside = decoder(draw, text, mlp)
    tensors = {n.replace("model.", "model.language_model.", 1): t for n, t in inside.items()}
    tensors["lm_head.weight"] = draw.matrix(text["vocab_size"], text["hidden_size"], gain=3.0)
    tensors |= mtp(draw, text, mlp) | visual(draw, VISION)
    folder = _write(path, config, tensors)
    del config["vocab_size"]
    (folder / "config.json").write_text(json.dumps(config))
    return folder


def grouped(own: dict[str, Tensor], config: dict[str, Any]) -> dict[str, Tensor]:
    """The four projections of Qwen3.5 in the two of Qwen3-Next, key head by key head."""
    count, key = config["linear_num_key_heads"], config["linear_key_head_dim"]
    q, k, v = own["qkv"].split([count * key, count * key, len(own["z"])])
    together = {"qkvz": (q, k, v, own["z"]), "ba": (own["b"], own["a"])}
    return {
        name: torch.cat(
            [part.chunk(count)[head] for head in range(count) for part in parts]
        ).contiguous()
        for name, parts in together.items()
    }


def visual(draw: _Draw, config: dict[str, Any]) -> dict[str, Tensor]:
    """A vision tower, which nobody here runs."""
    width, inner = config["hidden_size"], config["intermediate_size"]
    patch = (config["in_channels"], config["temporal_patch_size"], *[config["patch_size"]] * 2)
    merged = width * config["spatial_merge_size"] ** 2
    count = torch.Size(patch).numel()
    affine = {"merger.linear_fc1": (merged, merged), "merger.linear_fc2": (128, merged)}
    norms = ["merger.norm"]
    for index in range(config["depth"]):
        block = f"blocks.{index}"
        norms += [f"{block}.norm1", f"{block}.norm2"]
        affine |= {
            f"{block}.attn.qkv": (3 * width, width),
            f"{block}.attn.proj": (width, width),
            f"{block}.mlp.linear_fc1": (inner, width),
            f"{block}.mlp.linear_fc2": (width, inner),
        }
    tensors = {
        "patch_embed.proj.weight": draw.matrix(width, count).view(width, *patch),
        "patch_embed.proj.bias": draw.bias(width),
        "pos_embed.weight": draw.matrix(config["num_position_embeddings"], width),
        **{f"{n}.weight": draw.norm(width) for n in norms},
        **{f"{n}.bias": draw.bias(width) for n in norms},
        **{f"{n}.weight": draw.matrix(*shape) for n, shape in affine.items()},
        **{f"{n}.bias": draw.bias(shape[0]) for n, shape in affine.items()},
    }
    return {f"model.visual.{name}": tensor for name, tensor in tensors.items()}


def moe(draw: _Draw, config: dict[str, Any]) -> dict[str, Tensor]:
    """Router, experts and the shared expert with its gate."""
    hidden, inner = config["hidden_size"], config["moe_intermediate_size"]
    tensors = {
        "gate.weight": draw.matrix(config["num_experts"], hidden),
        "shared_expert_gate.weight": draw.matrix(1, hidden),
    }
    names = [f"experts.{expert}" for expert in range(config["num_experts"])]
    for name in (*names, "shared_expert"):
        width = config["shared_expert_intermediate_size"] if name == "shared_expert" else inner
        tensors |= {
            f"{name}.gate_proj.weight": draw.matrix(width, hidden),
            f"{name}.up_proj.weight": draw.matrix(width, hidden),
            f"{name}.down_proj.weight": draw.matrix(hidden, width, gain=2.0),
        }
    return tensors


def centred(draw: _Draw, size: int) -> Tensor:
    """A norm's weight as stored: its distance from one."""
    return (draw.norm(size).float() - 1.0).to(draw.dtype)


def gated_delta(draw: _Draw, config: dict[str, Any]) -> dict[str, Tensor]:
    """One gated delta rule layer; A_log and the norm are float32 as in the released files."""
    hidden, heads = config["hidden_size"], config["linear_num_value_heads"]
    values = heads * config["linear_value_head_dim"]
    channels = 2 * config["linear_num_key_heads"] * config["linear_key_head_dim"] + values
    return {
        "in_proj_qkv.weight": draw.matrix(channels, hidden),
        "in_proj_z.weight": draw.matrix(values, hidden),
        "in_proj_b.weight": draw.matrix(heads, hidden),
        "in_proj_a.weight": draw.matrix(heads, hidden),
        "conv1d.weight": draw.matrix(channels, config["linear_conv_kernel_dim"])[:, None],
        # heads that forget in a token, and such that remember hundreds
        "A_log": torch.linspace(0.003, 8.0, heads).log() + 0.01,
        "dt_bias": (draw.bias(heads).float() - 1.0).to(draw.dtype),
        "norm.weight": draw.norm(config["linear_value_head_dim"]).float() + 0.001,
        "out_proj.weight": draw.matrix(hidden, values),
    }


def gated_attention(draw: _Draw, config: dict[str, Any]) -> dict[str, Tensor]:
    """One gated attention layer: a query's rows are followed by its gate's."""
    hidden, dim = config["hidden_size"], config["head_dim"]
    queries, keys = (config[f"num_{k}_heads"] * dim for k in ("attention", "key_value"))
    return {
        "q_proj.weight": draw.matrix(2 * queries, hidden),
        "k_proj.weight": draw.matrix(keys, hidden),
        "v_proj.weight": draw.matrix(keys, hidden),
        "q_norm.weight": centred(draw, dim),
        "k_norm.weight": centred(draw, dim),
        "o_proj.weight": draw.matrix(hidden, queries),
    }


def mlp(draw: _Draw, config: dict[str, Any]) -> dict[str, Tensor]:
    """A dense feed-forward."""
    hidden, inner = config["hidden_size"], config["intermediate_size"]
    return {
        "gate_proj.weight": draw.matrix(inner, hidden),
        "up_proj.weight": draw.matrix(inner, hidden),
        "down_proj.weight": draw.matrix(hidden, inner, gain=2.0),
    }


def layer(draw: _Draw, config: dict[str, Any], kind: str, feed_forward: Any) -> dict[str, Tensor]:
    """One decoder layer."""
    if kind == "full_attention":
        mixer = {f"self_attn.{n}": t for n, t in gated_attention(draw, config).items()}
    else:
        mixer = {f"linear_attn.{n}": t for n, t in gated_delta(draw, config).items()}
    norms = ("input_layernorm", "post_attention_layernorm")
    return {
        **mixer,
        **{f"mlp.{name}": tensor for name, tensor in feed_forward(draw, config).items()},
        **{f"{norm}.weight": centred(draw, config["hidden_size"]) for norm in norms},
    }


def decoder(draw: _Draw, config: dict[str, Any], feed_forward: Any) -> dict[str, Tensor]:
    """Embedding, layers and final norm."""
    vocab, hidden = config["vocab_size"], config["hidden_size"]
    tensors = {"model.embed_tokens.weight": draw.matrix(vocab, hidden, gain=3.0)}
    for index, kind in enumerate(config["layer_types"]):
        one = layer(draw, config, kind, feed_forward)
        tensors |= {f"model.layers.{index}.{name}": tensor for name, tensor in one.items()}
    return {**tensors, "model.norm.weight": centred(draw, hidden)}


def mtp(draw: _Draw, config: dict[str, Any], feed_forward: Any) -> dict[str, Tensor]:
    """The multi-token-prediction layers, which nobody here runs."""
    hidden = config["hidden_size"]
    norms = ("pre_fc_norm_embedding", "pre_fc_norm_hidden", "norm")
    tensors = {f"mtp.{norm}.weight": centred(draw, hidden) for norm in norms}
    tensors["mtp.fc.weight"] = draw.matrix(hidden, 2 * hidden)
    for index in range(config["mtp_num_hidden_layers"]):
        one = layer(draw, config, "full_attention", feed_forward)
        tensors |= {f"mtp.layers.{index}.{name}": tensor for name, tensor in one.items()}
    return tensors
