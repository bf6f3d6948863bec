"""What ranks exchange, with the gradients: bits are moved, and each rank adds them in one order.

No sum is left to the network: a ring or a switch adds in an order of its own. Each rank sends its
fp32 partial sums, and whoever needs the result folds them.

* Small messages: one all-gather, and every rank folds everything.
* Large ones: an all-to-all of slices of rows, a fold of the own slice, one rounding, and an
  all-gather of the results in the model's dtype. Of n ranks, each receives (n - 1) / n of 4 bytes
  and then of 2 bytes an element; a ring all-reduce in bfloat16 moves 2 (n - 1) / n of 2 bytes. So
  it is 1.5 times the bytes.

Both give the same bits, since the fold is element by element.

Shape suffixes: T tokens, n ranks, t = T / n tokens of a rank's slice.
"""

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from isomodels.kernels.linear import product_gradients
from isomodels.kernels.row_linear import LEAVES, row_linear_partial, tree_sum
from isomodels.kernels.vocab_parallel import (
    VocabShard,
    token_logprobs,
    token_logprobs_gradients,
)
from isomodels.layers.parallel import ExpertParallel, Shard, TensorParallel, ranks_of_leaf

# Bytes that a rank receives up to which one collective beats two that move less: row "exchange" of
# benchmarks/h200_x2.md. Free: no bit depends on it.
SMALL_MESSAGE = 1 << 20

Fold = Callable[[Tensor], Tensor]  # [n, T, ...] -> [T, ...]


def all_gather(x: Tensor, parallel: TensorParallel | ExpertParallel) -> Tensor:
    """[...] of this rank -> [n, ...] of all."""
    flat = _bytes(x)
    out = flat.new_empty(parallel.size * len(flat))
    dist.all_gather_into_tensor(out, flat, group=parallel.group)
    return out.view(x.dtype).view(parallel.size, *x.shape)


def all_to_all(x: Tensor, parallel: TensorParallel) -> Tensor:
    """[n, ...], one slice for each rank -> [n, ...], this rank's slice of each."""
    flat = _bytes(x)
    out = torch.empty_like(flat)
    dist.all_to_all_single(out, flat, group=parallel.group)
    return out.view(x.dtype).view(x.shape)


def all_to_all_rows(
    rows: Tensor,
    send_counts: list[int],
    receive_counts: list[int],
    parallel: TensorParallel | ExpertParallel,
) -> Tensor:
    """[sum of send_counts, H], in the order of the ranks they go to -> [sum of receive_counts, H].

    Bit for bit, in the order of the ranks they come from.
    """
    width = rows.shape[1] * rows.element_size()
    flat = _bytes(rows)
    out = flat.new_empty(sum(receive_counts) * width)
    received, sent = ([n * width for n in counts] for counts in (receive_counts, send_counts))
    dist.all_to_all_single(out, flat, received, sent, group=parallel.group)
    return out.view(rows.dtype).view(-1, rows.shape[1])


def _bytes(x: Tensor) -> Tensor:
    """Bytes, which no backend looks into, and every backend moves."""
    return x.contiguous().view(-1).view(torch.uint8)


