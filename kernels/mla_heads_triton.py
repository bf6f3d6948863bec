"""The products with W_UK and W_UV: one small matrix a head, read where it lies in `kv_b`.

What defines a bit: one sequential pass over K in fp32 and one rounding, as for `isomodels::linear`.
Tile, warps and stages are tuning.
"""

# mypy: disable-error-code="no-untyped-def"

import torch
import triton
import triton.language as tl
from torch import Tensor


def heads_config(dtype: torch.dtype, num_tokens: int) -> dict[str, int]:
    """Tuning, by the number of rows."""
    if dtype == torch.float32:
        return {"BLOCK_M": 64, "BLOCK_N": 64, "BLOCK_K": 32, "num_warps": 4, "num_stages": 1}
    if num_tokens <= 16:
        return {"BLOCK_M": 16, "BLOCK_N": 128, "BLOCK_K": 64, "num_warps": 4, "num_stages": 4}
    if num_tokens <= 64:
        return {"BLOCK_M": 64, "BLOCK_N": 128, "BLOCK_K": 64, "num_warps": 4, "num_stages": 4}
    return {"BLOCK_M": 128, "BLOCK_N": 128, "BLOCK_K": 64, "num_warps": 8, "num_stages": 3}


@triton.jit(do_not_specialize=["num_tokens"])
def _heads_product(
    x_ptr, weight_ptr, out_ptr, num_tokens, stride_xt, stride_xh, stride_wh, stride_wn, stride_wk,
    N, num_heads, K: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
):  # fmt: skip
    tiles_n = tl.cdiv(N, BLOCK_N)
    head = tl.program_id(0) // tiles_n % num_heads
    n = tl.program_id(0) % tiles_n * BLOCK_N + tl.arange(0, BLOCK_N)
    m = tl.program_id(0) // tiles_n // num_heads * BLOCK_M + tl.arange(0, BLOCK_M)
    step = tl.arange(0, BLOCK_K)
    tokens = m.to(tl.int64)
    x_at = x_ptr + head * stride_xh + tokens[:, None] * stride_xt + step[None, :]
    weight_at = weight_ptr + head.to(tl.int64) * stride_wh
    weight_at += step[:, None] * stride_wk + n[None, :] * stride_wn
    acc = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
    for k in range(0, K, BLOCK_K):
        if K % BLOCK_K == 0:
            x = tl.load(x_at + k, mask=(m < num_tokens)[:, None], other=0.0)
            weight = tl.load(weight_at + k * stride_wk, mask=(n < N)[None, :], other=0.0)
        else:
            left = step < K - k
            x = tl.load(x_at + k, mask=(m < num_tokens)[:, None] & left[None, :], other=0.0)
            real = left[:, None] & (n < N)[None, :]
            weight = tl.load(weight_at + k * stride_wk, mask=real, other=0.0)
        acc = tl.dot(x, weight, acc, input_precision="ieee")
    out_at = out_ptr + (tokens[:, None] * num_heads + head) * N + n[None, :]
    real = (m < num_tokens)[:, None] & (n < N)[None, :]
    tl.store(out_at, acc.to(out_ptr.dtype.element_ty), mask=real)


def heads_product(x: Tensor, weight: Tensor, config: dict | None = None) -> Tensor:
    """x [T, heads, K] times weight [heads, K, N], both of any strides -> [T, heads, N], dense.

    The last axis of x must be dense; `config` overrides the tuning.
    """
    num_tokens, num_heads, size = x.shape
    columns = weight.shape[2]
    out = torch.empty(num_tokens, num_heads, columns, dtype=x.dtype, device=x.device)
    if not out.numel():
        return out
    x = x if x.stride(-1) == 1 else x.contiguous()
    config = config or heads_config(x.dtype, num_tokens)
    tiles = triton.cdiv(num_tokens, config["BLOCK_M"]) * triton.cdiv(columns, config["BLOCK_N"])
    stride_wh, stride_wk, stride_wn = weight.stride()
    _heads_product[(tiles * num_heads,)](
        x, weight, out, num_tokens, x.stride(0), x.stride(1), stride_wh, stride_wn, stride_wk,
        columns, num_heads, K=size, **config,
    )  # fmt: skip
    return out
