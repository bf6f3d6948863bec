"""The hybrids in fp64, token by token and without a cache: what every other form must compute.

transformers' own model in fp64 is no reference here: its norms and its delta rule run in fp32.
"""

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
import torch.nn.functional as F
from safetensors.torch import load_file
from torch import Tensor

from tests.hybrid.models import in_text_form
from tests.kernel.delta_reference import recurrence

Tensors = dict[str, Tensor]
_ROPE = ("rope_theta", "partial_rotary_factor")


def logits(folder: Path, ids: Tensor) -> Tensor:
    """[T] -> [T, V] fp64."""
    raw = json.loads((folder / "config.json").read_text())
    config = raw.get("text_config", raw)
    config.setdefault("rope_parameters", {k: config.get(k) for k in _ROPE})
    found = in_text_form(load_file(folder / "model.safetensors"), SimpleNamespace(**config))
    return forward(config, {n: t.double() for n, t in found.items()}, ids)


def forward(
    config: dict[str, Any], tensors: Tensors, ids: Tensor, embedded: Tensor | None = None
) -> Tensor:
    """[T] -> [T, V]; differentiable in the tensors, and in rows [T, H] in place of the ids'."""
    eps = config["rms_norm_eps"]
    embed = tensors["model.embed_tokens.weight"]
    x = embed[ids] if embedded is None else embedded
    for index, kind in enumerate(config["layer_types"]):
        prefix = f"model.layers.{index}."
        own = {n.removeprefix(prefix): t for n, t in tensors.items() if n.startswith(prefix)}
        mixer = attention if kind == "full_attention" else delta
        x = x + mixer(config, own, norm(x, 1 + own["input_layernorm.weight"], eps))
        y = norm(x, 1 + own["post_attention_layernorm.weight"], eps)
        x = x + (moe(config, own, y) if "num_experts" in config else mlp(own, y))
    hidden = norm(x, 1 + tensors["model.norm.weight"], eps)
    return hidden @ tensors.get("lm_head.weight", embed).t()


def norm(x: Tensor, factor: Tensor, eps: float) -> Tensor:
    return x / (x.square().mean(-1, keepdim=True) + eps).sqrt() * factor


def mlp(own: Tensors, x: Tensor, prefix: str = "mlp") -> Tensor:
    gate, up = (x @ own[f"{prefix}.{name}_proj.weight"].t() for name in ("gate", "up"))
    return (F.silu(gate) * up) @ own[f"{prefix}.down_proj.weight"].t()


def moe(config: dict[str, Any], own: Tensors, x: Tensor) -> Tensor:
    scores = (x @ own["mlp.gate.weight"].t()).softmax(-1)
    top, ids = scores.topk(config["num_experts_per_tok"])
    weights = torch.zeros_like(scores).scatter(1, ids, top / top.sum(-1, keepdim=True))
    out = (x @ own["mlp.shared_expert_gate.weight"].t()).sigmoid() * mlp(
        own, x, "mlp.shared_expert"
    )
    for expert in range(config["num_experts"]):
        out = out + weights[:, expert, None] * mlp(own, x, f"mlp.experts.{expert}")
    return out


def attention(config: dict[str, Any], own: Tensors, x: Tensor) -> Tensor:
    dim, eps, length = config["head_dim"], config["rms_norm_eps"], len(x)

    def heads(name: str, width: int) -> Tensor:
        return (x @ own[f"self_attn.{name}_proj.weight"].t()).view(length, -1, width)

    q, gate = heads("q", 2 * dim).chunk(2, -1)
    k, v = heads("k", dim), heads("v", dim)
    q, k = (norm(y, 1 + own[f"self_attn.{n}_norm.weight"], eps) for n, y in (("q", q), ("k", k)))
    rope = config["rope_parameters"]
    turned = int(dim * rope["partial_rotary_factor"])
    # frequencies and angles as the checkpoints were trained: fp32
    steps = torch.arange(0, turned, 2, dtype=torch.float32) / turned
    angles = torch.arange(length).float()[:, None] * (1.0 / rope["rope_theta"] ** steps)
    cos, sin = angles.double().cos()[:, None], angles.double().sin()[:, None]

    def rotate(y: Tensor) -> Tensor:
        first, second, rest = y.split([turned // 2, turned // 2, dim - turned], -1)
        return torch.cat((first * cos - second * sin, second * cos + first * sin, rest), -1)

    group = q.shape[1] // k.shape[1]
    q, k, v = (y.transpose(0, 1) for y in (rotate(q), rotate(k), v))
    scores = q @ k.repeat_interleave(group, 0).mT * dim**-0.5
    hidden = torch.ones(length, length, dtype=torch.bool).triu(1)
    out = scores.masked_fill(hidden, -torch.inf).softmax(-1) @ v.repeat_interleave(group, 0)
    return (out.transpose(0, 1) * gate.sigmoid()).flatten(1) @ own["self_attn.o_proj.weight"].t()


def delta(config: dict[str, Any], own: Tensors, x: Tensor) -> Tensor:
    own = {n.removeprefix("linear_attn."): t for n, t in own.items()}
    key_dim, value_dim = config["linear_key_head_dim"], config["linear_value_head_dim"]
    keys = config["linear_num_key_heads"] * key_dim
    qkv, z, b, a = (x @ own[f"in_proj_{n}.weight"].t() for n in ("qkv", "z", "b", "a"))
    weight = own["conv1d.weight"]
    padded = F.pad(qkv.t()[None], (weight.shape[-1] - 1, 0))
    qkv = F.silu(F.conv1d(padded, weight, groups=len(weight))[0].t())
    q, k, v = qkv.split([keys, keys, qkv.shape[1] - 2 * keys], 1)
    g = -own["A_log"].exp() * F.softplus(a + own["dt_bias"])
    out = recurrence(
        q.unflatten(1, (-1, key_dim)),
        k.unflatten(1, (-1, key_dim)),
        v.unflatten(1, (-1, value_dim)),
        g,
        b.sigmoid(),
        torch.tensor([0, len(x)]),
    )
    out = norm(out, own["norm.weight"], config["rms_norm_eps"])
    out = out * F.silu(z.unflatten(1, (-1, value_dim)))
    return out.flatten(1) @ own["out_proj.weight"].t()
