"""The fold over the vocabulary that all logprobs on a GPU share: what defines their bits.

The vocabulary is read in blocks of 128 columns: each leaves its maximum and the sum of exponentials
above that maximum. The blocks of each of 8 leaves, and then the leaves, are brought to their common
maximum and added, neighbours first. `log_normalize` runs it on logits in memory, `token_logprobs`
on the accumulators of the product.
"""

# Arguments of kernels have Triton's own types.
# mypy: disable-error-code="no-untyped-def"

import triton
import triton.language as tl

from isomodels.kernels.common_triton import log2_ceil, pairwise_sum

BLOCK, LEAVES = 128, 8
LOG2_BLOCK, LOG2_LEAVES = tl.constexpr(7), tl.constexpr(3)


def cuts(vocab_size: int) -> tuple[int, int, int]:
    """(blocks, blocks of a leaf, exponent of the leaf's padded length)."""
    blocks = triton.cdiv(vocab_size, BLOCK)
    leaf_blocks = triton.cdiv(vocab_size, BLOCK * LEAVES)
    return blocks, leaf_blocks, log2_ceil(leaf_blocks)


@triton.jit
def exp(x):
    """Results below the normal numbers may be zero: beside them stands the maximum's own 1."""
    return tl.exp2(x * 1.4426950408889634)


@triton.jit
def finite(top):
    """A maximum that may be subtracted: a block of padding has -inf."""
    return tl.where(top == -float("inf"), 0.0, top)


@triton.jit
def scaled(x, temperature, SCALE: tl.constexpr):
    """Logits over the temperature."""
    return tl.div_rn(x, temperature) if SCALE else x


@triton.jit
def block_sums(x, ROWS: tl.constexpr):
    """[ROWS, 128] -> maximum and sum of exponentials above it, [ROWS] each; -inf is padding."""
    top = tl.max(x, axis=1)
    return top, pairwise_sum(exp(x - finite(top)[:, None]), ROWS, LOG2_BLOCK)


@triton.jit
def fold_blocks(top_ptr, sum_ptr, row, blocks, leaf_blocks, LOG2: tl.constexpr):
    """The blocks of a row -> (row maximum, log of the sum of exponentials above it)."""
    # [lengths, leaves, lanes]: the shape makes a warp take a leaf, so that warps seldom meet.
    LEAVES: tl.constexpr = 2**LOG2_LEAVES
    LANES: tl.constexpr = 32 if LOG2 >= 5 else 2**LOG2
    block = tl.arange(0, 2**LOG2 // LANES)[:, None, None] * LANES + tl.arange(0, LANES)
    index = tl.arange(0, LEAVES)[None, :, None] * leaf_blocks + block
    mask = (block < leaf_blocks) & (index < blocks)
    at = row.to(tl.int64) * blocks + index
    # Past the first-level cache, which does not see what other multiprocessors wrote.
    tops = tl.load(top_ptr + at, mask=mask, other=-float("inf"), cache_modifier=".cg")
    sums = tl.load(sum_ptr + at, mask=mask, other=0.0, cache_modifier=".cg")
    leaf_top = tl.max(tl.max(tops, axis=0), axis=1)
    sums *= exp(tops - finite(leaf_top)[None, :, None])
    leaf_sum = pairwise_sum(
        tl.reshape(tl.permute(sums, (1, 0, 2)), (LEAVES, 2**LOG2)), LEAVES, LOG2
    )
    row_top = tl.max(leaf_top, axis=0)
    by_leaf = leaf_sum * exp(leaf_top - finite(row_top))
    total = pairwise_sum(tl.reshape(by_leaf, (1, LEAVES)), 1, LOG2_LEAVES)
    return row_top, tl.log(total)
