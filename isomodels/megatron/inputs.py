"""Reads Megatron's ways of giving tokens into what the core takes, and refuses the rest."""

from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor

from isomodels.batch import Batch
from isomodels.errors import UnsupportedError


@dataclass(frozen=True)
class Tokens:
    """Tokens of one microbatch, flat. T = batch * length.

    Attributes:
        input_ids: [T] int64.
        positions: [T] int64, counted from 0 in each sequence.
        batch: bounds of the sequences.
    """

    input_ids: Tensor
    positions: Tensor
    batch: Batch


def read_tokens(
    input_ids: Tensor,
    position_ids: Tensor | None,
    attention_mask: Tensor | None,
    packed_seq_params: Any | None,
    max_positions: int,
) -> Tokens:
    """Reads a dense batch [b, s] or a packed one ("thd", [1, T]).

    Args:
        input_ids: [b, s], or [1, T] with `packed_seq_params`.
        position_ids: None, or the positions that the sequences have anyway: 0, 1, 2, ...
        attention_mask: None, or the causal mask [b, 1, s, s], bool, True where a key is hidden.
        packed_seq_params: Megatron's `PackedSeqParams` with `qkv_format="thd"`.
        max_positions: longest sequence of the model.

    Raises:
        UnsupportedError: for another mask, other positions, or a longer sequence.
        ValueError: for shapes that do not fit together.
    """
    if input_ids.dim() != 2:
        raise ValueError(f"input_ids must be [batch, length], got {list(input_ids.shape)}")
    if packed_seq_params is None:
        lengths, bounds = _dense_bounds(input_ids)
        _check_causal(attention_mask, input_ids.shape[1])
    else:
        if attention_mask is not None:
            raise UnsupportedError(
                "attention_mask must be None for packed sequences: each one is causal by itself"
            )
        lengths, bounds = _packed_bounds(input_ids, packed_seq_params)
    longest = max(lengths, default=0)
    if longest > max_positions:
        raise UnsupportedError(
            f"a sequence of {longest} tokens is longer than max_position_embeddings = "
            f"{max_positions}"
        )
    positions = Batch.positions(bounds)
    if position_ids is not None and not torch.equal(
        position_ids.expand_as(input_ids).reshape(-1), positions
    ):
        raise UnsupportedError(
            "position_ids must count 0, 1, 2, ... in each sequence; pad on the right, or pack "
            "with packed_seq_params"
        )
    return Tokens(input_ids.reshape(-1), positions, Batch.packed(bounds))


def _dense_bounds(input_ids: Tensor) -> tuple[list[int], Tensor]:
    batch, length = input_ids.shape
    bounds = torch.arange(batch + 1, dtype=torch.int32, device=input_ids.device) * length
    return [length] * batch, bounds


def _packed_bounds(input_ids: Tensor, params: Any) -> tuple[list[int], Tensor]:
    if params.qkv_format not in (None, "thd"):
        raise UnsupportedError(f"packed sequences must be in thd format, got {params.qkv_format}")
    if (getattr(params, "local_cp_size", None) or 1) > 1:
        raise UnsupportedError(
            f"packed sequences with local_cp_size {params.local_cp_size} are cut among ranks, and "
            "context parallelism is not supported: give whole sequences"
        )
    _check_same_keys(params.cu_seqlens_q, params.cu_seqlens_kv)
    _check_same_keys(params.cu_seqlens_q_padded, params.cu_seqlens_kv_padded)
    # Padded bounds count the padding that follows each sequence; causal rows before it ignore it.
    bounds = params.cu_seqlens_q_padded
    if bounds is None:
        bounds = params.cu_seqlens_q
    if bounds is None:
        raise ValueError("packed_seq_params has neither cu_seqlens_q nor cu_seqlens_q_padded")
    edges = bounds.tolist()
    lengths = [end - start for start, end in pairwise(edges)]
    if input_ids.shape[0] != 1 or edges[0] != 0 or edges[-1] != input_ids.shape[1]:
        raise ValueError(
            f"packed sequences need input_ids [1, T] and bounds from 0 to T, got "
            f"{list(input_ids.shape)} and bounds from {edges[0]} to {edges[-1]}"
        )
    if min(lengths, default=0) < 0:
        raise ValueError("the bounds of packed sequences must not decrease")
    return lengths, bounds.to(device=input_ids.device, dtype=torch.int32)


def _check_same_keys(queries: Tensor | None, keys: Tensor | None) -> None:
    if queries is None or keys is None or keys is queries:
        return
    if keys.tolist() != queries.tolist():
        raise UnsupportedError(
            "cu_seqlens_kv must be cu_seqlens_q: each sequence attends to itself"
        )


def _check_causal(mask: Tensor | None, length: int) -> None:
    if mask is None:
        return
    causal = torch.ones(length, length, dtype=torch.bool, device=mask.device).triu(1)
    if (
        mask.dtype != torch.bool
        or mask.dim() != 4
        or mask.shape[1:] != (1, length, length)
        or not torch.equal(mask, causal.expand_as(mask))
    ):
        raise UnsupportedError(
            "attention_mask must be None or the causal mask [b, 1, s, s] (True = hidden); "
            "pad on the right, or pack with packed_seq_params"
        )
