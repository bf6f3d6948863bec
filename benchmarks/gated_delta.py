"""Rows of the gated delta rule, with the heads and sizes of Qwen3.5-35B-A3B.

A decode's baseline is the fastest fused recurrence, one pass over the fp32 state: of our own here,
vLLM's and flash-linear-attention's, where they are installed. That of chunks is the latter.
"""

# Arguments of kernels have Triton's own types.
# mypy: disable-error-code="no-untyped-def"

from collections.abc import Iterator
from functools import partial
from importlib.util import find_spec
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from benchmarks.harness import Timing, against, in_turns, row
from isomodels.kernels.gated_delta import gated_delta_rule, paged_gated_delta_rule, state_layout

TEST = "tests/kernel/test_gated_delta_triton.py"
KEY_HEADS, HEADS, DIM = 16, 32, 128
CHUNKS = [([10240], True, 1 / 1.05), ([2048] * 5, False, 1.0)]  # lengths, with gradients, floor


@triton.jit
def _recurrence(q_ptr, k_ptr, v_ptr, g_ptr, beta_ptr, out_ptr, state_ptr, BV: tl.constexpr):
    """One token of a sequence and value head, BV value channels."""
    part, z = tl.program_id(0) % (128 // BV), (tl.program_id(0) // (128 // BV)).to(tl.int64)
    key, d = z // 32 * 16 + z % 32 // 2, tl.arange(0, 128)
    x = part * BV + tl.arange(0, BV)
    at = state_ptr + z * 16384 + x[:, None] * 128 + d[None, :]
    state = tl.load(at)
    k = tl.load(k_ptr + key * 128 + d).to(tl.float32)
    q = tl.load(q_ptr + key * 128 + d).to(tl.float32)
    v = tl.load(v_ptr + z * 128 + x).to(tl.float32)
    k *= tl.rsqrt(tl.sum(k * k) + 1e-6)
    q *= tl.rsqrt(tl.sum(q * q) + 1e-6) * 0.08838834764
    state *= tl.exp(tl.load(g_ptr + z))
    u = (v - tl.sum(state * k[None, :], 1)) * tl.load(beta_ptr + z)
    state += u[:, None] * k[None, :]
    tl.store(at, state)
    tl.store(out_ptr + z * 128 + x, tl.sum(state * q[None, :], 1).to(tl.bfloat16))


def _draw(tokens: int) -> tuple[Tensor, ...]:
    q, k = (torch.randn(tokens, KEY_HEADS, DIM, device="cuda").bfloat16() for _ in range(2))
    v = torch.randn(tokens, HEADS, DIM, device="cuda").bfloat16()
    g, beta = (torch.rand(tokens, HEADS, device="cuda") for _ in range(2))
    return q, k, v, -0.5 * g, beta


@row("gated delta rule decode", TEST)
def decode() -> Iterator[Timing]:
    """Places in the chunk spread over the batch, as in an engine."""
    count = 256
    inputs, out = _draw(count), torch.empty(count, HEADS, DIM, device="cuda").bfloat16()
    fresh = torch.zeros(count, HEADS, DIM, DIM, device="cuda")
    layout = state_layout(KEY_HEADS, HEADS, DIM, DIM, torch.bfloat16, "cuda")
    state = [torch.zeros(count, *shape, dtype=of, device="cuda") for shape, of in layout]
    slots = torch.arange(count, device="cuda").int()
    edges = torch.arange(count + 1, device="cuda").int(), slots % 64 + 129
    ours = [partial(paged_gated_delta_rule, *inputs, *state, slots, *edges, 1)]
    kept = sum(x.nbytes for x in state) / fresh.nbytes
    yield from _decodes(count, ours, (*inputs, out, fresh), f"{kept:.2f} of its bytes are kept")


def _decodes(count: int, ours: list, arguments: tuple[Tensor, ...], note: str) -> Iterator[Timing]:
    shape, found = f"{count} sequences x 1 token", []
    for name, call in _recurrences(count, arguments):
        timing = against("gated delta rule decode", shape, name, ours, [call], 1.25)
        note += f"; {name} {1e3 * timing.baseline_ms:.0f} us"
        found.append(timing)
    best = min(found, key=lambda timing: timing.baseline_ms)
    yield Timing(**{**vars(best), "baseline": "the fastest fused recurrence", "note": note})


def _recurrences(count: int, arguments: tuple[Tensor, ...]) -> Iterator[tuple[str, Any]]:
    q, k, v, g, beta, _, state = arguments
    for width in (8, 16):
        grid = (count * HEADS * DIM // width,)
        call = partial(_recurrence[grid], *arguments, BV=width, num_warps=1)
        yield f"own, {width} channels a warp", call
    options: dict[str, Any] = {"initial_state": state, "use_qk_l2norm_in_kernel": True}
    if find_spec("vllm"):
        from vllm.third_party.flash_linear_attention.ops import fused_recurrent

        batch = [x[None] for x in (q, k, v, g, beta)]  # [1, T, ...]
        bounds = torch.arange(count + 1, device="cuda").int()
        slots = bounds[:-1].clone()
        places = {"cu_seqlens": bounds, "ssm_state_indices": slots}
        rule = fused_recurrent.fused_recurrent_gated_delta_rule
        yield "vLLM's", partial(rule, *batch, **places, **options)
        mixed = torch.cat([x.flatten(1) for x in (q, k, v)], 1)
        a, b = (x.bfloat16() for x in (g, beta))
        head = torch.zeros(HEADS, device="cuda")
        packed = fused_recurrent.fused_recurrent_gated_delta_rule_packed_decode
        out = torch.empty(count, 1, HEADS, DIM, device="cuda").bfloat16()
        rest = (mixed, a, b, head, head, DIM**-0.5, state, out, slots, True)
        yield "vLLM's with its gates", partial(packed, *rest)
    if find_spec("fla"):
        from fla.ops.gated_delta_rule import (  # type: ignore[import-not-found]
            fused_recurrent_gated_delta_rule as fla_rule,
        )

        batch = [x[:, None] for x in (q, k, v, g)]  # [B, 1, ...]
        options |= {"beta": beta[:, None], "output_final_state": True}
        yield "flash-linear-attention's", partial(fla_rule, *batch, **options)


@row("gated delta rule chunks", TEST)
def chunks() -> Iterator[Timing]:
    """A training step's sequence, forward and backward, and prompts."""
    if not find_spec("fla"):
        return
    for lengths, gradients, floor in CHUNKS:
        inputs = [x.requires_grad_(gradients) for x in _draw(sum(lengths))]
        bounds = torch.tensor([0, *lengths], device="cuda").cumsum(0)
        grad = torch.randn_like(inputs[2])

        ours = partial(_ours, inputs, bounds.int(), grad)
        theirs = partial(_theirs, inputs, bounds, grad)
        (ms, spread), (other, other_spread) = in_turns(ours, theirs)
        what = "forward and backward" if gradients else "forward"
        shape = f"{len(lengths)} x {lengths[0]}, {what}"
        spread = max(spread, other_spread)
        yield Timing(
            "gated delta rule chunks", shape, "flash-linear-attention", ms, other, floor, spread
        )


def _ours(inputs: list[Tensor], bounds: Tensor, grad: Tensor) -> None:
    _finish(gated_delta_rule(*inputs, bounds), inputs, grad)


def _theirs(inputs: list[Tensor], bounds: Tensor, grad: Tensor) -> None:
    from fla.ops.gated_delta_rule import chunk_gated_delta_rule

    batch = [x[None] for x in inputs]
    out, _ = chunk_gated_delta_rule(*batch, cu_seqlens=bounds, use_qk_l2norm_in_kernel=True)
    _finish(out[0], inputs, grad)


def _finish(out: Tensor, inputs: list[Tensor], grad: Tensor) -> None:
    if out.requires_grad:
        torch.autograd.grad(out, inputs, grad)
