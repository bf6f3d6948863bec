"""What the small kernels over heads share: which token and head a row is, and two activations.

A row is one head of one token; a program has a block of `ROWS` of them.
"""

# Arguments of kernels have Triton's own types.
# mypy: disable-error-code="no-untyped-def"

import triton
import triton.language as tl
from torch import Tensor


@triton.jit
def heads_of(block, tokens, HEADS: tl.constexpr, ROWS: tl.constexpr):
    """A block's rows: of which token and head, and which are real."""
    row = block * ROWS + tl.arange(0, ROWS)
    return row // HEADS, row % HEADS, row < tokens * HEADS


@triton.jit
def places(token, head, stride_t, stride_h):
    """[ROWS, 1] offsets of the rows' first channels."""
    return (token.to(tl.int64) * stride_t + head * stride_h)[:, None]


@triton.jit
def sigmoid(x):
    """1 / (1 + exp(-x)), the quotient rounded to nearest."""
    return tl.div_rn(1.0, 1.0 + tl.exp(-x))


@triton.jit
def silu(x):
    """x / (1 + exp(-x)), the quotient rounded to nearest."""
    return tl.div_rn(x, 1.0 + tl.exp(-x))


def dense_heads(x: Tensor) -> Tensor:
    """`x` [T, heads, D] itself if each head is dense, else a copy."""
    return x if x.stride(-1) == 1 else x.contiguous()
