"""`token_logprobs` where each rank of tensor parallelism holds whole leaves of the vocabulary.

The fold over the vocabulary is that of `isomodels.kernels.logprob`, whatever the number of ranks:
what its first stages leave (of the CPU, sums by leaf; of the GPU, a maximum and a sum by block) is
gathered, and every rank runs the last stages on all of it. Moving the partial results is the
caller's: `gather` takes [T, X] of this rank to [ranks, T, X].
"""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from isomodels.kernels.fixed_order import fold_sum, matmul_nt, one_thread, round_up
from isomodels.kernels.linear import check_operands
from isomodels.kernels.logprob import (
    VOCAB_ALIGNMENT,
    VOCAB_BLOCK,
    VOCAB_LEAVES,
    _check_scale,
    _logits_backward,
    _scale,
)

Gather = Callable[[Tensor], Tensor]


@dataclass(frozen=True)
class VocabShard:
    """The rows of the vocabulary that one rank holds.

    Attributes:
        vocab_size: V.
        rank, ranks: which part of how many; `ranks` divides `VOCAB_LEAVES`.
    """

    vocab_size: int
    rank: int
    ranks: int

    @property
    def width(self) -> int:
        """Rows of a rank, those of the padding included."""
        return round_up(self.vocab_size, VOCAB_ALIGNMENT) // self.ranks

    @property
    def first(self) -> int:
        """The first row of this rank."""
        return self.rank * self.width

    @property
    def count(self) -> int:
        """Rows of this rank: fewer than `width` where the vocabulary ends, perhaps none."""
        return max(0, min(self.width, self.vocab_size - self.first))

    def owner(self, ids: Tensor) -> Tensor:
        """The rank that holds each id."""
        return ids // self.width


def token_logprobs(
    hidden: Tensor,
    weight: Tensor,
    targets: Tensor,
    temperature: float,
    shard: VocabShard,
    gather: Gather,
) -> tuple[Tensor, Tensor]:
    """The bits of `isomodels::token_logprobs` on the whole vocabulary.

    Args:
        hidden: [T, H], float32 or bfloat16, the same on every rank.
        weight: [`shard.count`, H], dtype of `hidden`.
        targets: [T] int64, each in [0, V), the same on every rank.
        temperature: above 0.
        shard: which rows of the vocabulary `weight` holds.
        gather: [T, X] of this rank -> [ranks, T, X], bits unchanged.

    Returns:
        (logprobs [T] fp32, (maximum, log of the sum) [T, 2] fp32 for the backward).

    Raises:
        IndexError: for a target outside the vocabulary; on a GPU its logprob is NaN.
    """
    check_operands("token_logprobs", hidden, weight)
    _check_scale(torch.float32, temperature)
    stages = _gpu_stages if hidden.is_cuda else _cpu_stages
    return stages(hidden, weight, targets, temperature, shard, gather)


def _cpu_stages(
    hidden: Tensor,
    weight: Tensor,
    targets: Tensor,
    temperature: float,
    shard: VocabShard,
    gather: Gather,
) -> tuple[Tensor, Tensor]:
    if targets.numel() and not 0 <= int(targets.min()) <= int(targets.max()) < shard.vocab_size:
        raise IndexError(f"a target lies outside the vocabulary of {shard.vocab_size}")
    rows, leaves = len(hidden), VOCAB_LEAVES // shard.ranks
    with one_thread():
        scaled = _scale(matmul_nt(hidden, weight), temperature)
        row_max = gather(scaled.amax(1, keepdim=True)).amax(0)  # exact in any order
        exponentials = torch.zeros(rows, shard.width, dtype=torch.float32)
        exponentials[:, : shard.count] = torch.exp(scaled - row_max)
        sums = fold_sum(fold_sum(exponentials.view(rows, leaves, -1, VOCAB_BLOCK)))  # [T, leaves]
        here = (targets - shard.first).clamp(0, shard.count - 1)
        chosen = scaled.gather(1, here.unsqueeze(1))
        gathered = gather(torch.cat((sums, chosen), 1))  # [ranks, T, leaves + 1]
        sums = gathered[..., :-1].transpose(0, 1).reshape(rows, VOCAB_LEAVES)
        chosen = gathered[..., -1].gather(0, shard.owner(targets).unsqueeze(0)).t()  # [T, 1]
        log_sum = torch.log(fold_sum(sums)).unsqueeze(1)
        return ((chosen - row_max) - log_sum).squeeze(1), torch.cat((row_max, log_sum), 1)


