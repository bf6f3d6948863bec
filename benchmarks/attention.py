"""Attention rows: packed forward and backward, paged decode."""

from collections.abc import Callable, Iterator
from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from benchmarks.harness import Timing, against, against_bandwidth, copies, in_turns, row
from isomodels.kernels.attention import attention, attention_backward, paged_attention

TEST = "tests/kernel/test_attention_triton.py"
HEADS, KV_HEADS, DIM = 32, 8, 128
SCALE = DIM**-0.5
PACKED = [(4, 4096), (1, 16384)]  # sequences, tokens of each
DECODE = [(256, 2048), (8, 32768), (1, 32768)]
PAGE = 16
FLASH3 = "FlashAttention 3"


def _random(*shape: int) -> Tensor:
    return torch.randn(*shape, dtype=torch.bfloat16, device="cuda")


def _int32(values: range | list[int]) -> Tensor:
    return torch.tensor(list(values), dtype=torch.int32, device="cuda")


def _flash3() -> Callable:
    """FlashAttention 3 as vLLM builds and calls it."""
    from vllm.vllm_flash_attn import flash_attn_varlen_func

    if not hasattr(torch.ops._vllm_fa3_C, "fwd"):
        raise RuntimeError("this vLLM is without FlashAttention 3: install its library")
    return partial(flash_attn_varlen_func, softmax_scale=SCALE, causal=True, fa_version=3)


def _packed(num_seqs: int, length: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    qkv = _random(num_seqs * length, HEADS + 2 * KV_HEADS, DIM)  # as the projection leaves it
    q, k, v = qkv.split((HEADS, KV_HEADS, KV_HEADS), 1)
    bounds = _int32(range(0, num_seqs * length + 1, length))
    return q.contiguous(), k.contiguous(), v, bounds


def _dense(x: Tensor, num_seqs: int) -> Tensor:
    """[T, heads, D] -> [num_seqs, all heads, length, D], for torch's attention."""
    x = x.view(num_seqs, -1, *x.shape[1:]).transpose(1, 2)
    return x.repeat_interleave(HEADS // x.shape[1], 1)


def _sdpa(backend: SDPBackend, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    with sdpa_kernel(backend):
        return F.scaled_dot_product_attention(q, k, v, is_causal=True)


@row("attention forward", TEST)
def forward() -> Iterator[Timing]:
    """Against FlashAttention 3, and torch's two."""
    flash3 = _flash3()
    for num_seqs, length in PACKED:
        q, k, v, bounds = _packed(num_seqs, length)
        ours = [partial(attention, q, k, v, bounds, SCALE)]
        shape = f"{num_seqs} x {length}, {HEADS}/{KV_HEADS} heads of {DIM}"
        theirs = [
            partial(
                flash3, q, k, v, cu_seqlens_q=bounds, cu_seqlens_k=bounds,
                max_seqlen_q=length, max_seqlen_k=length,
            )
        ]  # fmt: skip
        yield against("attention forward", shape, FLASH3, ours, theirs, 0.70)
        dense = [_dense(x, num_seqs) for x in (q, k, v)]
        for backend in (SDPBackend.FLASH_ATTENTION, SDPBackend.CUDNN_ATTENTION):
            theirs = [partial(_sdpa, backend, *dense)]
            name = f"torch, {backend.name.lower()}"
            yield against("attention forward", shape, name, ours, theirs, 0.0)


@row("attention backward", TEST)
def backward() -> Iterator[Timing]:
    """Against torch's flash attention, as it is and deterministic, and cuDNN."""
    for num_seqs, length in PACKED:
        q, k, v, bounds = _packed(num_seqs, length)
        grad = _random(*q.shape)
        out, lse = attention(q, k, v, bounds, SCALE)
        ours = partial(attention_backward, grad, q, k, v, bounds, out, lse, SCALE)
        shape = f"{num_seqs} x {length}, {HEADS}/{KV_HEADS} heads of {DIM}"
        leaves = [_dense(x, num_seqs).detach().requires_grad_() for x in (q, k, v)]
        dense_grad = _dense(grad, num_seqs)
        for backend, deterministic, floor in (
            (SDPBackend.FLASH_ATTENTION, False, 0.60),
            (SDPBackend.CUDNN_ATTENTION, False, 0.60),
            (SDPBackend.FLASH_ATTENTION, True, 0.85),
        ):
            result = _sdpa(backend, *leaves)
            theirs = partial(torch.autograd.grad, result, leaves, dense_grad, retain_graph=True)
            name = f"torch, {backend.name.lower()}" + (", deterministic" if deterministic else "")
            torch.use_deterministic_algorithms(deterministic)
            try:
                (ms, spread), (other, other_spread) = in_turns(ours, theirs)
                spread = max(spread, other_spread)
                yield Timing("attention backward", shape, name, ms, other, floor, spread)
            finally:
                torch.use_deterministic_algorithms(False)


@row("paged decode", TEST)
def decode() -> Iterator[Timing]:
    """Against FlashAttention 3 over the same pages, and against the bandwidth of a copy."""
    for num_seqs, length in DECODE:
        pages = num_seqs * length // PAGE
        size = num_seqs * length * KV_HEADS * 2 * DIM * 2
        sets = []
        for _ in range(copies(size)):
            cache = _random(pages, PAGE, KV_HEADS, 2 * DIM).transpose(1, 2)
            table = torch.randperm(pages, device="cuda").int().view(num_seqs, -1)
            sets.append((_random(num_seqs, HEADS, DIM), cache, table))
        bounds, lengths = _int32(range(num_seqs + 1)), _int32([length] * num_seqs)
        tail = (bounds, lengths, SCALE, 1, length)
        ours = [partial(paged_attention, *one, *tail) for one in sets]
        shape = f"{num_seqs} x {length}, {HEADS}/{KV_HEADS} heads of {DIM}, pages of {PAGE}"
        theirs = _flash3_decode(sets, bounds, lengths, length)
        floor = 0.90 if num_seqs > 1 else 0.0
        yield against("paged decode", shape, f"{FLASH3}, split KV", ours, theirs, floor)
        yield against_bandwidth("paged decode", shape, ours, size, 0.0)


def _flash3_decode(
    sets: list[tuple[Tensor, Tensor, Tensor]], bounds: Tensor, lengths: Tensor, longest: int
) -> list[Callable]:
    """Splits chosen by FlashAttention, scheduled once beforehand: vLLM does it once a step."""
    from vllm.vllm_flash_attn.flash_attn_interface import get_scheduler_metadata

    flash3 = _flash3()
    schedule = get_scheduler_metadata(
        batch_size=len(lengths), max_seqlen_q=1, max_seqlen_k=longest, num_heads_q=HEADS,
        num_heads_kv=KV_HEADS, headdim=DIM, cache_seqlens=lengths, cu_seqlens_q=bounds,
        page_size=PAGE, causal=True,
    )  # fmt: skip
    calls = []
    for q, cache, table in sets:
        k, v = cache.transpose(1, 2).split(DIM, -1)  # [pages, PAGE, kv_heads, D] each
        calls.append(
            partial(
                flash3, q, k, v, cu_seqlens_q=bounds, seqused_k=lengths, max_seqlen_q=1,
                max_seqlen_k=longest, block_table=table, scheduler_metadata=schedule,
            )
        )  # fmt: skip
    return calls
