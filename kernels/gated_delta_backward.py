"""`isomodels::gated_delta_rule_backward`: gradients of the gated delta rule.

The forward is computed again in the chunked form of `gated_delta.py`, keeping the state before each
chunk, and walked back from the last chunk to the first. Letters as there; a capital letter holds
all rows of one chunk: P masked decayed q.k, A the strictly lower beta decayed k.k, (I + A) U = R.
"""

import itertools

import torch
from torch import Tensor

from isomodels.kernels.gated_delta_chunk import CHUNK, NORM_EPS


@torch.library.custom_op(
    "isomodels::gated_delta_rule_backward", mutates_args=(), device_types="cpu"
)
def gated_delta_rule_backward(
    grad: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor,
    beta: Tensor,
    cu_seqlens: Tensor,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Equal from run to run, no part of the parity contract.

    Args:
        grad: gradient of the output, [T, num_v_heads, value_dim].
        q, k, v, g, beta, cu_seqlens: as given to `gated_delta_rule`.

    Returns:
        Gradients of q, k, v, g and beta, each of its shape and dtype.
    """
    return _by_sequence(grad, q, k, v, g, beta, cu_seqlens)


def _by_sequence(
    grad: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor,
    beta: Tensor,
    cu_seqlens: Tensor,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    inputs = (q, k, v, g, beta)
    gradients = tuple(torch.zeros_like(x, memory_format=torch.contiguous_format) for x in inputs)
    for start, end in itertools.pairwise(cu_seqlens.tolist()):
        if end > start:
            rows = slice(start, end)
            parts = _sequence(grad[rows], *(x[rows] for x in inputs))
            for whole, part in zip(gradients, parts, strict=True):
                whole[rows] = part.to(whole.dtype)
    return gradients  # type: ignore[return-value]


@gated_delta_rule_backward.register_kernel("cuda")
def _(
    grad: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor,
    beta: Tensor,
    cu_seqlens: Tensor,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    from isomodels.kernels import gated_delta_backward_triton

    if min(k.shape[2], v.shape[2]) < 128:
        # The kernels are made for the sizes of models; smaller ones are those of tests.
        return _by_sequence(grad, q, k, v, g, beta, cu_seqlens)
    return gated_delta_backward_triton.gated_delta_rule_backward(grad, q, k, v, g, beta, cu_seqlens)


@gated_delta_rule_backward.register_fake
def _(
    grad: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor,
    beta: Tensor,
    cu_seqlens: Tensor,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    dq, dk, dv, dg, dbeta = (x.new_empty(x.shape) for x in (q, k, v, g, beta))
    return dq, dk, dv, dg, dbeta


class _Chunk:
    """One chunk of all value heads; matrices are [HV, CHUNK, CHUNK], rows [HV, CHUNK, ...]."""

    def __init__(self, q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, *, state: Tensor):
        self.q, self.k, self.v, self.beta, self.state = q, k, v, beta.unsqueeze(-1), state
        sums = g.cumsum(-1)
        lower = torch.ones(CHUNK, CHUNK, dtype=torch.bool, device=q.device).tril()
        self.decay = (sums[:, :, None] - sums[:, None]).masked_fill(~lower, -torch.inf).exp()
        self.row_decay = sums.exp().unsqueeze(-1)
        self.last_decay = (sums[:, -1:] - sums).exp().unsqueeze(-1)
        self.kk, self.qk = k @ k.mT, q @ k.mT
        self.solve = (self.beta * self.kk * self.decay).tril(-1)
        self.read_k, self.read_q = k @ state.mT, q @ state.mT  # [HV, CHUNK, V]
        right = self.beta * (v - self.row_decay * self.read_k)
        self.u = torch.linalg.solve_triangular(self.solve, right, upper=False, unitriangular=True)

    def next_state(self) -> Tensor:
        return self.row_decay[:, -1:] * self.state + (self.u * self.last_decay).mT @ self.k

    def backward(self, do: Tensor, dstate: Tensor) -> tuple[Tensor, ...]:
        """do [HV, CHUNK, V], dstate [HV, V, K] -> gradients of q, k, v, g, beta and the state."""
        written = self.k @ dstate.mT  # [HV, CHUNK, V]
        reads = self.qk * self.decay
        du = reads.mT @ do + self.last_decay * written
        dright = torch.linalg.solve_triangular(self.solve.mT, du, upper=True, unitriangular=True)
        dsolve = -(dright @ self.u.mT).tril(-1)
        dreads = (do @ self.u.mT).tril()
        dread_k, dread_q = -self.beta * self.row_decay * dright, self.row_decay * do
        dkk, dqk = dsolve * self.beta * self.decay, dreads * self.decay

        dq = dread_q @ self.state + dqk @ self.k
        dk = (self.u * self.last_decay) @ dstate + dread_k @ self.state
        dk = dk + (dkk + dkk.mT) @ self.k + dqk.mT @ self.q
        dv = self.beta * dright
        dbeta = (dright * (self.v - self.row_decay * self.read_k)).sum(-1)
        dbeta = dbeta + (dsolve * self.kk * self.decay).sum(-1)
        dstate_in = self.row_decay[:, -1:] * dstate + dread_q.mT @ self.q + dread_k.mT @ self.k

        # g of row t is in every decay that passes t: of pairs i >= t > j, of reads of the state by
        # rows i >= t, of writes to the next state by rows j < t, and of the state itself. Sums of
        # these alone: a difference of two sums would drown a small one.
        pairs = (dsolve * self.solve + dreads * reads).tril(-1)
        later = pairs.flip(-2).cumsum(-2).flip(-2).tril(-1)  # [t, j]: sum over i >= t
        dg = later.sum(-1)
        dreads_of_state = (dread_q * self.read_q + dread_k * self.read_k).sum(-1)
        dg = dg + dreads_of_state.flip(-1).cumsum(-1).flip(-1)
        dwrites = (self.u * self.last_decay * written).sum(-1)
        dg[:, 1:] += dwrites[:, :-1].cumsum(-1)
        dg = dg + (self.row_decay[:, -1:] * self.state * dstate).sum((1, 2)).unsqueeze(-1)
        return dq, dk, dv, dg, dbeta, dstate_in


def _sequence(
    grad: Tensor, q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor
) -> tuple[Tensor, ...]:
    """Gradients of one sequence in fp32: q and k [n, HK, K], v and grad [n, HV, V]."""
    length, key_heads, key_dim = q.shape
    group = v.shape[1] // key_heads
    scale = key_dim**-0.5
    unit_q, unit_k = _normalize(q), _normalize(k)

    def chunks(x: Tensor) -> Tensor:
        """[n, heads, ...] -> [chunks, HV, CHUNK, ...], zeros at the end."""
        padded = x.new_zeros(-(-length // CHUNK) * CHUNK, *x.shape[1:], dtype=torch.float32)
        padded[:length] = x
        padded = padded.unflatten(0, (-1, CHUNK)).transpose(1, 2)
        return padded if x.shape[1] == v.shape[1] else padded.repeat_interleave(group, 1)

    state = v.new_zeros(v.shape[1], v.shape[2], key_dim, dtype=torch.float32)
    walked = []
    for inputs in zip(*(chunks(x) for x in (unit_q * scale, unit_k, v, g, beta)), strict=True):
        walked.append(_Chunk(*inputs, state=state))
        state = walked[-1].next_state()
    dstate = torch.zeros_like(state)
    found: list[tuple[Tensor, ...]] = []
    for chunk, do in zip(reversed(walked), reversed(chunks(grad).unbind()), strict=True):
        *parts, dstate = chunk.backward(do, dstate)
        found.insert(0, tuple(parts))
    # [chunks][HV, CHUNK, ...] -> [n, HV, ...]
    dq, dk, dv, dg, dbeta = (
        torch.cat(parts, 1)[:, :length].transpose(0, 1) for parts in zip(*found, strict=True)
    )
    dq, dk = (x.unflatten(1, (key_heads, group)).sum(2) for x in (dq, dk))
    return _normalize_backward(dq * scale, q), _normalize_backward(dk, k), dv, dg, dbeta


def _normalize(x: Tensor) -> Tensor:
    x = x.float()
    return x * torch.rsqrt(x.square().sum(-1, keepdim=True) + NORM_EPS)


def _normalize_backward(grad: Tensor, x: Tensor) -> Tensor:
    x = x.float()
    inverse = torch.rsqrt(x.square().sum(-1, keepdim=True) + NORM_EPS)
    unit = x * inverse
    return (grad - unit * (grad * unit).sum(-1, keepdim=True)) * inverse