def combine(
    x: Tensor, parallel: TensorParallel, fold: Fold, dtype: torch.dtype, *, scatter: bool = False
) -> Tensor:
    """Exchange and fold what the ranks have for the same tokens.

    Args:
        x: [T, ...].
        parallel: the ranks.
        fold: element by element along the tokens.
        dtype: to which the fold's result is rounded.
        scatter: keep this rank's slice of the tokens only; T is then a multiple of n.

    Returns:
        [T, ...], or [t, ...] with `scatter`.
    """
    rows, ranks = len(x), parallel.size
    if not scatter and (ranks - 1) * x.nbytes <= SMALL_MESSAGE:
        return fold(all_gather(x, parallel)).to(dtype)
    slice_rows = -(-rows // ranks)
    if missing := slice_rows * ranks - rows:
        x = torch.cat((x, x.new_zeros(missing, *x.shape[1:])))
    own = fold(all_to_all(x.view(ranks, slice_rows, *x.shape[1:]), parallel)).to(dtype)
    return own if scatter else all_gather(own, parallel).flatten(0, 1)[:rows]


def tree(partials: Tensor) -> Tensor:
    """[n, T, N] fp32 -> [T, N], the tree of `row_linear` above the ranks' subtrees.

    Of more ranks than leaves, those of a leaf have its columns one after another: [n, T, N / c].
    """
    if (sharing := ranks_of_leaf(len(partials))) > 1:
        partials = partials.unflatten(0, (-1, sharing)).transpose(1, 2).flatten(2)
    return tree_sum(list(partials.unbind()))


def _to_neighbours(x: Tensor, parallel: TensorParallel) -> Tensor:
    """[c, T, k], one for each of the c ranks that share a leaf -> [c, T, k], one from each."""
    sharing, rows, columns = x.shape
    leaf = parallel.rank // sharing
    counts = [rows if rank // sharing == leaf else 0 for rank in range(parallel.size)]
    return all_to_all_rows(x.reshape(-1, columns), counts, counts, parallel).view(x.shape)


def in_rank_order(gradients: Tensor) -> Tensor:
    """[n, ...] -> [...] fp32, added from the first rank to the last."""
    total = gradients[0].float()
    for gradient in gradients[1:]:
        total = total + gradient.float()
    return total


def own_slice(x: Tensor, parallel: TensorParallel) -> Tensor:
    """[T, ...] -> [t, ...]."""
    return x.chunk(parallel.size)[parallel.rank].contiguous()


def check_slices(tokens: int, parallel: TensorParallel) -> None:
    """Refuse a number of tokens that cannot be cut into slices.

    Raises:
        ValueError: naming the remedy.
    """
    if tokens % parallel.size:
        raise ValueError(
            f"{tokens} tokens cannot be cut into {parallel.size} slices of sequence parallelism: "
            "pad with a sequence of its own, which no other token sees"
        )


class _SumGradients(torch.autograd.Function):
    """The same tensor on every rank; each uses it in its own part of a product."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, parallel: TensorParallel) -> Tensor:
        ctx.parallel = parallel
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple:
        (grad,) = grads
        return combine(grad, ctx.parallel, in_rank_order, grad.dtype), None


class _GatherTokens(torch.autograd.Function):
    """[t, ...] of each rank -> [T, ...] on all."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, parallel: TensorParallel, summed: bool) -> Tensor:
        ctx.parallel, ctx.summed = parallel, summed
        return all_gather(x, parallel).flatten(0, 1)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple:
        (grad,) = grads
        if not ctx.summed:
            return own_slice(grad, ctx.parallel), None, None
        return combine(grad, ctx.parallel, in_rank_order, grad.dtype, scatter=True), None, None


class _SliceTokens(torch.autograd.Function):
    """[T, ...], the same on all ranks -> [t, ...] of this rank."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, parallel: TensorParallel) -> Tensor:
        ctx.parallel = parallel
        return own_slice(x, parallel)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple:
        (grad,) = grads
        return all_gather(grad, ctx.parallel).flatten(0, 1), None


class _RowLinear(torch.autograd.Function):
    """x [T, K / n] -> [T, N] or its slice [t, N], the bits of `row_linear`.

    Weight [N / c, c K / n]: c ranks share a leaf where there are more ranks than leaves.
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, parallel: TensorParallel) -> Tensor:
        sharing = ranks_of_leaf(parallel.size)
        if sharing > 1:  # [T, K / n] of each -> the leaf [T, c K / n]
            x = _to_neighbours(x.expand(sharing, -1, -1), parallel).transpose(0, 1).flatten(1)
        ctx.parallel, ctx.sharing = parallel, sharing
        ctx.save_for_backward(x, weight)
        partial = row_linear_partial(x, weight, max(1, LEAVES // parallel.size))
        return combine(partial, parallel, tree, x.dtype, scatter=parallel.sequence)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple:
        (grad,), parallel, sharing = grads, ctx.parallel, ctx.sharing
        if parallel.sequence:
            grad = all_gather(grad, parallel).flatten(0, 1)
        if sharing > 1:  # the columns of this rank's rows of the weight
            grad = grad.chunk(sharing, 1)[parallel.rank % sharing].contiguous()
        dx, dweight = product_gradients(grad, *ctx.saved_tensors, *ctx.needs_input_grad[:2])
        if sharing > 1 and dx is not None:  # [T, c K / n], of these columns alone -> [T, K / n]
            parts = _to_neighbours(dx.unflatten(1, (sharing, -1)).transpose(0, 1), parallel)
            dx = in_rank_order(parts).to(dx.dtype)
        return dx, dweight, None


class _SelectRows(torch.autograd.Function):
    """Of each token, the row of the rank that owns it: nothing is added, -0 stays -0."""

    @staticmethod
    def forward(ctx: Any, rows: Tensor, owner: Tensor, parallel: TensorParallel) -> Tensor:
        ctx.parallel = parallel
        ctx.save_for_backward(owner)
        own = own_slice(owner, parallel) if parallel.sequence else owner

        def select(parts: Tensor) -> Tensor:
            chosen = own if len(own) == parts.shape[1] else _slice_of(owner, parts, parallel)
            return parts[chosen, torch.arange(len(chosen), device=parts.device)]

        return combine(rows, parallel, select, rows.dtype, scatter=parallel.sequence)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple:
        (grad,) = grads
        (owner,) = ctx.saved_tensors
        if ctx.parallel.sequence:
            grad = all_gather(grad, ctx.parallel).flatten(0, 1)
        mine = (owner == ctx.parallel.rank).unsqueeze(1)
        return torch.where(mine, grad, torch.zeros_like(grad)), None, None


def _slice_of(owner: Tensor, parts: Tensor, parallel: TensorParallel) -> Tensor:
    """The owners of this rank's slice in an all-to-all, whose last slices may be padded."""
    rows = parts.shape[1]
    padded = torch.nn.functional.pad(owner, (0, rows * parallel.size - len(owner)))
    return padded[parallel.rank * rows : (parallel.rank + 1) * rows]


class _SumSharedRows(torch.autograd.Function):
    """A weight of which several ranks hold the same rows, each using them for its own heads."""

    @staticmethod
    def forward(ctx: Any, weight: Tensor, shard: Shard, parallel: TensorParallel) -> Tensor:
        ctx.shard, ctx.parallel = shard, parallel
        return weight.view_as(weight)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple:
        (grad,) = grads
        pieces = list(grad.split([part.length for part in ctx.shard.parts]))
        for index, part in enumerate(ctx.shard.parts):
            if part.copies > 1:
                first = ctx.parallel.rank - part.copy
                sharing = all_gather(pieces[index], ctx.parallel)[first : first + part.copies]
                pieces[index] = in_rank_order(sharing).to(grad.dtype)
        return torch.cat(pieces), None, None


class _TokenLogprobs(torch.autograd.Function):
    """`token_logprobs` of ranks that hold whole leaves of the vocabulary."""

    @staticmethod
    def forward(
        ctx: Any,
        hidden: Tensor,
        weight: Tensor,
        targets: Tensor,
        temperature: float,
        vocab: VocabShard,
        parallel: TensorParallel,
    ) -> Tensor:
        logprobs, normalizer = token_logprobs(
            hidden, weight, targets, temperature, vocab, lambda x: all_gather(x, parallel)
        )
        ctx.temperature, ctx.first = temperature, vocab.first
        ctx.save_for_backward(hidden, weight, targets, normalizer)
        return logprobs

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple:
        hidden, weight, targets, normalizer = ctx.saved_tensors
        grad = grads[0].contiguous()
        gradients = token_logprobs_gradients(
            grad, hidden, weight, targets, normalizer, ctx.temperature, ctx.first
        )
        return *gradients, None, None, None, None


class _GatherColumns(torch.autograd.Function):
    """[T, columns of this rank] -> [T, columns of all]; of the last ranks, fewer than `width`."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, vocab: VocabShard, parallel: TensorParallel) -> Tensor:
        ctx.vocab = vocab
        padded = torch.nn.functional.pad(x, (0, vocab.width - vocab.count))
        gathered = all_gather(padded, parallel).transpose(0, 1).flatten(1)
        return gathered[:, : vocab.vocab_size].contiguous()

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple:
        (grad,) = grads
        return grad.narrow(1, ctx.vocab.first, ctx.vocab.count).contiguous(), None, None


# Autograd's `apply` has no types: these have.


def enter(x: Tensor, parallel: TensorParallel, *, summed: bool = True) -> Tensor:
    """Into a region where every rank computes its own columns: all tokens, on every rank.

    Args:
        x: [T, H], or the slice [t, H] under sequence parallelism.
        parallel: the ranks.
        summed: whether each rank's gradient is a part of the whole; False where all ranks compute
            the same.
    """
    if parallel.size == 1:
        return x
    if parallel.sequence:
        gathered: Tensor = _GatherTokens.apply(x, parallel, summed)
        return gathered
    return sum_gradients(x, parallel) if summed else x


def sum_gradients(x: Tensor, parallel: TensorParallel) -> Tensor:
    """The tensor itself, replicated over the ranks; its gradients are added in rank order."""
    if parallel.size == 1:
        return x
    out: Tensor = _SumGradients.apply(x, parallel)
    return out


def sum_shared_rows(weight: Tensor, shard: Shard, parallel: TensorParallel) -> Tensor:
    """The weight itself; gradients of rows that several ranks hold are added in rank order."""
    if all(part.copies == 1 for part in shard.parts):
        return weight
    out: Tensor = _SumSharedRows.apply(weight, shard, parallel)
    return out


def slice_tokens(x: Tensor, parallel: TensorParallel) -> Tensor:
    """[T, ...], the same on all ranks -> [t, ...], this rank's tokens."""
    check_slices(len(x), parallel)
    out: Tensor = _SliceTokens.apply(x, parallel)
    return out


def gather_tokens(x: Tensor, parallel: TensorParallel) -> Tensor:
    """[t, ...] of each rank -> [T, ...], with which all ranks then compute the same."""
    out: Tensor = _GatherTokens.apply(x, parallel, False)
    return out


def row_parallel(x: Tensor, weight: Tensor, parallel: TensorParallel) -> Tensor:
    """x [T, K / n], weight as `split_leaves` cuts it -> [T, N]; [t, N] if the stream is cut."""
    out: Tensor = _RowLinear.apply(x, weight, parallel)
    return out


def select_rows(rows: Tensor, owner: Tensor, parallel: TensorParallel) -> Tensor:
    """Rows [T, H], of which each rank has its own -> [T, H] of the owners [T], or [t, H]."""
    out: Tensor = _SelectRows.apply(rows, owner, parallel)
    return out


def vocab_token_logprobs(
    hidden: Tensor,
    weight: Tensor,
    targets: Tensor,
    temperature: float,
    vocab: VocabShard,
    parallel: TensorParallel,
) -> Tensor:
    """hidden [T, H], weight [rows of this rank, H], targets [T] -> [T] fp32."""
    out: Tensor = _TokenLogprobs.apply(hidden, weight, targets, temperature, vocab, parallel)
    return out


def gather_columns(x: Tensor, vocab: VocabShard, parallel: TensorParallel) -> Tensor:
    """Logits [T, rows of this rank] -> [T, V]."""
    out: Tensor = _GatherColumns.apply(x, vocab, parallel)
    return out
