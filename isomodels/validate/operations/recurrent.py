"""The gated delta rule and the convolution before it, whole and from a kept state."""

import torch
import torch.nn.functional as F
from torch import Tensor

from isomodels.kernels.causal_conv import causal_conv, paged_causal_conv
from isomodels.kernels.gated_delta import (
    gated_delta_rule,
    paged_gated_delta_rule,
    state_layout,
)
from isomodels.validate.cases import Inputs
from isomodels.validate.streams import Engine, Stream, Tokens, stream_operation

_NORM_EPS = 1e-6  # of the l2 norm of q and k, as in the reference implementation


def _slots_of(count: int) -> list[int]:
    """Where sequences keep their state: not in order, and not from the first."""
    return [2 * count - 1 - i for i in range(count)]


def _int32(values: list[int], like: Tensor) -> Tensor:
    return torch.tensor(values, dtype=torch.int32, device=like.device)


def _bounds(counts: list[int], like: Tensor) -> Tensor:
    return _int32([0, *counts], like).cumsum(0).int()


# (channels, width)
@stream_operation(
    "causal_conv", "paged_causal_conv", "causal_conv_backward", sizes=((24, 4), (7, 2))
)
def conv(draw: Inputs, channels: int, width: int) -> Stream:
    """Depthwise convolution over the last `width` tokens, then silu."""
    weight = draw.floats(channels, width, seed=1, kind="normal")

    def exact(x: Tensor, weight: Tensor) -> Tensor:
        padded = F.pad(x.t()[None], (width - 1, 0))  # [1, channels, W - 1 + n]
        return F.silu(F.conv1d(padded, weight[:, None], groups=channels))[0].t()

    def engine(lengths: list[int]) -> Engine:
        places = _slots_of(len(lengths))
        shape = (2 * len(lengths), width - 1, channels)
        windows = weight.new_full(shape, torch.nan)

        def step(who: list[int], new: Tokens, counts: list[int], done: list[int]) -> Tensor:
            slots = _int32([places[i] for i in who], weight)
            edges = (_bounds(counts, weight), _int32(done, weight))
            return paged_causal_conv(*new, weight, windows, slots, *edges)

        return step

    return Stream(causal_conv, exact, (draw.floats(draw.num_rows, channels),), (weight,), engine)


def recurrence(q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor) -> Tensor:
    """The rule token by token (Yang et al., 2024), in the dtype of q."""
    q, k = (x / (x.square().sum(-1, keepdim=True) + _NORM_EPS).sqrt() for x in (q, k))
    q, k = (x.repeat_interleave(v.shape[1] // k.shape[1], 1) for x in (q, k))  # [n, heads, K]
    state, out = v.new_zeros(*v.shape[1:], k.shape[2]), []  # [heads, V, K]
    for t in range(len(q)):
        state = state * g[t].exp()[:, None, None]
        update = beta[t][:, None] * (v[t] - (state @ k[t][..., None])[..., 0])
        state = state + update[..., None] * k[t][:, None]
        out.append((state @ q[t][..., None])[..., 0] * q.shape[2] ** -0.5)
    return torch.stack(out)


# (key heads, value heads, key size, value size)
@stream_operation(
    "gated_delta_rule",
    "paged_gated_delta_rule",
    "gated_delta_rule_backward",
    sizes=((2, 4, 16, 24), (1, 1, 32, 8)),
)
def rule(draw: Inputs, key_heads: int, heads: int, key_dim: int, value_dim: int) -> Stream:
    """Keys of any size, decays from 0 to -2, strengths from 0 to 1."""
    count = draw.num_rows
    q, k = (draw.floats(count, key_heads, key_dim, seed=i) for i in (0, 1))
    v = draw.floats(count, heads, value_dim, seed=2)
    g, beta = (draw.floats(count, heads, seed=i, kind="normal").float().abs() for i in (3, 4))
    tokens = (q, k, v, -g.clamp(max=2.0), beta.clamp(max=1.0))

    # The interpreter runs the GPU's kernels on the CPU, which keep a state of their own layout.
    kept_by = "cuda" if draw.place.backend == "triton" else "cpu"

    def engine(lengths: list[int]) -> Engine:
        places, layout = (
            _slots_of(len(lengths)),
            state_layout(key_heads, heads, key_dim, value_dim, q.dtype, kept_by),
        )
        state = [
            torch.full((2 * len(lengths), *shape), torch.nan, dtype=dtype, device=q.device)
            for shape, dtype in layout
        ]

        def step(who: list[int], new: Tokens, counts: list[int], done: list[int]) -> Tensor:
            slots = _int32([places[i] for i in who], q)
            edges = (_bounds(counts, q), _int32(done, q))
            return paged_gated_delta_rule(*new, *state, slots, *edges, max(counts))

        return step

    return Stream(gated_delta_rule, recurrence, tokens, (), engine)
