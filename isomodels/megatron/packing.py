"""Packs token sequences into Megatron's "thd" microbatches."""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise

import torch
from megatron.core.packed_seq_params import PackedSeqParams
from torch import Tensor


@dataclass(frozen=True)
class Pack:
    """One microbatch of whole sequences. T tokens in all.

    Attributes:
        input_ids: [1, T] int64.
        targets: [1, T] int64, the next token; 0 where there is none.
        keep: [T] bool, whether the position has a target.
        params: Megatron's bounds.
        bounds: (start, end) of each sequence that was given.
    """

    input_ids: Tensor
    targets: Tensor
    keep: Tensor
    params: PackedSeqParams
    bounds: list[tuple[int, int]]


def pack(
    sequences: Sequence[Sequence[int]],
    max_tokens: int,
    device: torch.device | None = None,
    *,
    multiple: int = 1,
) -> list[Pack]:
    """Packs sequences in their order into microbatches of at most `max_tokens` tokens.

    A longer sequence is a microbatch alone. A microbatch is filled up to a `multiple` of tokens by
    a sequence without targets, which no other token sees.

    Raises:
        ValueError: for no sequence, or an empty one.
    """
    if not sequences or any(len(sequence) == 0 for sequence in sequences):
        raise ValueError("there must be a sequence, and each needs at least one token")
    groups: list[list[Sequence[int]]] = []
    used = 0
    for sequence in sequences:
        if not groups or used + len(sequence) > max_tokens:
            groups.append([])
            used = 0
        groups[-1].append(sequence)
        used += len(sequence)
    return [_pack_one(group, device, multiple) for group in groups]


def _pack_one(sequences: list[Sequence[int]], device: torch.device | None, multiple: int) -> Pack:
    count = len(sequences)
    if missing := -sum(map(len, sequences)) % multiple:
        sequences = [*sequences, [0] * missing]
    edges = [0, *accumulate(len(sequence) for sequence in sequences)]
    ids: list[int] = []
    targets: list[int] = []
    keep: list[bool] = []
    for number, sequence in enumerate(sequences):
        ids += sequence
        targets += [*sequence[1:], 0]
        keep += [number < count] * (len(sequence) - 1) + [False]
    cu_seqlens = torch.tensor(edges, dtype=torch.int32, device=device)
    longest = max(map(len, sequences))
    return Pack(
        input_ids=torch.tensor([ids], dtype=torch.int64, device=device),
        targets=torch.tensor([targets], dtype=torch.int64, device=device),
        keep=torch.tensor(keep, device=device),
        params=PackedSeqParams(
            qkv_format="thd",
            cu_seqlens_q=cu_seqlens,
            cu_seqlens_kv=cu_seqlens,
            max_seqlen_q=longest,
            max_seqlen_kv=longest,
        ),
        bounds=list(pairwise(edges))[:count],
    )
