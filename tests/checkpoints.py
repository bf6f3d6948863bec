"""Tiny random checkpoints in the layout of the released ones, for every test folder.

Weights are drawn so that the logits have the spread of a trained model (standard deviation near 3):
flat logits would hide differences in the last bits.
"""

import json
from pathlib import Path

import torch
from safetensors.torch import save_file
from torch import Tensor

VOCAB = 512
EOS = VOCAB - 2

_SIZES = {
    "vocab_size": VOCAB,
    "hidden_size": 128,
    "intermediate_size": 256,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
}


def make_qwen3(
    path: Path | str,
    dtype: torch.dtype = torch.float32,
    tied: bool = False,
    *,
    seed: int = 0,
    **overrides: object,
) -> Path:
    """Writes a Qwen3 checkpoint (qk-norm, no bias) and returns its folder.

    `overrides` replace fields of config.json; a value of None removes the field.
    """
    config = {
        "architectures": ["Qwen3ForCausalLM"],
        "model_type": "qwen3",
        **_common(dtype, tied),
        "rope_theta": 1000000,
        "attention_bias": False,
    }
    sizes = {**_SIZES, **{k: v for k, v in overrides.items() if k in _SIZES}}
    draw = _Draw(seed, dtype)
    return _write(
        path, {**config, **overrides}, _decoder(draw, sizes, tied, bias=False, qk_norm=True)
    )


def make_mimo(
    path: Path | str, dtype: torch.dtype = torch.float32, *, seed: int = 0, **overrides: object
) -> Path:
    """Writes a MiMo checkpoint (qkv bias, no qk-norm, one MTP layer) and returns its folder."""
    config = {
        "architectures": ["MiMoForCausalLM"],
        "model_type": "mimo",
        **_common(dtype, tied=False),
        "rope_theta": 640000,
        "attention_bias": True,
        "num_nextn_predict_layers": 1,
    }
    sizes = {**_SIZES, **{k: v for k, v in overrides.items() if k in _SIZES}}
    draw = _Draw(seed, dtype)
    tensors = _decoder(draw, sizes, tied=False, bias=True, qk_norm=False)
    hidden = sizes["hidden_size"]
    for layer in range(int(overrides.get("num_nextn_predict_layers", 1))):  # type: ignore[call-overload]
        prefix = f"model.mtp_layers.{layer}."
        for name in ("token_layernorm", "hidden_layernorm", "final_layernorm"):
            tensors[f"{prefix}{name}.weight"] = draw.norm(hidden)
        tensors[f"{prefix}input_proj.weight"] = draw.matrix(hidden, 2 * hidden)
        tensors |= _layer(draw, sizes, prefix, bias=True, qk_norm=False)
    return _write(path, {**config, **overrides}, tensors)


def make_qwen3_moe(
    path: Path | str,
    dtype: torch.dtype = torch.float32,
    tied: bool = False,
    *,
    fused: bool = False,
    seed: int = 0,
    **overrides: object,
) -> Path:
    """Writes a Qwen3-MoE checkpoint whose first layer is dense, its experts apart or fused.

    The weights of the two forms are the same.
    """
    config = {
        "architectures": ["Qwen3MoeForCausalLM"],
        "model_type": "qwen3_moe",
        **_common(dtype, tied),
        "rope_theta": 1000000,
        "attention_bias": False,
        "moe_intermediate_size": 48,
        "num_experts": 8,
        "num_experts_per_tok": 3,
        "norm_topk_prob": True,
        "decoder_sparse_step": 1,
        "mlp_only_layers": [0],
        "output_router_logits": False,
        "router_aux_loss_coef": 0.001,
        **overrides,
    }
    sizes = {**_SIZES, **{k: v for k, v in overrides.items() if k in _SIZES}}
    draw = _Draw(seed, dtype)
    tensors = _decoder(draw, sizes, tied, bias=False, qk_norm=True)
    hidden, inter = sizes["hidden_size"], int(config["moe_intermediate_size"])
    for layer in range(sizes["num_hidden_layers"]):
        if layer in config["mlp_only_layers"] or (layer + 1) % config["decoder_sparse_step"]:
            continue
        mlp = f"model.layers.{layer}.mlp"
        tensors = {name: t for name, t in tensors.items() if not name.startswith(f"{mlp}.")}
        tensors[f"{mlp}.gate.weight"] = draw.matrix(config["num_experts"], hidden)
        experts = [
            (draw.matrix(2 * inter, hidden), draw.matrix(hidden, inter, gain=2.0))
            for _ in range(config["num_experts"])
        ]
        if fused:
            for name, parts in zip(
                ("gate_up_proj", "down_proj"), zip(*experts, strict=True), strict=True
            ):
                tensors[f"{mlp}.experts.{name}"] = torch.stack(parts)
            continue
        for expert, (gate_up, down) in enumerate(experts):
            gate, up = gate_up.clone().chunk(2)
            for name, part in (("gate", gate), ("up", up), ("down", down)):
                name = f"{mlp}.experts.{expert}.{name}_proj.weight"
                tensors[name] = part.contiguous()
    return _write(path, config, tensors)


