"""Triton backend of `isomodels::one_plus`."""

# Arguments of kernels have Triton's own types.
# mypy: disable-error-code="no-untyped-def"

import torch
import triton
import triton.language as tl
from torch import Tensor

_BLOCK = 1024


@triton.jit
def _forward(weight_ptr, out_ptr, count, stride, BLOCK: tl.constexpr):
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    weight = tl.load(weight_ptr + at * stride, mask=at < count, other=0.0).to(tl.float32)
    tl.store(out_ptr + at, 1.0 + weight, mask=at < count)


def one_plus(weight: Tensor) -> Tensor:
    """[N] -> 1 + weight, [N] fp32."""
    (count,) = weight.shape
    out = torch.empty(count, dtype=torch.float32, device=weight.device)
    if count:
        grid = (triton.cdiv(count, _BLOCK),)
        _forward[grid](weight, out, count, weight.stride(0), BLOCK=_BLOCK, num_warps=4)
    return out
