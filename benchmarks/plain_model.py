"""The training row's baseline: the same layers in plain PyTorch, as a careful user writes them.

cuBLAS linears (qkv, and gate with up, fused), torch's variable-length flash attention, the glue and
the loss left to `torch.compile`, which is applied to a layer at a time: one compilation serves all
layers. Parameters have the names of our module, so one state dict fills both.
"""

import inspect
import itertools
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.attention.varlen import varlen_attn

# `is_causal` became a window in later versions; grouped heads must be named in some.
_PARAMETERS = inspect.signature(varlen_attn).parameters
_CAUSAL: dict[str, Any] = (
    {"is_causal": True} if "is_causal" in _PARAMETERS else {"window_size": (-1, 0)}
)
_GROUPED: dict[str, Any] = {"enable_gqa": True} if "enable_gqa" in _PARAMETERS else {}


class Weight(nn.Module):
    """A parameter under the name `weight`."""

    def __init__(self, *shape: int, **placed: Any):
        super().__init__()
        self.weight = nn.Parameter(torch.empty(*shape, **placed))


class Attention(nn.Module):
    def __init__(self, config: Any, **placed: Any):
        super().__init__()
        self.heads = (config.num_attention_heads, *[config.num_key_value_heads] * 2)
        self.head_dim, self.eps = config.head_dim, config.rms_norm_eps
        self.qkv_proj = Weight(sum(self.heads) * self.head_dim, config.hidden_size, **placed)
        self.q_norm, self.k_norm = Weight(self.head_dim, **placed), Weight(self.head_dim, **placed)
        self.o_proj = Weight(config.hidden_size, self.heads[0] * self.head_dim, **placed)

    def forward(self, x: Tensor, rotation: Tensor, bounds: Tensor, longest: int) -> Tensor:
        """x [T, H], rotation [T, 1, 2, D/2] fp32: cosines and sines."""
        qkv = F.linear(x, self.qkv_proj.weight).view(len(x), sum(self.heads), self.head_dim)
        q, k, v = qkv.split(self.heads, 1)
        q = rotate(F.rms_norm(q, (self.head_dim,), self.q_norm.weight, self.eps), rotation)
        k = rotate(F.rms_norm(k, (self.head_dim,), self.k_norm.weight, self.eps), rotation)
        attend = _flash if x.is_cuda else _one_by_one
        return F.linear(attend(q, k, v, bounds, longest).flatten(1), self.o_proj.weight)


def rotate(x: Tensor, rotation: Tensor) -> Tensor:
    """x [T, heads, D], by halves."""
    cos, sin = rotation.unbind(2)  # [T, 1, D/2] each
    a, b = x.float().chunk(2, -1)
    return torch.cat((a * cos - b * sin, b * cos + a * sin), -1).to(x.dtype)


def _flash(q: Tensor, k: Tensor, v: Tensor, bounds: Tensor, longest: int) -> Tensor:
    return varlen_attn(q, k, v, bounds, bounds, longest, longest, **_CAUSAL, **_GROUPED)


def _one_by_one(q: Tensor, k: Tensor, v: Tensor, bounds: Tensor, longest: int) -> Tensor:
    """On the CPU, for tests: torch's variable-length attention is for GPUs alone."""
    parts = []
    for start, end in itertools.pairwise(bounds.tolist()):
        heads = (x[start:end].transpose(0, 1) for x in (q, k, v))
        part = F.scaled_dot_product_attention(*heads, is_causal=True, enable_gqa=True)
        parts.append(part.transpose(0, 1))
    return torch.cat(parts)


class MLP(nn.Module):
    def __init__(self, config: Any, **placed: Any):
        super().__init__()
        self.gate_up_proj = Weight(2 * config.intermediate_size, config.hidden_size, **placed)
        self.down_proj = Weight(config.hidden_size, config.intermediate_size, **placed)

    def forward(self, x: Tensor) -> Tensor:
        gate, up = F.linear(x, self.gate_up_proj.weight).chunk(2, -1)
        return F.linear(F.silu(gate) * up, self.down_proj.weight)


class Layer(nn.Module):
    def __init__(self, config: Any, **placed: Any):
        super().__init__()
        self.eps = config.rms_norm_eps
        self.input_layernorm = Weight(config.hidden_size, **placed)
        self.self_attn = Attention(config, **placed)
        self.post_attention_layernorm = Weight(config.hidden_size, **placed)
        self.mlp = MLP(config, **placed)

    def forward(self, x: Tensor, rotation: Tensor, bounds: Tensor, longest: int) -> Tensor:
        normed = F.rms_norm(x, (x.shape[1],), self.input_layernorm.weight, self.eps)
        x = x + self.self_attn(normed, rotation, bounds, longest)
        normed = F.rms_norm(x, (x.shape[1],), self.post_attention_layernorm.weight, self.eps)
        return x + self.mlp(normed)


class Body(nn.Module):
    def __init__(self, config: Any, **placed: Any):
        super().__init__()
        self.embed_tokens = Weight(config.vocab_size, config.hidden_size, **placed)
        self.layers = nn.ModuleList(
            Layer(config, **placed) for _ in range(config.num_hidden_layers)
        )
        self.norm = Weight(config.hidden_size, **placed)


class PlainModel(nn.Module):
    """A Qwen3 for training.

    Args:
        config: as our module's.
        compiled: compile each layer, and the head with the loss.
        placed: dtype and device.
    """

    def __init__(self, config: Any, *, compiled: bool, **placed: Any):
        super().__init__()
        self.config = config
        self.model = Body(config, **placed)
        self.lm_head = Weight(config.vocab_size, config.hidden_size, **placed)
        self.loss = head_loss
        if compiled:
            for layer in self.model.layers:
                layer.compile()
            self.loss = torch.compile(head_loss)
        exponents = torch.arange(0, config.head_dim, 2, device=placed.get("device"))
        self.frequencies = config.rope_theta ** -(exponents.float() / config.head_dim)

    def forward(
        self, ids: Tensor, positions: Tensor, bounds: Tensor, longest: int, targets: Tensor
    ) -> Tensor:
        """ids, positions, targets [T], bounds [num_seqs + 1] int32 -> mean loss."""
        angles = positions[:, None].float() * self.frequencies
        rotation = torch.stack((angles.cos(), angles.sin()), 1)[:, None]  # [T, 1, 2, D/2]
        x = F.embedding(ids, self.model.embed_tokens.weight)
        for layer in self.model.layers:
            x = layer(x, rotation, bounds, longest)
        eps = self.config.rms_norm_eps
        return self.loss(x, self.model.norm.weight, self.lm_head.weight, targets, eps)


def head_loss(x: Tensor, norm: Tensor, head: Tensor, targets: Tensor, eps: float) -> Tensor:
    """Final norm, logits, cross entropy in fp32."""
    logits = F.linear(F.rms_norm(x, (x.shape[1],), norm, eps), head)
    return F.cross_entropy(logits.float(), targets)