class _Draw:
    def __init__(self, seed: int, dtype: torch.dtype):
        self.generator = torch.Generator().manual_seed(seed)
        self.dtype = dtype

    def _normal(self, *shape: int) -> Tensor:
        return torch.randn(*shape, generator=self.generator)

    def matrix(self, out: int, inp: int, gain: float = 1.0) -> Tensor:
        return (self._normal(out, inp) * (gain / inp**0.5)).to(self.dtype)

    def norm(self, size: int) -> Tensor:
        return (1 + 0.2 * self._normal(size)).to(self.dtype)

    def bias(self, size: int) -> Tensor:
        return (0.3 * self._normal(size)).to(self.dtype)


def _common(dtype: torch.dtype, tied: bool) -> dict[str, object]:
    return {
        **_SIZES,
        "hidden_act": "silu",
        "max_position_embeddings": 2048,
        "rms_norm_eps": 1e-6,
        "rope_scaling": None,
        "tie_word_embeddings": tied,
        "torch_dtype": str(dtype).removeprefix("torch."),
        "use_cache": True,
        "use_sliding_window": False,
        "sliding_window": None,
        "max_window_layers": 3,
        "attention_dropout": 0.0,
        "initializer_range": 0.02,
        "bos_token_id": EOS,
        "eos_token_id": EOS,
        "transformers_version": "4.51.0",
    }


def _layer(
    draw: _Draw, sizes: dict, prefix: str, *, bias: bool, qk_norm: bool
) -> dict[str, Tensor]:
    hidden, inter, dim = sizes["hidden_size"], sizes["intermediate_size"], sizes["head_dim"]
    heads = {"q": sizes["num_attention_heads"], "k": sizes["num_key_value_heads"]}
    heads["v"] = heads["k"]
    out = {}
    for name, count in heads.items():
        out[f"self_attn.{name}_proj.weight"] = draw.matrix(count * dim, hidden)
        if bias:
            out[f"self_attn.{name}_proj.bias"] = draw.bias(count * dim)
    if qk_norm:
        out["self_attn.q_norm.weight"] = draw.norm(dim)
        out["self_attn.k_norm.weight"] = draw.norm(dim)
    out["self_attn.o_proj.weight"] = draw.matrix(hidden, heads["q"] * dim)
    out["mlp.gate_proj.weight"] = draw.matrix(inter, hidden)
    out["mlp.up_proj.weight"] = draw.matrix(inter, hidden)
    out["mlp.down_proj.weight"] = draw.matrix(hidden, inter, gain=2.0)
    out["input_layernorm.weight"] = draw.norm(hidden)
    out["post_attention_layernorm.weight"] = draw.norm(hidden)
    return {prefix + name: tensor for name, tensor in out.items()}


def _decoder(
    draw: _Draw, sizes: dict, tied: bool, *, bias: bool, qk_norm: bool
) -> dict[str, Tensor]:
    vocab, hidden = sizes["vocab_size"], sizes["hidden_size"]
    tensors = {"model.embed_tokens.weight": draw.matrix(vocab, hidden, gain=3.0)}
    for layer in range(sizes["num_hidden_layers"]):
        tensors |= _layer(draw, sizes, f"model.layers.{layer}.", bias=bias, qk_norm=qk_norm)
    tensors["model.norm.weight"] = draw.norm(hidden)
    if not tied:
        tensors["lm_head.weight"] = draw.matrix(vocab, hidden, gain=3.0)
    return tensors


def _write(path: Path | str, config: dict[str, object], tensors: dict[str, Tensor]) -> Path:
    path = Path(path)
    path.mkdir(parents=True, exist_ok=True)
    removed = ("rope_scaling", "sliding_window")  # null in the released files, and so kept
    config = {k: v for k, v in config.items() if v is not None or k in removed}
    (path / "config.json").write_text(json.dumps(config, indent=2))
    save_file(tensors, path / "model.safetensors", metadata={"format": "pt"})
    write_tokenizer(path, int(config["vocab_size"]))  # type: ignore[call-overload]
    return path


def write_tokenizer(path: Path, vocab_size: int = VOCAB) -> None:
    """Writes a tokenizer whose words are t0, t1, ...: token i is the word "t<i>"."""
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    vocab = {f"t{i}": i for i in range(vocab_size - 2)}
    vocab |= {"<eos>": vocab_size - 2, "<unk>": vocab_size - 1}
    words = Tokenizer(models.WordLevel(vocab, unk_token="<unk>"))
    words.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=words, eos_token="<eos>", unk_token="<unk>", pad_token="<eos>"
    )
    tokenizer.chat_template = "{% for m in messages %}{{ m['content'] }} {% endfor %}"
    tokenizer.save_pretrained(path)
