"""Tiny checkpoints of the latent-attention families, and transformers' models with their tensors.

Written from the layout of the released files, not from the package's own table of it.
"""

import json
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from isomodels.config import read_config
from isomodels.registry import load_object
from tests.checkpoints import write_tokenizer
from tests.dense.models import Engine
from tests.kernel.pages import Pages

VOCAB = 512
_COMMON = {
    "vocab_size": VOCAB,
    "hidden_size": 128,
    "intermediate_size": 256,
    "moe_intermediate_size": 32,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
    "q_lora_rank": 48,
    "kv_lora_rank": 40,
    "qk_nope_head_dim": 24,
    "v_head_dim": 32,
    "n_shared_experts": 1,
    "norm_topk_prob": True,
    "topk_method": "noaux_tc",
    "first_k_dense_replace": 1,
    "num_nextn_predict_layers": 1,
    "hidden_act": "silu",
    "attention_bias": False,
    "attention_dropout": 0.0,
    "max_position_embeddings": 10240,
    "tie_word_embeddings": False,
    "initializer_range": 0.02,
    "bos_token_id": 0,
    "eos_token_id": 1,
    "transformers_version": "4.48.0",
}
YARN = {
    "beta_fast": 32,
    "beta_slow": 1,
    "factor": 40,
    "mscale": 1.0,
    "mscale_all_dim": 1.0,
    "original_max_position_embeddings": 256,
    "type": "yarn",
}
# The released config.json of each, with smaller sizes. transformers' latent norms take 1e-6.
CONFIGS: dict[str, dict[str, Any]] = {
    "deepseek": {
        **_COMMON,
        "architectures": ["DeepseekV3ForCausalLM"],
        "model_type": "deepseek_v3",
        "auto_map": {"AutoConfig": "configuration_deepseek.DeepseekV3Config"},
        "ep_size": 1,
        "moe_layer_freq": 1,
        "n_routed_experts": 16,
        "num_experts_per_tok": 4,
        "n_group": 4,
        "topk_group": 2,
        "qk_rope_head_dim": 16,
        "rms_norm_eps": 1e-6,
        "rope_theta": 10000,
        "rope_scaling": YARN,
        "routed_scaling_factor": 2.5,
        "scoring_func": "sigmoid",
        "use_cache": True,
    },
    "moonlight": {
        **_COMMON,
        "architectures": ["DeepseekV3ForCausalLM"],
        "model_type": "deepseek_v3",
        "aux_loss_alpha": 0.001,
        "seq_aux": True,
        "pretraining_tp": 1,
        "ep_size": 1,
        "moe_layer_freq": 1,
        "n_routed_experts": 8,
        "n_shared_experts": 2,
        "num_experts_per_tok": 3,
        "n_group": 1,
        "topk_group": 1,
        "num_nextn_predict_layers": 0,
        "q_lora_rank": None,
        "qk_rope_head_dim": 16,
        "rms_norm_eps": 1e-5,
        "latent_norm_eps": 1e-6,
        "rope_theta": 50000.0,
        "routed_scaling_factor": 2.446,
        "scoring_func": "sigmoid",
    },
    "glm": {
        **_COMMON,
        "architectures": ["Glm4MoeLiteForCausalLM"],
        "model_type": "glm4_moe_lite",
        "n_routed_experts": 8,
        "num_experts_per_tok": 2,
        "n_group": 1,
        "topk_group": 1,
        "qk_nope_head_dim": 16,
        "qk_rope_head_dim": 8,
        "v_head_dim": 40,
        "rms_norm_eps": 1e-5,
        "latent_norm_eps": 1e-6,
        "partial_rotary_factor": 1.0,
        "rope_theta": 1000000,
        "rope_scaling": None,
        "routed_scaling_factor": 1.8,
    },
}
ARCHITECTURES = list(CONFIGS)


def make(
    name: str, path: Path, dtype: torch.dtype = torch.float32, seed: int = 0, **overrides: Any
) -> Path:
    """Writes a checkpoint; `overrides` replace fields of config.json."""
    path.mkdir(parents=True, exist_ok=True)
    raw = {**CONFIGS[name], "torch_dtype": str(dtype).removeprefix("torch."), **overrides}
    (path / "config.json").write_text(json.dumps(raw, indent=2))
    save_file(tensors(raw, dtype, seed), path / "model.safetensors", metadata={"format": "pt"})
    write_tokenizer(path, raw["vocab_size"])
    return path


