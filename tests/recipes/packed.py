"""Sequences as the frameworks pack them, and what their logprobs must be."""

from itertools import chain

import torch
from megatron.core.packed_seq_params import PackedSeqParams
from torch import Tensor

from isomodels.megatron import Trainer
from isomodels.validate.bits import bits

ALIGN = 8  # frameworks pad each packed sequence to a multiple


def packed(sequences: list[list[int]]) -> tuple[Tensor, PackedSeqParams]:
    """[1, T] tokens and bounds, each sequence padded to a multiple of `ALIGN`."""
    padded = [[*s, *[0] * (-len(s) % ALIGN)] for s in sequences]
    edges, real = ([0], [0])
    for long, short in zip(padded, sequences, strict=True):
        edges.append(edges[-1] + len(long))
        real.append(real[-1] + len(short))
    bounds, given = (torch.tensor(e, dtype=torch.int32) for e in (edges, real))
    params = PackedSeqParams(
        qkv_format="thd",
        cu_seqlens_q=given,
        cu_seqlens_kv=given,
        cu_seqlens_q_padded=bounds,
        cu_seqlens_kv_padded=bounds,
        max_seqlen_q=max(map(len, padded)),
        max_seqlen_kv=max(map(len, padded)),
    )
    return torch.tensor([list(chain.from_iterable(padded))]), params


def left_padded(sequences: list[list[int]]) -> tuple[Tensor, Tensor]:
    """Tokens and mask [B, S], as SkyRL holds them."""
    longest = max(map(len, sequences)) + 2
    pads = [longest - len(s) for s in sequences]
    tokens = [[0] * pad + s for pad, s in zip(pads, sequences, strict=True)]
    mask = [[0] * pad + [1] * len(s) for pad, s in zip(pads, sequences, strict=True)]
    return torch.tensor(tokens), torch.tensor(mask)


def rows_of(params: PackedSeqParams, rows: Tensor, sequences: list[list[int]]) -> list[Tensor]:
    """[T] -> for each sequence the logprobs of its tokens but the first."""
    starts = params.cu_seqlens_q_padded.tolist()
    return [rows[s : s + len(q) - 1] for s, q in zip(starts, sequences, strict=False)]


def assert_same(found: Tensor, wanted: Tensor) -> None:
    assert torch.equal(bits(found), bits(wanted))


def assert_trains(trainer: Trainer, logprobs: Tensor) -> None:
    """Gradients of the logprobs reach the model."""
    trainer.ddp.zero_grad_buffer()
    logprobs.sum().backward()
    gradient = trainer.core.model.embed_tokens.weight.main_grad
    assert gradient.abs().sum() > 0
    trainer.ddp.zero_grad_buffer()
