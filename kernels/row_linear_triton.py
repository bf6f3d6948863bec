"""Triton backend of `isomodels::row_linear`: a product whose K is a tree of leaves."""

import torch
from torch import Tensor

from isomodels.kernels.gemm_triton import gemm
from isomodels.kernels.linear_triton import tuning


def row_linear(x: Tensor, weight: Tensor, leaves: int, out_dtype: torch.dtype) -> Tensor:
    """x W^T over `leaves` equal leaves of K, folded as a balanced tree of neighbours in fp32.

    Args:
        x: [T, K], float32 or bfloat16; K divisible by `leaves`.
        weight: [N, K], dtype of `x`.
        leaves: 1, 2, 4 or 8.
        out_dtype: fp32 for the sum of a subtree that other ranks' subtrees are to be added to.

    Returns:
        [T, N] in `out_dtype`.
    """
    kind = "tree" if leaves > 1 else "nt"
    if out_dtype != x.dtype:
        kind = "tree partial" if leaves > 1 else "head"
    config = tuning(kind, x, x.shape[0], *weight.shape)
    return gemm(x, weight, config, out_dtype=out_dtype, leaves=leaves)
