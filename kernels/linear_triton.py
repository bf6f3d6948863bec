"""Triton backend of `isomodels::linear`, and the products of every linear's backward."""

import torch
from torch import Tensor

from isomodels.kernels.gemm_triton import FP32, Config, gemm
from isomodels.kernels.gemm_tuning import values


def tuning(kind: str, x: Tensor, m: int, n: int, k: int) -> Config:
    """The tiles for one product; full fp32 has a single choice."""
    return FP32 if x.dtype == torch.float32 else Config(*values(kind, m, n, k))


def linear(
    x: Tensor, weight: Tensor, bias: Tensor | None = None, out_dtype: torch.dtype | None = None
) -> Tensor:
    """y = x W^T + b: x [T, K], weight [N, K] -> [T, N] in `out_dtype` or the dtype of `x`."""
    out_dtype = out_dtype or x.dtype
    kind = "nt" if out_dtype == x.dtype else "head"
    config = tuning(kind, x, x.shape[0], *weight.shape)
    return gemm(x, weight, config, out_dtype=out_dtype, bias=bias)


def input_gradient(grad: Tensor, weight: Tensor, add_to: Tensor | None = None) -> Tensor:
    """dX = dY W: grad [T, N], weight [N, K] -> [T, K], or added to `add_to` [T, K] fp32."""
    n, k = weight.shape
    add = add_to is not None
    config = tuning("nn add" if add else "nn", grad, grad.shape[0], k, n)
    out_dtype = torch.float32 if add else grad.dtype
    return gemm(grad, weight, config, out_dtype=out_dtype, b_t=True, out=add_to, add=add)


def weight_gradient(grad: Tensor, x: Tensor, out: Tensor | None = None) -> Tensor:
    """dW = dY^T X: grad [T, N], x [T, K] -> [N, K], in `out` where it is given."""
    config = tuning("tn", grad, grad.shape[1], x.shape[1], grad.shape[0])
    return gemm(grad, x, config, out_dtype=grad.dtype, a_t=True, b_t=True, out=out)
