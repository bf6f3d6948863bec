"""Linear layers, embedding and head: parameters around one operation each."""

from typing import NotRequired, TypedDict, Unpack

import torch
from torch import Tensor, nn

from isomodels.errors import UnsupportedError
from isomodels.kernels.embedding import embedding
from isomodels.kernels.linear import linear
from isomodels.kernels.logprob import lm_head, log_normalize, logprobs
from isomodels.kernels.logprob_kept import target_logprobs
from isomodels.kernels.row_linear import LEAVES, row_linear
from isomodels.kernels.vocab_parallel import VocabShard
from isomodels.layers.collectives import (
    gather_columns,
    row_parallel,
    select_rows,
    sum_shared_rows,
    vocab_token_logprobs,
)
from isomodels.layers.parallel import ALONE, Layout, Shard, ranks_of_leaf, split_leaves, split_vocab


class Placed(TypedDict):
    """Where parameters live; every module takes it as keyword arguments and hands it on."""

    dtype: torch.dtype
    device: NotRequired[torch.device | None]
    layout: NotRequired[Layout]


def parameter(*shape: int, **placed: Unpack[Placed]) -> nn.Parameter:
    """An uninitialised parameter; a checkpoint or a host's initialiser fills it."""
    return nn.Parameter(torch.empty(*shape, dtype=placed["dtype"], device=placed.get("device")))


class Linear(nn.Module):
    """x [T, K] -> [T, N]; weight [N, K]. Each column stands alone, so N may be sharded.

    With `shard`, the rows of the whole weight that this rank holds, the output has their columns.
    """

    def __init__(
        self,
        in_features: int,
        out_features: int,
        *,
        bias: bool = False,
        shard: Shard | None = None,
        **placed: Unpack[Placed],
    ):
        super().__init__()
        self.parallel = placed.get("layout", ALONE).tensor
        rows = out_features if shard is None else shard.length
        self.weight = parameter(rows, in_features, **placed)
        self.bias = parameter(rows, **placed) if bias else None
        self.shards: dict[str, Shard] = {}
        if shard is not None and self.parallel.size > 1:
            self.shards = {"weight": shard, **({"bias": shard} if bias else {})}

    def forward(self, x: Tensor) -> Tensor:
        """[T, K] -> [T, N], or the columns of this rank."""
        weight: Tensor = self.weight
        bias: Tensor | None = self.bias
        if self.shards:
            weight = sum_shared_rows(weight, self.shards["weight"], self.parallel)
            if bias is not None:
                bias = sum_shared_rows(bias, self.shards["bias"], self.parallel)
        return linear(x, weight, bias)


class RowLinear(nn.Module):
    """x [T, K] -> [T, N]; K is summed by a fixed tree of leaves, so K may be sharded.

    Under tensor parallelism a rank gives its columns of x, and under sequence parallelism it gets
    its slice of the result. Of more ranks than leaves, neighbours share one: each has the whole
    leaf of K for some rows of the weight.
    """

    def __init__(
        self,
        in_features: int,
        out_features: int,
        **placed: Unpack[Placed],
    ):
        super().__init__()
        parallel = self.parallel = placed.get("layout", ALONE).tensor
        divisor = max(LEAVES, parallel.size)
        if in_features % divisor:
            raise UnsupportedError(
                f"a row-parallel linear needs an input size divisible by {divisor}, "
                f"got {in_features}"
            )
        shard = split_leaves(in_features, out_features, parallel.rank, parallel.size)
        rows = out_features // ranks_of_leaf(parallel.size)
        self.weight = parameter(rows, shard.length, **placed)
        self.shards: dict[str, Shard] = {"weight": shard} if parallel.size > 1 else {}

    def forward(self, x: Tensor) -> Tensor:
        """[T, K] -> [T, N]."""
        if self.parallel.size == 1:
            return row_linear(x, self.weight)
        return row_parallel(x, self.weight, self.parallel)


class Embedding(nn.Module):
    """ids [T] -> rows [T, H] of a table [V, H], of which a rank may hold some.

    Under sequence parallelism a rank gets its slice of the rows.
    """

    def __init__(
        self,
        vocab_size: int,
        hidden_size: int,
        **placed: Unpack[Placed],
    ):
        super().__init__()
        parallel = self.parallel = placed.get("layout", ALONE).tensor
        self.vocab = VocabShard(vocab_size, parallel.rank, parallel.size)
        self.weight = parameter(self.vocab.count, hidden_size, **placed)
        self.shards = {"weight": split_vocab(self.vocab)} if parallel.size > 1 else {}

    def forward(self, input_ids: Tensor) -> Tensor:
        """[T] int64 -> [T, H]."""
        if self.parallel.size == 1:
            return embedding(input_ids, self.weight)
        owner = self.vocab.owner(input_ids)
        own = input_ids - self.vocab.first
        # an id outside the vocabulary is no rank's: every rank asks for it, and refuses it
        inside = (input_ids >= 0) & (input_ids < self.vocab.vocab_size)
        elsewhere = inside & (owner != self.parallel.rank)
        rows = embedding(own.masked_fill(elsewhere, 0), self.weight)
        return select_rows(rows, owner, self.parallel)


class LMHead(nn.Module):
    """Hidden states to logits and logprobs; the weight [V, H] may be the embedding's own.

    A rank of tensor parallelism holds whole leaves of the vocabulary, and gives whole results.
    """

    def __init__(
        self,
        hidden_size: int,
        vocab_size: int,
        *,
        tied: bool,
        **placed: Unpack[Placed],
    ):
        super().__init__()
        layout = placed.get("layout", ALONE)
        parallel = self.parallel = layout.tensor
        self.vocab = VocabShard(vocab_size, parallel.rank, parallel.size)
        # a stage without the embedding holds the tied weight a second time
        tied = tied and layout.stage.embeds
        self.weight = None if tied else parameter(self.vocab.count, hidden_size, **placed)
        self.shards: dict[str, Shard] = {}
        if parallel.size > 1 and not tied:
            self.shards = {"weight": split_vocab(self.vocab)}

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
        if self.parallel.size > 1:
            return self._parallel(hidden, weight, targets, temperature)
        if temperature is None:
            return lm_head(hidden, weight)
        if targets is None:
            return logprobs(hidden, weight, temperature)
        return target_logprobs(hidden, weight, targets, temperature)

    def _parallel(
        self, hidden: Tensor, weight: Tensor, targets: Tensor | None, temperature: float | None
    ) -> Tensor:
        vocab, parallel = self.vocab, self.parallel
        if targets is not None and temperature is not None:
            return vocab_token_logprobs(hidden, weight, targets, temperature, vocab, parallel)
        logits = gather_columns(lm_head(hidden, weight), vocab, parallel)
        return logits if temperature is None else log_normalize(logits, temperature)
