"""Grouped-query self-attention over packed sequences or an engine's pages."""

from typing import Unpack

from torch import Tensor, nn

from isomodels.batch import Batch
from isomodels.config import DenseConfig
from isomodels.kernels.attention import attention, paged_attention
from isomodels.layers.collectives import enter, sum_gradients
from isomodels.layers.linear import Linear, Placed, RowLinear
from isomodels.layers.parallel import ALONE, split_kv
from isomodels.layers.rope import HeadNorm, Rope


class AttentionCore(nn.Module):
    """Softmax attention itself: over the packed tokens, or over pages that hold k and v already."""

    def __init__(self, layer_index: int, scale: float):
        super().__init__()
        self.layer_index = layer_index
        self.scale = scale

    def forward(self, q: Tensor, k: Tensor, v: Tensor, batch: Batch) -> Tensor:
        """q [T, heads, D], k and v [T, kv_heads, D] -> [T, heads, D]."""
        if batch.paged is None:
            return attention(q, k, v, batch.cu_seqlens_q, self.scale)[0]
        return paged_attention(
            q,
            batch.paged.caches[self.layer_index],
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
        parallel = self.parallel = placed.get("layout", ALONE).tensor
        self.head_dim = config.head_dim
        heads, kv_heads = config.num_attention_heads, config.num_key_value_heads
        # of this rank; ranks beyond the number of key heads share them
        self.num_heads = heads // parallel.size
        self.num_kv_heads = max(1, kv_heads // parallel.size)
        ranks = (parallel.rank, parallel.size)
        shard = split_kv(heads * self.head_dim, kv_heads, self.head_dim, *ranks)
        width = (heads + 2 * kv_heads) * self.head_dim
        self.qkv_proj = Linear(config.hidden_size, width, bias=qkv_bias, shard=shard, **placed)
        self.rope = Rope(
            config.head_dim,
            config.rope_theta,
            config.max_position_embeddings,
            num_heads=self.num_heads,
            norm_eps=config.rms_norm_eps,
            device=placed.get("device"),
        )
        self.q_norm = HeadNorm(self.head_dim, **placed) if qk_norm else None
        self.k_norm = HeadNorm(self.head_dim, **placed) if qk_norm else None
        self.attn = AttentionCore(layer_index, config.head_dim**-0.5)
        self.o_proj = RowLinear(heads * self.head_dim, config.hidden_size, **placed)

    def forward(self, x: Tensor, positions: Tensor, batch: Batch) -> Tensor:
        """x [T, H], positions [T] -> [T, H]."""
        heads = self.num_heads + 2 * self.num_kv_heads
        x = enter(x, self.parallel)
        qkv = self.qkv_proj(x).view(len(x), heads, self.head_dim)
        # each rank norms its own heads
        norms = (self.q_norm, self.k_norm)
        weights = [n if n is None else sum_gradients(n.weight, self.parallel) for n in norms]
        paged = batch.paged
        cache = paged and (paged.caches[self.attn.layer_index], paged.slot_mapping)
        # [T, heads, D], twice [T, kv_heads, D]
        q, k, v = self.rope(qkv, positions, *weights, cache)
        return self.o_proj(self.attn(q, k, v, batch).flatten(1))  # [T, heads * D] -> [T, H]
