"""Where past keys and values live in vLLM: pages, handed to the module as one `PagedKV`.

vLLM's own attention layer is not used: it would bring its own kernels. `CacheLayer` is the
smallest thing for which vLLM allocates pages, one per decoder layer; `BatchBuilder` turns vLLM's
description of a step into one `Batch` that all layers share.
"""

from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor
from vllm.config import VllmConfig
from vllm.model_executor.layers.attention_layer_base import AttentionLayerBase
from vllm.v1.attention.backend import (
    AttentionBackend,
    AttentionCGSupport,
    AttentionMetadataBuilder,
    CommonAttentionMetadata,
)
from vllm.v1.kv_cache_interface import FullAttentionSpec, KVCacheSpec

from isomodels.batch import Batch, PagedKV
from isomodels.errors import UnsupportedError


@dataclass
class StepMetadata:
    """What a step needs; the same object for every layer."""

    batch: Batch
    num_actual_tokens: int


class BatchBuilder(AttentionMetadataBuilder[StepMetadata]):
    """Builds the `Batch` of a step from device tensors, without reading one back.

    Raises:
        UnsupportedError: the layers are not all of the model's that have pages.
    """

    # A captured graph holds the tensors of its batch, which vLLM fills anew for each replay.
    _cudagraph_support = AttentionCGSupport.UNIFORM_SINGLE_TOKEN_DECODE

    def __init__(
        self,
        kv_cache_spec: KVCacheSpec,
        layer_names: list[str],
        vllm_config: VllmConfig,
        device: torch.device,
    ):
        super().__init__(kv_cache_spec, layer_names, vllm_config, device)
        layers = vllm_config.compilation_config.static_forward_context
        self.layers = [layers[name] for name in layer_names]
        if len(self.layers) != sum(isinstance(layer, CacheLayer) for layer in layers.values()):
            raise UnsupportedError(
                "isomodels: vLLM split the attention layers over several caches, which happens "
                "where they outnumber the recurrent layers: that is not supported"
            )

    def build(
        self,
        common_prefix_len: int,
        common_attn_metadata: CommonAttentionMetadata,
        fast_build: bool = False,
        **_: Any,
    ) -> StepMetadata:
        """See the base class. The tensors may be padded: only real tokens are kept."""
        step = common_attn_metadata
        num_tokens = step.num_actual_tokens
        paged = PagedKV(
            # Read at each step: vLLM binds the pages after the builder exists.
            caches=[layer.kv_cache for layer in self.layers],
            block_table=step.block_table_tensor[: step.num_reqs],
            slot_mapping=step.slot_mapping[:num_tokens],
        )
        batch = Batch(
            cu_seqlens_q=step.query_start_loc[: step.num_reqs + 1],
            seq_lens=step.seq_lens[: step.num_reqs],
            max_seqlen_q=step.max_query_len,
            max_seqlen_k=step.max_seq_len,
            paged=paged,
        )
        return StepMetadata(batch, num_tokens)


class PagedBackend(AttentionBackend):
    """What vLLM asks of a backend. The arithmetic is in the module: there is no impl class."""

    supported_dtypes: ClassVar[list[torch.dtype]] = [torch.float32, torch.bfloat16]
    supported_kv_cache_dtypes: ClassVar[list] = ["auto", "bfloat16"]

    @staticmethod
    def get_name() -> str:
        """vLLM's name for a backend that is not its own."""
        return "CUSTOM"

    @staticmethod
    def get_impl_cls() -> type:
        """There is none: vLLM asks for it only through its own attention layer."""
        raise NotImplementedError

    @staticmethod
    def get_builder_cls() -> type[BatchBuilder]:
        """The class that turns a step into a `Batch`."""
        return BatchBuilder


class CacheLayer(AttentionLayerBase):
    """The pages of one decoder layer: `kv_cache` is [num_blocks, kv_heads, block_size, 2 * D]."""

    def __init__(self, name: str, num_kv_heads: int, head_dim: int, dtype: torch.dtype):
        self.name = name
        self.num_kv_heads = num_kv_heads
        self.head_dim = head_dim
        self.dtype = dtype
        self.kv_cache: Tensor = torch.empty(0)

    def get_attn_backend(self) -> type[AttentionBackend]:
        """See the base class."""
        return PagedBackend

    def get_kv_cache_spec(self, vllm_config: VllmConfig) -> KVCacheSpec:
        """Keys and values side by side, in the model's dtype."""
        return FullAttentionSpec(
            block_size=vllm_config.cache_config.block_size,
            num_kv_heads=self.num_kv_heads,
            head_size=self.head_dim,
            dtype=self.dtype,
        )
