"""Linear layers, embedding and head: parameters around one operation each."""

from typing import NotRequired, TypedDict, Unpack

import torch
from torch import Tensor, nn

from isomodels.errors import UnsupportedError
from isomodels.kernels.embedding import embedding
from isomodels.kernels.linear import linear
from isomodels.kernels.logprob import lm_head, logprobs, token_logprobs
from isomodels.kernels.row_linear import LEAVES, row_linear


class Placed(TypedDict):
    """Where parameters live; every module takes it as keyword arguments and hands it on."""

    dtype: torch.dtype
    device: NotRequired[torch.device | None]


def parameter(*shape: int, **placed: Unpack[Placed]) -> nn.Parameter:
    """An uninitialised parameter; a checkpoint or a host's initialiser fills it."""
    return nn.Parameter(torch.empty(*shape, **placed))


class Linear(nn.Module):
    """x [T, K] -> [T, N]; weight [N, K]. Each column stands alone, so N may be sharded."""

    def __init__(
        self,
        in_features: int,
        out_features: int,
        *,
        bias: bool = False,
        **placed: Unpack[Placed],
    ):
        super().__init__()
        self.weight = parameter(out_features, in_features, **placed)
        self.bias = parameter(out_features, **placed) if bias else None

    def forward(self, x: Tensor) -> Tensor:
        """[T, K] -> [T, N]."""
        return linear(x, self.weight, self.bias)


class RowLinear(nn.Module):
    """x [T, K] -> [T, N]; K is summed by a fixed tree of leaves, so K may be sharded."""

    def __init__(
        self,
        in_features: int,
        out_features: int,
        **placed: Unpack[Placed],
    ):
        super().__init__()
        if in_features % LEAVES:
            raise UnsupportedError(
                f"a row-parallel linear needs an input size divisible by {LEAVES}, "
                f"got {in_features}"
            )
        self.weight = parameter(out_features, in_features, **placed)

    def forward(self, x: Tensor) -> Tensor:
        """[T, K] -> [T, N]."""
        return row_linear(x, self.weight)


class Embedding(nn.Module):
    """ids [T] -> rows [T, H] of a table [V, H]."""

    def __init__(
        self,
        vocab_size: int,
        hidden_size: int,
        **placed: Unpack[Placed],
    ):
        super().__init__()
        self.weight = parameter(vocab_size, hidden_size, **placed)

    def forward(self, input_ids: Tensor) -> Tensor:
        """[T] int64 -> [T, H]."""
        return embedding(input_ids, self.weight)


class LMHead(nn.Module):
    """Hidden states to logits and logprobs; the weight [V, H] may be the embedding's own."""

    def __init__(
        self,
        hidden_size: int,
        vocab_size: int,
        *,
        tied: bool,
        **placed: Unpack[Placed],
    ):
        super().__init__()
        self.weight = None if tied else parameter(vocab_size, hidden_size, **placed)

    def forward(
        self,
        hidden: Tensor,
        weight: Tensor,
        targets: Tensor | None = None,
        temperature: float | None = None,
    ) -> Tensor:
        """One entry for all results: hosts hang their hooks on module calls.

        hidden [T, H], weight [V, H] -> logits [T, V] fp32; with a temperature, normalised logprobs
        of logits / temperature [T, V] fp32; with targets [T] int64 too, those logprobs at the
        targets [T] fp32, bit for bit.
        """
        if temperature is None:
            return lm_head(hidden, weight)
        if targets is None:
            return logprobs(hidden, weight, temperature)
        return token_logprobs(hidden, weight, targets, temperature)[0]