def _gpu_stages(
    hidden: Tensor,
    weight: Tensor,
    targets: Tensor,
    temperature: float,
    shard: VocabShard,
    gather: Gather,
) -> tuple[Tensor, Tensor]:
    from isomodels.kernels import logprob_triton
    from isomodels.kernels.logprob_fold_triton import cuts

    rows, of_rank = len(hidden), shard.width // VOCAB_BLOCK
    own = -(-shard.count // VOCAB_BLOCK)
    blocks, leaf_blocks, log2 = cuts(shard.vocab_size)
    # maximum and sum of each block, then the target's logit; blocks of padding are empty
    top, total = hidden.new_empty(2, rows, own, dtype=torch.float32)
    chosen = hidden.new_full((rows,), torch.nan, dtype=torch.float32)
    if rows:
        sums = (top, total, chosen)
        logprob_triton._launch(
            hidden, weight, targets, temperature, sums=sums, first_column=shard.first
        )
    mine = hidden.new_zeros(rows, 2 * of_rank + 1, dtype=torch.float32)
    mine[:, :of_rank] = -torch.inf
    mine[:, :own], mine[:, of_rank : of_rank + own], mine[:, -1] = top, total, chosen
    gathered = gather(mine).transpose(0, 1)  # [T, ranks, 2 * blocks of a rank + 1]
    tops, totals = (
        part.reshape(rows, -1)[:, :blocks].contiguous()
        for part in gathered[..., :-1].split(of_rank, 2)
    )
    owner = shard.owner(targets).clamp(0, shard.ranks - 1).unsqueeze(1)
    chosen = gathered[..., -1].gather(1, owner).squeeze(1)
    logprobs, normalizer = torch.empty_like(chosen), chosen.new_empty(rows, 2)
    if rows:
        logprob_triton._fold_kernel[(rows,)](
            tops, totals, chosen, logprobs, normalizer, blocks, leaf_blocks,
            LOG2=log2, num_warps=4, enable_fp_fusion=False,
        )  # fmt: skip
    return logprobs, normalizer


def token_logprobs_gradients(
    grad: Tensor,
    hidden: Tensor,
    weight: Tensor,
    targets: Tensor,
    normalizer: Tensor,
    temperature: float,
    first: int,
) -> tuple[Tensor, Tensor]:
    """This rank's part of the gradients.

    Args:
        grad: [T] fp32, of the logprobs.
        hidden, weight, targets, temperature: as in the forward.
        normalizer: [T, 2] fp32 from the forward.
        first: the first row of the vocabulary that `weight` holds.

    Returns:
        (what this rank's columns add to dhidden [T, H], dweight [rows of `weight`, H]).
    """
    here = targets - first  # of another rank: below 0 or past the last row
    if grad.is_cuda:
        from isomodels.kernels import logprob_triton

        return logprob_triton.token_logprobs_backward(
            grad, hidden, weight, here, normalizer, temperature
        )
    row_max, log_sum = normalizer.unsqueeze(1).unbind(-1)  # [T, 1] each
    scaled = (hidden.float() @ weight.float().t()) / temperature
    dlogits = -torch.exp(scaled - row_max - log_sum)
    (inside,) = torch.where((here >= 0) & (here < len(weight)))
    dlogits[inside, here[inside]] += 1.0
    dlogits *= grad.unsqueeze(1) / temperature
    return _logits_backward(dlogits, hidden, weight)