def tensors(raw: dict[str, Any], dtype: torch.dtype, seed: int = 0) -> dict[str, Tensor]:
    """Random tensors of a config under the names of the released files."""
    draw, out = _Draw(seed, dtype), {}
    hidden, vocab, layers = (raw[k] for k in ("hidden_size", "vocab_size", "num_hidden_layers"))
    out["model.embed_tokens.weight"] = draw.matrix(vocab, hidden, gain=3.0)
    for index in range(layers + raw["num_nextn_predict_layers"]):
        sparse = index >= raw["first_k_dense_replace"]
        prefix = f"model.layers.{index}."
        out |= {prefix + name: tensor for name, tensor in _layer(draw, raw, sparse).items()}
        if index >= layers:
            out |= {
                f"{prefix}enorm.weight": draw.norm(hidden),
                f"{prefix}hnorm.weight": draw.norm(hidden),
                f"{prefix}eh_proj.weight": draw.matrix(hidden, 2 * hidden),
                f"{prefix}embed_tokens.weight": out["model.embed_tokens.weight"].clone(),
                f"{prefix}shared_head.norm.weight": draw.norm(hidden),
                f"{prefix}shared_head.head.weight": draw.matrix(vocab, hidden),
            }
    out["model.norm.weight"] = draw.norm(hidden)
    out["lm_head.weight"] = draw.matrix(vocab, hidden, gain=3.0)
    return out


class _Draw:
    def __init__(self, seed: int, dtype: torch.dtype):
        self.generator = torch.Generator().manual_seed(seed)
        self.dtype = dtype

    def normal(self, *shape: int) -> Tensor:
        return torch.randn(*shape, generator=self.generator)

    def matrix(self, out: int, inp: int, gain: float = 1.0) -> Tensor:
        return (self.normal(out, inp) * (gain / inp**0.5)).to(self.dtype)

    def norm(self, size: int) -> Tensor:
        return (1 + 0.2 * self.normal(size)).to(self.dtype)


def _layer(draw: _Draw, raw: dict[str, Any], sparse: bool) -> dict[str, Tensor]:
    hidden, heads, rank = (raw[k] for k in ("hidden_size", "num_attention_heads", "kv_lora_rank"))
    nope, rope, v = (raw[k] for k in ("qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim"))
    out = {
        "input_layernorm.weight": draw.norm(hidden),
        "post_attention_layernorm.weight": draw.norm(hidden),
        "self_attn.kv_a_proj_with_mqa.weight": draw.matrix(rank + rope, hidden),
        "self_attn.kv_a_layernorm.weight": draw.norm(rank),
        "self_attn.kv_b_proj.weight": draw.matrix(heads * (nope + v), rank),
        "self_attn.o_proj.weight": draw.matrix(hidden, heads * v),
    }
    if raw["q_lora_rank"] is None:
        out["self_attn.q_proj.weight"] = draw.matrix(heads * (nope + rope), hidden)
    else:
        out["self_attn.q_a_proj.weight"] = draw.matrix(raw["q_lora_rank"], hidden)
        out["self_attn.q_a_layernorm.weight"] = draw.norm(raw["q_lora_rank"])
        out["self_attn.q_b_proj.weight"] = draw.matrix(heads * (nope + rope), raw["q_lora_rank"])
    if not sparse:
        return out | _mlp(draw, "mlp.", hidden, raw["intermediate_size"])
    experts, width = raw["n_routed_experts"], raw["moe_intermediate_size"]
    out["mlp.gate.weight"] = draw.matrix(experts, hidden)
    # negative where the released ones are positive: a masked group's scores of 0 would win
    out["mlp.gate.e_score_correction_bias"] = -1.0 - 0.2 * draw.normal(experts).abs()
    for expert in range(experts):
        out |= _mlp(draw, f"mlp.experts.{expert}.", hidden, width)
    return out | _mlp(draw, "mlp.shared_experts.", hidden, width * raw["n_shared_experts"])


def _mlp(draw: _Draw, prefix: str, hidden: int, width: int) -> dict[str, Tensor]:
    return {
        f"{prefix}gate_proj.weight": draw.matrix(width, hidden),
        f"{prefix}up_proj.weight": draw.matrix(width, hidden),
        f"{prefix}down_proj.weight": draw.matrix(hidden, width, gain=2.0),
    }


