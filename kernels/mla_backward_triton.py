"""Triton backend of the gradients of latent attention.

Keys and values are expanded from the latents, as they need not be in the forward, and go through
the backward of dense attention: its bits are the same from run to run, no more is promised.
"""

import torch
import torch.nn.functional as F
from torch import Tensor

from isomodels.kernels.attention_backward_triton import attention_backward
from isomodels.kernels.attention_triton import HEAD_DIMS
from isomodels.kernels.linear_triton import input_gradient, linear, weight_gradient

Gradients = tuple[Tensor, Tensor, Tensor, Tensor, Tensor]


def common_size(query: int, value: int) -> int:
    """The head size of dense attention that holds both.

    Raises:
        ValueError: there is none.
    """
    for size in HEAD_DIMS:
        if size >= max(query, value):
            return size
    raise ValueError(
        f"latent attention has no backward for queries of {query} and values of {value} a head: "
        f"at most {HEAD_DIMS[-1]}"
    )


def mla_attention_backward(
    grad: Tensor, q_nope: Tensor, q_rope: Tensor, latent: Tensor, k_rope: Tensor, kv_b: Tensor,
    cu_seqlens: Tensor, out: Tensor, lse: Tensor, scale: float,
) -> Gradients:  # fmt: skip
    """See `isomodels.kernels.mla_backward.mla_attention_backward`."""
    num_tokens, num_heads, nope = q_nope.shape
    rope, value = q_rope.shape[2], out.shape[2]
    size = common_size(nope + rope, value)
    expanded = linear(latent, kv_b).view(num_tokens, num_heads, nope + value)

    # Triton makes a constant of an argument that is 1, on which those kernels do not compile: a
    # single head gets one of zeros beside it, whose gradients are zeros.
    spare = int(num_heads == 1)

    def filled(*parts: Tensor) -> Tensor:
        """Parts of a head [T, heads, D], side by side, then zeros."""
        return F.pad(torch.cat(parts, 2), (0, size - sum(x.shape[2] for x in parts), 0, spare))

    keys = filled(expanded[..., :nope], k_rope.unsqueeze(1).expand(-1, num_heads, -1))
    values, queries = filled(expanded[..., nope:]), filled(q_nope, q_rope)
    found = attention_backward(
        filled(grad), queries, keys, values, cu_seqlens, filled(out), F.pad(lse, (0, spare)), scale
    )
    dq, dk, dv = (x[:, :num_heads] for x in found)
    # The rotated key is one for all heads.
    dk_rope = dk[..., nope : nope + rope].sum(1, dtype=torch.float32).to(k_rope.dtype)
    dexpanded = torch.cat((dk[..., :nope], dv[..., :value]), 2).flatten(1)  # [T, heads * (n + V)]
    return (
        dq[..., :nope].contiguous(),
        dq[..., nope : nope + rope].contiguous(),
        input_gradient(dexpanded, kv_b),
        dk_rope,
        weight_gradient(dexpanded, latent),
    )
