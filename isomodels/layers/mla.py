"""Multi-head latent attention. R: kv_lora_rank, P: rotary size, D: nope + P, V: value size."""

from typing import Unpack

import torch
from torch import Tensor, nn

from isomodels.batch import Batch
from isomodels.kernels.mla_attention import (
    mla_attention,
    paged_mla_attention,
    write_latent_cache,
)
from isomodels.kernels.rope import rope
from isomodels.kernels.yarn import Yarn, yarn_table
from isomodels.layers.collectives import enter
from isomodels.layers.linear import Linear, Placed, RowLinear, parameter
from isomodels.layers.mla_config import LatentMoEConfig
from isomodels.layers.norm import RMSNorm
from isomodels.layers.parallel import ALONE, split, split_shared


class RotaryPart(nn.Module):
    """Rotates the rotary part of queries or of the shared key.

    DeepSeek's checkpoints hold the two numbers of a rotation side by side (`interleaved`). They
    leave here half-split, on both sides of every score.
    """

    def __init__(
        self,
        dim: int,
        theta: float,
        max_positions: int,
        yarn: Yarn | None,
        *,
        interleaved: bool,
        **placed: Unpack[Placed],
    ):
        super().__init__()
        self.table_key = (dim, theta, max_positions, yarn)
        self.interleaved = interleaved
        # Made once, here: a forward then runs operators only.
        yarn_table(*self.table_key, torch.device(placed.get("device") or "cpu"))

    def forward(self, x: Tensor, positions: Tensor) -> Tensor:
        """x [T, heads, P], positions [T] int64 -> [T, heads, P]."""
        if self.interleaved:
            x = x.unflatten(-1, (-1, 2)).transpose(-1, -2).flatten(-2)  # pairs -> halves, a copy
        return rope(x, positions, self._table(x.device), None, 0.0)

    # torch.compile then takes the table as it is, and does not look into its making.
    @torch.compiler.assume_constant_result
    def _table(self, device: torch.device) -> Tensor:
        return yarn_table(*self.table_key, device)


class LatentCore(nn.Module):
    """Attention over latents; the only place where trainer and engine part ways.

    The module is named after the weight that it holds, `kv_b_proj`: W_UK and W_UV of every head,
    which the operator reads as views.
    """

    def __init__(self, config: LatentMoEConfig, layer_index: int, **placed: Unpack[Placed]):
        super().__init__()
        self.layer_index = layer_index
        self.scale = config.softmax_scale
        parallel = placed.get("layout", ALONE).tensor
        rows = config.num_attention_heads * (config.qk_nope_head_dim + config.v_head_dim)
        shard = split([rows], parallel.rank, parallel.size)
        self.weight = parameter(shard.length, config.kv_lora_rank, **placed)
        self.shards = {"weight": shard} if parallel.size > 1 else {}

    def forward(
        self, q_nope: Tensor, q_rope: Tensor, latent: Tensor, k_rope: Tensor, batch: Batch
    ) -> Tensor:
        """q_nope [T, heads, D - P], q_rope [T, heads, P], latent [T, R], k_rope [T, P]
        -> [T, heads, V].
        """
        if batch.paged is None:
            keys = (latent, k_rope, self.weight, batch.cu_seqlens_q)
            return mla_attention(q_nope, q_rope, *keys, self.scale)[0]
        cache = batch.paged.caches[self.layer_index]
        write_latent_cache(latent, k_rope, cache, batch.paged.slot_mapping)
        return paged_mla_attention(
            q_nope,
            q_rope,
            cache,
            self.weight,
            batch.paged.block_table,
            batch.cu_seqlens_q,
            batch.seq_lens,
            self.scale,
            batch.max_seqlen_q,
            batch.max_seqlen_k,
        )


class LatentAttention(nn.Module):
    """Projections to latents, their norms, rope on the rotary parts, attention, output projection.

    `qkv_a_proj` gives [q's latent | kv latent | rotary key], or q itself where there is no
    `q_lora_rank`. A rank of tensor parallelism has its own heads and all of the latents, so that
    its gradients of these are a part of the whole.
    """

    def __init__(self, config: LatentMoEConfig, layer_index: int, **placed: Unpack[Placed]):
        super().__init__()
        parallel = self.parallel = placed.get("layout", ALONE).tensor
        ranks = (parallel.rank, parallel.size)
        heads, head_dim = config.num_attention_heads, config.head_dim
        self.num_heads = heads // parallel.size
        self.query_split = (config.qk_nope_head_dim, config.qk_rope_head_dim)
        hidden, rank, eps = config.hidden_size, config.q_lora_rank, config.norm_eps_of_latents
        queries, latents = heads * head_dim, (config.kv_lora_rank, config.qk_rope_head_dim)
        self.split = (rank or queries // parallel.size, *latents)
        shard = split_shared([rank or queries, *latents], [rank is None, False, False], *ranks)
        whole = (rank or queries) + sum(latents)
        self.qkv_a_proj = Linear(hidden, whole, shard=shard, **placed)
        self.q_a_layernorm = None if rank is None else RMSNorm(rank, eps, partial=True, **placed)
        self.q_b_proj = None
        if rank is not None:
            self.q_b_proj = Linear(rank, queries, shard=split([queries], *ranks), **placed)
        self.kv_a_layernorm = RMSNorm(config.kv_lora_rank, eps, partial=True, **placed)
        self.q_rope, self.k_rope = (
            RotaryPart(
                config.qk_rope_head_dim,
                config.rope_theta,
                config.max_position_embeddings,
                config.yarn,
                interleaved=config.rope_interleave,
                **placed,
            )
            for _ in range(2)
        )
        self.kv_b_proj = LatentCore(config, layer_index, **placed)
        self.o_proj = RowLinear(heads * config.v_head_dim, hidden, **placed)

    def forward(self, x: Tensor, positions: Tensor, batch: Batch) -> Tensor:
        """x [T, H], positions [T] -> [T, H]."""
        x = enter(x, self.parallel)
        q, latent, k_rope = self.qkv_a_proj(x).split(self.split, dim=1)
        if self.q_a_layernorm is not None and self.q_b_proj is not None:
            q = self.q_b_proj(self.q_a_layernorm(q, None)[0])  # [T, rank] -> [T, heads * D]
        latent, _ = self.kv_a_layernorm(latent, None)
        q_nope, q_rope = q.unflatten(1, (self.num_heads, -1)).split(self.query_split, dim=2)
        q_rope = self.q_rope(q_rope, positions)
        k_rope = self.k_rope(k_rope.unsqueeze(1), positions).squeeze(1)  # [T, P]
        out = self.kv_b_proj(q_nope, q_rope, latent, k_rope, batch)  # [T, heads, V]
        return self.o_proj(out.flatten(1))
