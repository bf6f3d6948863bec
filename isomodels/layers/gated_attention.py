"""Grouped-query attention whose output each head gates: Qwen3-Next and Qwen3.5."""

from typing import Unpack

from torch import Tensor, nn

from isomodels.batch import Batch
from isomodels.kernels.attention import write_kv_cache
from isomodels.kernels.sigmoid_gate import sigmoid_gate
from isomodels.layers.attention import AttentionCore
from isomodels.layers.collectives import enter
from isomodels.layers.hybrid_config import HybridConfig
from isomodels.layers.linear import Linear, Placed, RowLinear
from isomodels.layers.parallel import ALONE, split_kv
from isomodels.layers.zero_centred import PartialRope


class OutputGate(nn.Module):
    """x * sigmoid(gate), head by head."""

    def forward(self, x: Tensor, gate: Tensor) -> Tensor:
        """x and gate [T, heads, D] -> [T, heads, D]."""
        return sigmoid_gate(x, gate)


class GatedAttention(nn.Module):
    """qkv projection with a gate beside each query, norm and partial rope, attention, gate.

    Args:
        config: the architecture's.
        cache_index: which of the engine's pages are this layer's.
    """

    def __init__(self, config: HybridConfig, cache_index: int, **placed: Unpack[Placed]):
        super().__init__()
        parallel = self.parallel = placed.get("layout", ALONE).tensor
        self.head_dim = config.head_dim
        heads, kv_heads = config.num_attention_heads, config.num_key_value_heads
        # of this rank; ranks beyond the number of key heads share them
        self.num_heads = heads // parallel.size
        self.num_kv_heads = max(1, kv_heads // parallel.size)
        ranks = (parallel.rank, parallel.size)
        shard = split_kv(2 * heads * self.head_dim, kv_heads, self.head_dim, *ranks)
        width = 2 * (heads + kv_heads) * self.head_dim
        self.qkv_proj = Linear(config.hidden_size, width, shard=shard, **placed)
        rope = (config.head_dim, config.rotary_dim, config.rope_theta)
        limits = (config.max_position_embeddings, config.rms_norm_eps)
        self.q_norm = PartialRope(*rope, *limits, **placed)
        self.k_norm = PartialRope(*rope, *limits, **placed)
        self.attn = AttentionCore(cache_index, config.head_dim**-0.5)
        self.gate = OutputGate()
        self.o_proj = RowLinear(heads * self.head_dim, config.hidden_size, **placed)

    def forward(self, x: Tensor, positions: Tensor, batch: Batch) -> Tensor:
        """x [T, H], positions [T] -> [T, H]."""
        # the rows of a head are its query and then its gate
        x = enter(x, self.parallel)
        sizes = (2 * self.num_heads, self.num_kv_heads, self.num_kv_heads)
        heads = self.qkv_proj(x).unflatten(1, (-1, self.head_dim))
        queries, k, v = heads.split(sizes, dim=1)  # [T, 2 heads, D], twice [T, kv_heads, D]
        q, gate = queries.unflatten(1, (self.num_heads, 2)).unbind(2)  # [T, heads, D] each
        q, k = self.q_norm(q, positions), self.k_norm(k, positions)
        if batch.paged is not None:
            cache = batch.paged.caches[self.attn.layer_index]
            write_kv_cache(k, v, cache, batch.paged.slot_mapping)
        return self.o_proj(self.gate(self.attn(q, k, v, batch), gate).flatten(1))
