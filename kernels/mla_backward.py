"""`isomodels::mla_attention_backward`: gradients of latent attention over packed sequences.

Keys and values are expanded from the latents. The bits are no part of the parity contract.

Mathematics: Dao et al., "FlashAttention" (2022), appendix B.
"""

import itertools

import torch
from torch import Tensor

from isomodels.kernels.mla_attention import split_kv_b


@torch.library.custom_op("isomodels::mla_attention_backward", mutates_args=(), device_types="cpu")
def mla_attention_backward(
    grad: Tensor,
    q_nope: Tensor,
    q_rope: Tensor,
    latent: Tensor,
    k_rope: Tensor,
    kv_b: Tensor,
    cu_seqlens: Tensor,
    out: Tensor,
    lse: Tensor,
    scale: float,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Gradients of `mla_attention`; equal from run to run, no part of the parity contract.

    Args:
        grad: gradient of the output, [T, num_heads, V].
        q_nope, q_rope, latent, k_rope, kv_b, cu_seqlens, scale: as given to `mla_attention`.
        out, lse: what it returned.

    Returns:
        Gradients of q_nope, q_rope, latent, k_rope and kv_b, each of its shape and dtype.
    """
    tokens = (q_nope, q_rope, latent, k_rope)
    grads = [torch.zeros_like(x, memory_format=torch.contiguous_format) for x in tokens]
    w_uk, w_uv = (weight.float() for weight in split_kv_b(kv_b, q_nope))
    dweights = (torch.zeros_like(w_uk), torch.zeros_like(w_uv))
    for start, end in itertools.pairwise(cu_seqlens.tolist()):
        parts = [x[start:end].float() for x in (grad, *tokens, out, lse)]
        found, found_weights = _sequence_backward(scale, w_uk, w_uv, *parts)
        for whole, part in zip(grads, found, strict=True):
            whole[start:end] = part
        for whole, part in zip(dweights, found_weights, strict=True):
            whole += part
    dkv_b = torch.cat(dweights, 1).view(kv_b.shape).to(kv_b.dtype)
    return grads[0], grads[1], grads[2], grads[3], dkv_b


@mla_attention_backward.register_kernel("cuda")
def _(
    grad: Tensor,
    q_nope: Tensor,
    q_rope: Tensor,
    latent: Tensor,
    k_rope: Tensor,
    kv_b: Tensor,
    cu_seqlens: Tensor,
    out: Tensor,
    lse: Tensor,
    scale: float,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    from isomodels.kernels import mla_backward_triton as triton_backend

    tensors = (grad, q_nope, q_rope, latent, k_rope, kv_b, cu_seqlens, out, lse)
    return triton_backend.mla_attention_backward(*tensors, scale)


@mla_attention_backward.register_fake
def _(
    grad: Tensor,
    q_nope: Tensor,
    q_rope: Tensor,
    latent: Tensor,
    k_rope: Tensor,
    kv_b: Tensor,
    cu_seqlens: Tensor,
    out: Tensor,
    lse: Tensor,
    scale: float,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    like = torch.contiguous_format
    return (
        torch.empty_like(q_nope, memory_format=like),
        torch.empty_like(q_rope, memory_format=like),
        torch.empty_like(latent, memory_format=like),
        torch.empty_like(k_rope, memory_format=like),
        torch.empty_like(kv_b, memory_format=like),
    )


def _sequence_backward(
    scale: float,
    w_uk: Tensor,
    w_uv: Tensor,
    grad: Tensor,
    q_nope: Tensor,
    q_rope: Tensor,
    latent: Tensor,
    k_rope: Tensor,
    out: Tensor,
    lse: Tensor,
) -> tuple[tuple[Tensor, ...], tuple[Tensor, Tensor]]:
    """Gradients of one sequence over expanded keys and values, dense, fp32.

    w_uk [heads, nope, R], w_uv [heads, V, R], grad and out [n, heads, V], q_nope and q_rope
    [n, heads, D], latent [n, R], k_rope [n, P], lse [n, heads]
    -> (those of q_nope, q_rope, latent, k_rope), (of w_uk, w_uv).
    """
    num_heads, nope, _ = w_uk.shape
    n = len(latent)
    grad, out = grad.transpose(0, 1), out.transpose(0, 1)  # [heads, n, V]
    q = torch.cat((q_nope, q_rope), 2).transpose(0, 1)  # [heads, n, nope + P]
    k = torch.cat((latent @ w_uk.transpose(1, 2), k_rope.expand(num_heads, -1, -1)), 2)
    v = latent @ w_uv.transpose(1, 2)  # [heads, n, V]
    hidden = torch.ones(n, n, dtype=torch.bool).triu_(1)
    scores = (q @ k.transpose(1, 2)) * scale - lse.t().unsqueeze(-1)
    weights = torch.exp(scores).masked_fill_(hidden, 0.0)  # [heads, n, n]
    dv = weights.transpose(1, 2) @ grad
    dweights = grad @ v.transpose(1, 2) - (grad * out).sum(-1, keepdim=True)
    dscores = weights * dweights * scale
    dq = (dscores @ k).transpose(0, 1)  # [n, heads, nope + P]
    dk = dscores.transpose(1, 2) @ q  # [heads, n, nope + P]
    dk_nope, dk_rope = dk[..., :nope], dk[..., nope:]
    dlatent = (dk_nope @ w_uk + dv @ w_uv).sum(0)  # [n, R]
    dw_uk, dw_uv = dk_nope.transpose(1, 2) @ latent, dv.transpose(1, 2) @ latent
    return (dq[..., :nope], dq[..., nope:], dlatent, dk_rope.sum(0)), (dw_uk, dw_uv)
