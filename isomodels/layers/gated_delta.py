"""The gated delta rule layer of Qwen3-Next and Qwen3.5: projections, short convolution, rule, norm.

T tokens, HK key heads of K channels, HV value heads of V channels.
"""

from collections.abc import Sequence
from typing import Unpack

import torch
from torch import Tensor, nn

from isomodels.batch import Batch
from isomodels.kernels import gated_delta
from isomodels.kernels.causal_conv import causal_conv, paged_causal_conv
from isomodels.kernels.delta_gates import delta_gates
from isomodels.kernels.gated_delta import gated_delta_rule, paged_gated_delta_rule
from isomodels.kernels.gated_norm import gated_rms_norm
from isomodels.layers.collectives import enter, sum_gradients
from isomodels.layers.hybrid_config import HybridConfig
from isomodels.layers.linear import Linear, Placed, RowLinear, parameter
from isomodels.layers.parallel import ALONE, TensorParallel, split
from isomodels.layers.pinned import PinnedParameters


def state_layout(
    config: HybridConfig, dtype: torch.dtype, device_type: str = "cpu", ranks: int = 1
) -> gated_delta.Layout:
    """Shape and dtype of each tensor of one sequence's state in one layer.

    The convolution's window first, then the tensors of `kernels.gated_delta.state_layout`. Of
    `ranks` of tensor parallelism each has its own heads.
    """
    key_heads = config.linear_num_key_heads // ranks
    heads = config.linear_num_value_heads // ranks
    key_dim, value_dim = config.linear_key_head_dim, config.linear_value_head_dim
    channels = 2 * key_heads * key_dim + heads * value_dim
    window = ((config.linear_conv_kernel_dim - 1, channels), dtype)
    sizes = key_heads, heads, key_dim, value_dim
    return (window, *gated_delta.state_layout(*sizes, dtype, device_type))


class ShortConv(nn.Module):
    """Depthwise causal convolution and silu over the channels of several parts.

    `state_index`: which of the engine's states.
    """

    def __init__(
        self, channels: Sequence[int], width: int, state_index: int, **placed: Unpack[Placed]
    ):
        super().__init__()
        self.state_index = state_index
        parallel = placed.get("layout", ALONE).tensor
        shard = split(channels, parallel.rank, parallel.size)
        self.weight = parameter(shard.length, 1, width, **placed)  # the shape in HF files
        self.shards = {"weight": shard} if parallel.size > 1 else {}

    def forward(self, x: Tensor, batch: Batch) -> Tensor:
        """[T, channels] -> [T, channels]."""
        weight = self.weight.squeeze(1)
        if batch.states is None:
            return causal_conv(x, weight, batch.cu_seqlens_q)
        window, *_ = batch.states.tensors[self.state_index]
        slots = batch.states.slots[self.state_index]
        return paged_causal_conv(x, weight, window, slots, batch.cu_seqlens_q, batch.seq_lens)


class DeltaGates(PinnedParameters):
    """Decay and writing strength; their parameters are fp32 in a model of any dtype."""

    def __init__(self, num_heads: int, device: torch.device | None, parallel: TensorParallel):
        super().__init__()
        shard = split([num_heads], parallel.rank, parallel.size)
        self.A_log = parameter(shard.length, dtype=torch.float32, device=device)
        self.dt_bias = parameter(shard.length, dtype=torch.float32, device=device)
        self.shards = {"A_log": shard, "dt_bias": shard} if parallel.size > 1 else {}

    def forward(self, a: Tensor, b: Tensor) -> tuple[Tensor, Tensor]:
        """a and b [T, HV] -> (log decay [T, HV] fp32, writing strength [T, HV] fp32)."""
        return delta_gates(a, b, self.A_log, self.dt_bias)


class DeltaRule(nn.Module):
    """The rule itself; the only place where trainer and engine part ways."""

    def __init__(self, state_index: int):
        super().__init__()
        self.state_index = state_index

    def forward(
        self, q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, batch: Batch
    ) -> Tensor:
        """q and k [T, HK, K], v [T, HV, V], g and beta [T, HV] -> [T, HV, V]."""
        if batch.states is None:
            return gated_delta_rule(q, k, v, g, beta, batch.cu_seqlens_q)
        _, *state = batch.states.tensors[self.state_index]
        slots = batch.states.slots[self.state_index]
        step = slots, batch.cu_seqlens_q, batch.seq_lens, batch.max_seqlen_q
        return paged_gated_delta_rule(q, k, v, g, beta, *state, *step)


class GatedRMSNorm(PinnedParameters):
    """RMSNorm of each head, times the weight as stored, times silu(gate)."""

    def __init__(
        self, size: int, eps: float, device: torch.device | None, parallel: TensorParallel
    ):
        super().__init__()
        self.parallel = parallel  # each rank norms its own heads
        self.weight = parameter(size, dtype=torch.float32, device=device)
        self.eps = eps

    def forward(self, x: Tensor, gate: Tensor) -> Tensor:
        """x and gate [T, HV, V] -> [T, HV, V]."""
        weight = sum_gradients(self.weight, self.parallel)
        return gated_rms_norm(x, gate, weight, self.eps)


class GatedDeltaNet(nn.Module):
    """Linear attention by the gated delta rule.

    Args:
        config: the architecture's.
        state_index: which of the engine's states are this layer's.
    """

    def __init__(self, config: HybridConfig, state_index: int, **placed: Unpack[Placed]):
        super().__init__()
        self.key_dim, self.value_dim = config.linear_key_head_dim, config.linear_value_head_dim
        heads, device = config.linear_num_value_heads, placed.get("device")
        keys, values = config.linear_num_key_heads * self.key_dim, heads * self.value_dim
        parallel = self.parallel = placed.get("layout", ALONE).tensor
        # the rows [q | k | v | z | b | a], of which each rank has those of its heads
        rows = (keys, keys, values, values, heads, heads)
        shard = split(rows, parallel.rank, parallel.size)
        self.in_proj = Linear(config.hidden_size, sum(rows), shard=shard, **placed)
        q, k, v, *rest = (size // parallel.size for size in rows)
        self.qkv_sizes, self.sizes = (q, k, v), (q + k + v, *rest)
        width = config.linear_conv_kernel_dim
        self.conv1d = ShortConv(rows[:3], width, state_index, **placed)
        self.gates = DeltaGates(heads, device, parallel)
        self.rule = DeltaRule(state_index)
        self.norm = GatedRMSNorm(self.value_dim, config.rms_norm_eps, device, parallel)
        self.out_proj = RowLinear(values, config.hidden_size, **placed)

    def forward(self, x: Tensor, positions: Tensor, batch: Batch) -> Tensor:
        """x [T, H] -> [T, H]; the order of the tokens is all that counts of `positions`."""
        x = enter(x, self.parallel)
        qkv, z, b, a = self.in_proj(x).split(self.sizes, dim=1)
        q, k, v = self.conv1d(qkv, batch).split(self.qkv_sizes, dim=1)
        q, k = (part.unflatten(1, (-1, self.key_dim)) for part in (q, k))  # [T, HK, K]
        v, z = (part.unflatten(1, (-1, self.value_dim)) for part in (v, z))  # [T, HV, V]
        o = self.rule(q, k, v, *self.gates(a, b), batch)
        return self.out_proj(self.norm(o, z).flatten(1))
