"""What a forward needs beside tokens and positions: sequence bounds, and where the past lies."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class PagedKV:
    """An engine's pages.

    Attributes:
        caches: one tensor a layer, [num_blocks, num_kv_heads, block_size, 2 * head_dim], K then V,
            any strides.
        block_table: [num_seqs, max_blocks] int32.
        slot_mapping: [num_tokens] int64, block * block_size + offset of each new token.
    """

    caches: Sequence[Tensor]
    block_table: Tensor
    slot_mapping: Tensor


@dataclass(frozen=True)
class PagedStates:
    """An engine's recurrent states, of those layers that have one, in their order.

    Attributes:
        tensors: by layer, the tensors of a state, each [num_slots, ...], any strides. A state
            belongs to the number of tokens in it: the open chunk's length is not stored.
        slots: by layer, [num_seqs] int32: an engine may lay out each layer's states by itself.
    """

    tensors: Sequence[Sequence[Tensor]]
    slots: Sequence[Tensor]


@dataclass(frozen=True)
class Batch:
    """Sequences along one flat token axis.

    Attributes:
        cu_seqlens_q: [num_seqs + 1] int32, bounds of each sequence's new tokens.
        seq_lens: [num_seqs] int32, length of each history, the new tokens included.
        max_seqlen_q: longest run of new tokens.
        max_seqlen_k: longest history.
        paged: the engine's pages, or None where the packed tokens are all there is (a trainer).
        states: the engine's recurrent states, likewise.
    """

    cu_seqlens_q: Tensor
    seq_lens: Tensor
    max_seqlen_q: int
    max_seqlen_k: int
    paged: PagedKV | None = None
    states: PagedStates | None = None

    @staticmethod
    def packed(cu_seqlens: Tensor) -> "Batch":
        """Whole sequences, packed: cu_seqlens [num_seqs + 1] int32."""
        lengths = (cu_seqlens[1:] - cu_seqlens[:-1]).to(torch.int32)
        longest = int(lengths.max()) if len(lengths) else 0
        return Batch(cu_seqlens.to(torch.int32), lengths, longest, longest)

    @staticmethod
    def positions(cu_seqlens: Tensor) -> Tensor:
        """Positions [T] int64 of packed whole sequences, each from 0."""
        lengths = (cu_seqlens[1:] - cu_seqlens[:-1]).long()
        starts = torch.repeat_interleave(cu_seqlens[:-1].long(), lengths)
        return torch.arange(len(starts), device=cu_seqlens.device) - starts
