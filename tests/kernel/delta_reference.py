"""The gated delta rule token by token, as its definition reads, for any dtype and with autograd."""

import itertools

import torch
from torch import Tensor


def recurrence(
    q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, cu_seqlens: Tensor
) -> Tensor:
    """q, k [T, HK, K], v [T, HV, V], g and beta [T, HV] -> [T, HV, V]."""
    group = v.shape[1] // k.shape[1]

    def unit(x: Tensor) -> Tensor:
        norm = (x.square().sum(-1, keepdim=True) + 1e-6).sqrt()
        return (x / norm).repeat_interleave(group, 1)

    q, k = unit(q) * q.shape[-1] ** -0.5, unit(k)
    rows = []
    for start, end in itertools.pairwise(cu_seqlens.tolist()):
        state = v.new_zeros(v.shape[1], v.shape[2], k.shape[2])
        for t in range(start, end):
            state = g[t].exp()[:, None, None] * state
            wrong = v[t] - (state @ k[t].unsqueeze(-1)).squeeze(-1)  # [HV, V]
            state = state + (beta[t].unsqueeze(-1) * wrong).unsqueeze(-1) * k[t].unsqueeze(1)
            rows.append((state @ q[t].unsqueeze(-1)).squeeze(-1))
    return torch.stack(rows) if rows else v.new_zeros(v.shape)
