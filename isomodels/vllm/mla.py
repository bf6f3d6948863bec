"""Pages of latents, for models with latent attention.

vLLM's own latent attention is not used: it would bring its own kernels, and on the CPU it gives up
chunked prefill and prefix caching.
"""

from typing import Any

import torch
from vllm.config import VllmConfig
from vllm.v1.kv_cache_interface import KVCacheSpec, MLAAttentionSpec

from isomodels.layers.mla_config import LatentMoEConfig
from isomodels.vllm.attention import CacheLayer


class LatentCacheLayer(CacheLayer):
    """The pages of one decoder layer: `kv_cache` is [num_blocks, 1, block_size, R + P]."""

    def get_kv_cache_spec(self, vllm_config: VllmConfig) -> KVCacheSpec:
        """One row a token, in the model's dtype; there are no values beside it."""
        return MLAAttentionSpec(
            block_size=vllm_config.cache_config.block_size,
            num_kv_heads=self.num_kv_heads,
            head_size=self.head_dim,
            dtype=self.dtype,
        )


def cache_layer(name: str, config: Any, dtype: torch.dtype, ranks: int = 1) -> CacheLayer:
    """The pages of a layer, by the attention that the config states.

    Of `ranks` of tensor parallelism each has its own key-value heads, and all of the latents.
    """
    if isinstance(config, LatentMoEConfig):
        return LatentCacheLayer(name, 1, config.latent_width, dtype)
    return CacheLayer(name, max(1, config.num_key_value_heads // ranks), config.head_dim, dtype)


def leave_own_mla(vllm_config: Any) -> None:
    """Tell vLLM that none of its own latent attention runs, before it plans by that.

    On the CPU it turns off chunked prefill and prefix caching where its own would run.
    """
    vllm_config.model_config.model_arch_config.is_deepseek_mla = False
