"""Grouped-query self-attention over packed sequences or an engine's pages."""

from typing import Unpack

from torch import Tensor, nn

from isomodels.batch import Batch
from isomodels.config import DenseConfig
from isomodels.kernels.attention import attention, paged_attention, write_kv_cache
from isomodels.layers.linear import Linear, Placed, RowLinear
from isomodels.layers.rope import Rope


class AttentionCore(nn.Module):
    """Softmax attention itself; the only place where trainer and engine part ways."""

    def __init__(self, layer_index: int, scale: float):
        super().__init__()
        self.layer_index = layer_index
        self.scale = scale

    def forward(self, q: Tensor, k: Tensor, v: Tensor, batch: Batch) -> Tensor:
        """q [T, heads, D], k and v [T, kv_heads, D] -> [T, heads, D]."""
        if batch.paged is None:
            return attention(q, k, v, batch.cu_seqlens_q, self.scale)[0]
        kv_cache = batch.paged.caches[self.layer_index]
        write_kv_cache(k, v, kv_cache, batch.paged.slot_mapping)
        return paged_attention(
            q,
            kv_cache,
            batch.paged.block_table,
            batch.cu_seqlens_q,
            batch.seq_lens,
            self.scale,
            batch.max_seqlen_q,
            batch.max_seqlen_k,
        )


class SelfAttention(nn.Module):
    """qkv projection, rope (with qk-norm or without), attention, output projection."""

    def __init__(
        self,
        config: DenseConfig,
        layer_index: int,
        *,
        qkv_bias: bool,
        qk_norm: bool,
        **placed: Unpack[Placed],
    ):
        super().__init__()
        self.head_dim = config.head_dim
        self.num_heads = config.num_attention_heads
        self.num_kv_heads = config.num_key_value_heads
        heads = self.num_heads + 2 * self.num_kv_heads
        self.qkv_proj = Linear(config.hidden_size, heads * self.head_dim, bias=qkv_bias, **placed)
        rope_args = (config.head_dim, config.rope_theta, config.max_position_embeddings)
        norm_eps = config.rms_norm_eps if qk_norm else None
        self.q_norm = Rope(*rope_args, norm_eps=norm_eps, **placed)
        self.k_norm = Rope(*rope_args, norm_eps=norm_eps, **placed)
        self.attn = AttentionCore(layer_index, config.head_dim**-0.5)
        self.o_proj = RowLinear(self.num_heads * self.head_dim, config.hidden_size, **placed)

    def forward(self, x: Tensor, positions: Tensor, batch: Batch) -> Tensor:
        """x [T, H], positions [T] -> [T, H]."""
        heads = (self.num_heads, self.num_kv_heads, self.num_kv_heads)
        qkv = self.qkv_proj(x).view(len(x), sum(heads), self.head_dim)
        q, k, v = qkv.split(heads, dim=1)  # [T, heads, D], twice [T, kv_heads, D]
        q, k = self.q_norm(q, positions), self.k_norm(k, positions)
        return self.o_proj(self.attn(q, k, v, batch).flatten(1))  # [T, heads * D] -> [T, H]
