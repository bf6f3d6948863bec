"""Attention rows: packed forward and backward, paged decode."""

from collections.abc import Callable, Iterator
from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from benchmarks.harness import Timing, _summary, against, against_bandwidth, copies, row
from isomodels.kernels.attention import attention, attention_backward, paged_attention

TEST = "tests/kernel/test_attention_triton.py"
HEADS, KV_HEADS, DIM = 32, 8, 128
SCALE = DIM**-0.5
PACKED = [(4, 4096), (1, 16384)]  # sequences, tokens of each
DECODE = [(256, 2048), (8, 32768)]
PAGE = 16


def _random(*shape: int) -> Tensor:
    return torch.randn(*shape, dtype=torch.bfloat16, device="cuda")


def _int32(values: range | list[int]) -> Tensor:
    return torch.tensor(list(values), dtype=torch.int32, device="cuda")


def _flash3() -> Callable | None:
    """FlashAttention 3 as vLLM builds it, where it is installed."""
    try:
        from vllm.vllm_flash_attn import flash_attn_varlen_func, is_fa_version_supported
    except ImportError:
        return None
    return flash_attn_varlen_func if is_fa_version_supported(3) else None


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


def _in_turns(*contestants: Callable, samples: int = 15, calls: int = 4) -> list[tuple]:
    """Medians and spreads like `time_ms`, without graphs: torch's backward cannot be captured on
    another stream than its forward ran on. The calls last milliseconds, so gaps do not count."""
    times: list[list[float]] = [[] for _ in contestants]
    for sample in range(samples + 2):
        for call, collected in zip(contestants, times, strict=True):
            begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            torch.cuda.synchronize()
            begin.record()
            for _ in range(calls):
                call()
            end.record()
            end.synchronize()
            if sample >= 2:
                collected.append(begin.elapsed_time(end) / calls)
    return [_summary(collected) for collected in times]


@row("attention forward", TEST)
def forward() -> Iterator[Timing]:
    """Against FlashAttention 3; where it is missing, against the faster of torch's two."""
    flash3 = _flash3()
    for num_seqs, length in PACKED:
        q, k, v, bounds = _packed(num_seqs, length)
        ours = [partial(attention, q, k, v, bounds, SCALE)]
        shape = f"{num_seqs} x {length}, {HEADS}/{KV_HEADS} heads of {DIM}"
        if flash3 is not None:
            kwargs = {
                "q": q, "k": k, "v": v, "cu_seqlens_q": bounds, "cu_seqlens_k": bounds,
                "max_seqlen_q": length, "max_seqlen_k": length, "softmax_scale": SCALE,
                "causal": True, "fa_version": 3,
            }  # fmt: skip
            theirs = [partial(flash3, **kwargs)]
            yield against("attention forward", shape, "FlashAttention 3", ours, theirs, 0.70)
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
                (ms, spread), (other, other_spread) = _in_turns(ours, theirs)
                spread = max(spread, other_spread)
                yield Timing("attention backward", shape, name, ms, other, floor, spread)
            finally:
                torch.use_deterministic_algorithms(False)


@row("paged decode", TEST)
def decode() -> Iterator[Timing]:
    """Against FlashAttention 3 over the same pages; always against the bandwidth of a copy."""
    flash3 = _flash3()
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
        if flash3 is not None:
            common = {
                "cu_seqlens_q": bounds, "seqused_k": lengths, "max_seqlen_q": 1,
                "max_seqlen_k": length, "softmax_scale": SCALE, "causal": True, "fa_version": 3,
            }  # fmt: skip
            theirs = []
            for q, cache, table in sets:
                k, v = cache.transpose(1, 2).split(DIM, -1)
                theirs.append(partial(flash3, q=q, k=k, v=v, block_table=table, **common))
            yield against("paged decode", shape, "FlashAttention 3", ours, theirs, 0.90)
        yield against_bandwidth("paged decode", shape, ours, size, 0.0)
