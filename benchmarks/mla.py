"""Latent attention rows: packed forward, gradients, decode over pages of latents."""

from collections.abc import Callable, Iterator
from functools import partial
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from benchmarks.harness import Timing, against, against_bandwidth, copies, in_turns, row
from isomodels.kernels.mla_attention import mla_attention, paged_mla_attention, split_kv_b
from isomodels.kernels.mla_backward import mla_attention_backward

TEST = "tests/kernel/test_mla_triton.py"
LENGTH = 8192
DECODE = [(256, 4096), (8, 32768)]  # sequences, tokens of each
PAGE = 64


class Heads(NamedTuple):
    """Sizes of a model's latent attention."""

    name: str
    heads: int
    nope: int
    rope: int
    value: int
    rank: int
    forward_floor: float

    @property
    def scale(self) -> float:
        return (self.nope + self.rope) ** -0.5


MODELS = (
    Heads("GLM-4.7-Flash", 20, 192, 64, 256, 512, 0.35),
    Heads("DeepSeek-V3", 128, 128, 64, 128, 512, 0.25),
)


def _random(*shape: int) -> Tensor:
    return torch.randn(*shape, dtype=torch.bfloat16, device="cuda")


def _int32(values: range | list[int]) -> Tensor:
    return torch.tensor(list(values), dtype=torch.int32, device="cuda")


def _kv_b(model: Heads) -> Tensor:
    """W_UK and W_UV of all heads: [heads * (nope + value), rank]."""
    return _random(model.heads * (model.nope + model.value), model.rank) * model.rank**-0.5


def _packed(model: Heads) -> tuple[Tensor, ...]:
    """One sequence, as the module hands it over: queries are views of one projection."""
    q = _random(LENGTH, model.heads, model.nope + model.rope)
    q_nope, q_rope = q.split((model.nope, model.rope), 2)
    latent, k_rope = _random(LENGTH, model.rank), _random(LENGTH, model.rope)
    return q_nope, q_rope.contiguous(), latent, k_rope, _kv_b(model), _int32([0, LENGTH])


def _materialised(model: Heads) -> tuple[Tensor, Tensor, Tensor]:
    """q, k and v of torch's flash attention, whose heads of queries and values have one size."""
    size = max(model.nope + model.rope, model.value)
    q, k, v = (_random(1, model.heads, LENGTH, size) for _ in range(3))
    return q, k, v


def _flash(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    with sdpa_kernel(SDPBackend.FLASH_ATTENTION):
        return F.scaled_dot_product_attention(q, k, v, is_causal=True)


@row("mla forward", TEST)
def forward() -> Iterator[Timing]:
    """Against torch's flash attention on keys and values that are already expanded."""
    for model in MODELS:
        arguments = _packed(model)
        ours = [partial(mla_attention, *arguments, model.scale)]
        theirs = [partial(_flash, *_materialised(model))]
        shape = f"1 x {LENGTH}, {model.heads} heads of {model.name}"
        name = "torch, flash_attention, materialised"
        yield against("mla forward", shape, name, ours, theirs, model.forward_floor)
        torch.cuda.empty_cache()


@row("mla backward", TEST)
def backward() -> Iterator[Timing]:
    """Against torch's flash attention on keys and values that are already expanded."""
    for model in MODELS:
        arguments = _packed(model)
        out, lse = mla_attention(*arguments, model.scale)
        grad = _random(*out.shape)
        ours = partial(mla_attention_backward, grad, *arguments, out, lse, model.scale)
        leaves = [x.requires_grad_() for x in _materialised(model)]
        result = _flash(*leaves)
        dense_grad = _random(*result.shape)
        theirs = partial(torch.autograd.grad, result, leaves, dense_grad, retain_graph=True)
        (ms, spread), (other, other_spread) = in_turns(ours, theirs)
        shape = f"1 x {LENGTH}, {model.heads} heads of {model.name}"
        name = "torch, flash_attention, materialised"
        spread = max(spread, other_spread)
        yield Timing("mla backward", shape, name, ms, other, 0.0, spread)
        torch.cuda.empty_cache()


@row("mla decode", TEST)
def decode() -> Iterator[Timing]:
    """Against vLLM's Triton MLA with its products with W_UK and W_UV, and a copy's bandwidth."""
    for model in MODELS:
        for num_seqs, length in DECODE:
            blocks, width = num_seqs * length // PAGE, model.rank + model.rope
            size = num_seqs * length * width * 2
            sets = []
            for _ in range(copies(size)):
                cache = _random(blocks, 1, PAGE, width)
                table = torch.randperm(blocks, device="cuda").int().view(num_seqs, -1)
                q_nope = _random(num_seqs, model.heads, model.nope)
                q_rope = _random(num_seqs, model.heads, model.rope)
                sets.append((q_nope, q_rope, cache, _kv_b(model), table))
            bounds, lengths = _int32(range(num_seqs + 1)), _int32([length] * num_seqs)
            tail = (bounds, lengths, model.scale, 1, length)
            ours = [partial(paged_mla_attention, *one, *tail) for one in sets]
            shape = f"{num_seqs} x {length}, {model.heads} heads of {model.name}, pages of {PAGE}"
            theirs = [_vllm_decode(model, *one, lengths, length) for one in sets]
            floor = 1.0 if num_seqs == DECODE[0][0] else 0.0
            yield against("mla decode", shape, "vLLM, Triton MLA", ours, theirs, floor)
            yield against_bandwidth("mla decode", shape, ours, size, 0.0)
            del sets, ours, theirs
            torch.cuda.empty_cache()


def _vllm_decode(
    model: Heads, q_nope: Tensor, q_rope: Tensor, cache: Tensor, kv_b: Tensor, table: Tensor,
    lengths: Tensor, longest: int,
) -> Callable[[], Tensor]:  # fmt: skip
    """A decode step as vLLM's backend runs it, with its own number of splits."""
    from vllm.v1.attention.backends.mla.triton_mla import _compute_num_kv_splits
    from vllm.v1.attention.ops.triton_decode_attention import decode_attention_fwd

    num_seqs, rank = len(q_nope), model.rank
    processors = torch.cuda.get_device_properties(0).multi_processor_count
    splits = _compute_num_kv_splits(longest, processors)
    w_uk, w_uv = (x.contiguous() for x in split_kv_b(kv_b, q_nope))
    w_uv = w_uv.transpose(1, 2)  # [heads, rank, value]
    parts = _float32(num_seqs, model.heads, splits, rank + 1)
    one = torch.ones((), device="cuda")
    # [blocks, 1, PAGE, width] -> [blocks, PAGE, 1, width]
    keys = cache.transpose(1, 2)

    def call() -> Tensor:
        latent = torch.bmm(q_nope.transpose(0, 1), w_uk).transpose(0, 1)
        q = torch.cat((latent, q_rope), 2)
        out = torch.zeros(num_seqs, model.heads, rank, dtype=q.dtype, device="cuda")
        lse = torch.zeros(num_seqs, model.heads, dtype=q.dtype, device="cuda")
        decode_attention_fwd(
            q, keys, keys[..., :rank], out, lse, table, lengths, parts, splits, model.scale, PAGE,
            k_scale=one, v_scale=one, is_mla=True,
        )  # fmt: skip
        return torch.bmm(out.transpose(0, 1), w_uv)

    return call


def _float32(*shape: int) -> Tensor:
    return torch.empty(*shape, dtype=torch.float32, device="cuda")