def load_ours(folder: Path, **options: Any) -> torch.nn.Module:
    """Our module, filled here by hand: the tests of conversion are elsewhere."""
    spec, config = read_config(folder)
    model = load_object(spec.model)(config, dtype=config.torch_dtype, **options)
    found = load_file(folder / "model.safetensors")
    last = f"model.layers.{config.num_hidden_layers}."
    found |= {n.replace(last, "model.mtp_layers.0."): x for n, x in found.items() if last in n}
    state = {name: _ours(name, found) for name in model.state_dict()}
    model.load_state_dict(state, strict=True)
    return model


def _ours(name: str, found: dict[str, Tensor]) -> Tensor:
    if name in found:
        return found[name]
    if "qkv_a_proj" in name:
        first = next(q for q in ("q_a_proj", "q_proj") if name.replace("qkv_a_proj", q) in found)
        parts = (first, "kv_a_proj_with_mqa")
        return torch.cat([found[name.replace("qkv_a_proj", part)] for part in parts])
    head, _, leaf = name.rpartition(".experts.")
    if not name.endswith(".weight"):  # of all experts
        count = sum(n.startswith(f"{head}.experts.") for n in found) // 3
        each = [f"{head}.experts.{e}.{leaf}.weight" for e in range(count)]
        return torch.stack([_ours(one, found) for one in each])
    parts = ("gate_proj", "up_proj")
    return torch.cat([found[name.replace("gate_up_proj", part)] for part in parts])


class LatentEngine(Engine):
    """The memory of an engine: pages of latents."""

    def __init__(self, model: torch.nn.Module, lengths: list[int], block_size: int = 16):
        config = model.config
        width = (config.kv_lora_rank + config.qk_rope_head_dim) // 2
        self.model, self.device = model, "cpu"
        self.pages = [
            Pages(lengths, 1, width, block_size, config.torch_dtype, order=(0, 2, 1, 3))
            for _ in range(config.num_hidden_layers)
        ]
        self.done = [0] * len(lengths)


def their_routes(model: Any, ids: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """(logits [T, V], router logits [T, layers, E], ids [T, layers, k], biases [layers, E])."""
    gates, found = [], []

    def keep(_: Any, args: Any, output: Any) -> None:
        gates.append(output[0])
        found.append(output[2])

    routers = [m for m in model.modules() if type(m).__name__.endswith("TopkRouter")]
    hooks = [router.register_forward_hook(keep) for router in routers]
    with torch.no_grad():
        logits = model(ids[None], use_cache=False).logits[0]
    for hook in hooks:
        hook.remove()
    biases = torch.stack([router.e_score_correction_bias for router in routers])
    return logits, torch.stack(gates, 1), torch.stack(found, 1), biases


def load_theirs(folder: Path, dtype: torch.dtype) -> Any:
    """transformers' model with a checkpoint's tensors; only parameters are cast, not its tables."""
    import transformers

    raw = json.loads((folder / "config.json").read_text())
    model_class = getattr(transformers, raw.pop("architectures")[0])
    for field in ("model_type", "torch_dtype", "transformers_version", "auto_map"):
        raw.pop(field, None)
    config = model_class.config_class(
        **raw, attn_implementation="eager", experts_implementation="eager"
    )
    model = model_class(config).eval()
    found = load_file(folder / "model.safetensors")
    layers = config.num_hidden_layers
    state = {name: x for name, x in found.items() if not name.startswith(f"model.layers.{layers}.")}
    for index in range(raw["first_k_dense_replace"], layers):
        prefix = f"model.layers.{index}.mlp.experts."
        parts = {
            part: [state.pop(f"{prefix}{e}.{part}.weight") for e in range(config.n_routed_experts)]
            for part in ("gate_proj", "up_proj", "down_proj")
        }
        state[f"{prefix}down_proj"] = torch.stack(parts["down_proj"])
        gate_up = zip(parts["gate_proj"], parts["up_proj"], strict=True)
        state[f"{prefix}gate_up_proj"] = torch.stack([torch.cat(pair) for pair in gate_up])
    model.load_state_dict(state, strict=True)
    for parameter in model.parameters():
        parameter.data = parameter.data.to(dtype)
    return model
