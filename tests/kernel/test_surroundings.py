"""State of the process that a host may change around an operation: no bit may follow it."""

import hashlib
import os
import subprocess
import sys
from collections.abc import Callable
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path

import pytest
import torch
from torch import Tensor

from isomodels.kernels.attention import attention, paged_attention, write_kv_cache
from isomodels.kernels.causal_conv import causal_conv, paged_causal_conv
from isomodels.kernels.delta_gates import delta_gates
from isomodels.kernels.embedding import embedding
from isomodels.kernels.gated_delta import gated_delta_rule, paged_gated_delta_rule, state_layout
from isomodels.kernels.gated_norm import gated_rms_norm
from isomodels.kernels.grouped_linear import grouped_linear
from isomodels.kernels.linear import linear
from isomodels.kernels.logprob import lm_head, log_normalize, logprobs, token_logprobs
from isomodels.kernels.logprob_kept import token_logprobs_kept
from isomodels.kernels.mla_attention import (
    mla_attention,
    paged_mla_attention,
    write_latent_cache,
)
from isomodels.kernels.moe_combine import moe_combine
from isomodels.kernels.moe_sort import moe_sort
from isomodels.kernels.one_plus import one_plus
from isomodels.kernels.partial_rope import partial_rope
from isomodels.kernels.rms_norm import add_rms_norm, rms_norm
from isomodels.kernels.rope import rope, rope_table
from isomodels.kernels.rope_qkv import rope_qkv, rope_qkv_to_cache
from isomodels.kernels.router import route, router_logits
from isomodels.kernels.row_linear import row_linear
from isomodels.kernels.schedule import SCHEDULES
from isomodels.kernels.sigmoid_gate import sigmoid_gate
from isomodels.kernels.swiglu import swiglu
from tests.kernel.battery import assert_same_bits, bits, hard, threads

IDS = torch.arange(20)
INT32 = torch.tensor([0, 20], dtype=torch.int32)
TABLE = torch.tensor([[1, 0]], dtype=torch.int32)
X, W, NORM = hard(20, 64, kind="normal"), hard(70, 64, kind="normal", seed=1), hard(64, seed=2)
HEADS = X.view(20, 4, 16)
K, V = HEADS[:, :2], HEADS[:, 2:]


def run_write_kv_cache() -> Tensor:
    cache = torch.zeros(2, 2, 16, 32, device="cpu", dtype=torch.float32)
    write_kv_cache(K, V, cache, IDS)
    return cache


def run_paged_attention() -> Tensor:
    cache = run_write_kv_cache().flip(0).contiguous()
    return paged_attention(HEADS, cache, TABLE, INT32, INT32[1:], 0.25, 20, 20)


# of 4 heads: nope 12, rope 4, v 8, rank 16
Q_NOPE, Q_ROPE = HEADS.split((12, 4), 2)
LATENT, K_ROPE, KV_B = X[:, :16], X[:, 16:20], hard(80, 16, kind="normal", seed=3)


def run_write_latent_cache() -> Tensor:
    cache = torch.zeros(2, 1, 16, 20, device="cpu", dtype=torch.float32)
    write_latent_cache(LATENT, K_ROPE, cache, IDS)
    return cache


def run_paged_mla_attention() -> Tensor:
    cache = run_write_latent_cache().flip(0).contiguous()
    bounds = (TABLE, INT32, INT32[1:], 0.25, 20, 20)
    return paged_mla_attention(Q_NOPE, Q_ROPE, cache, KV_B, *bounds)


DELTA = (HEADS[:, :2], HEADS[:, 2:], HEADS, -X[:, :4].abs(), X[:, 4:8].sigmoid())  # q, k, v, g, b
SLOT = torch.tensor([1], dtype=torch.int32)


def run_paged_causal_conv() -> Tensor:
    windows = torch.zeros(2, 3, 64, device="cpu", dtype=torch.float32)
    out = paged_causal_conv(X, W[:64, :4], windows, SLOT, INT32, INT32[1:])
    return torch.cat((out, windows[1]))


def run_paged_gated_delta_rule() -> Tensor:
    layout = state_layout(2, 4, 16, 16, torch.float32)
    pages = [torch.zeros(2, *shape, device="cpu", dtype=dtype) for shape, dtype in layout]
    out = paged_gated_delta_rule(*DELTA, *pages, SLOT, INT32, INT32[1:], 1 << 20)
    return torch.cat([out.flatten(), *(page.flatten() for page in pages)])


def rope_qkv_arguments() -> tuple:
    return HEADS, IDS, rope_table(16, 1e6, 64), NORM[:16], NORM[16:32], 2, 1e-6


def run_rope_qkv_to_cache() -> Tensor:
    cache = torch.zeros(2, 1, 16, 32, device="cpu", dtype=torch.float32)
    parts = rope_qkv_to_cache(*rope_qkv_arguments(), cache, IDS)
    return torch.cat((*(part.flatten() for part in parts), cache.flatten()))


# 20 tokens, each to 3 of 5 experts
EXPERT_IDS = torch.stack([(IDS * step + step) % 5 for step in (1, 2, 3)], 1).sort(1).values.int()
EXPERT_WEIGHTS = W.view(5, 14, 64)
BIAS = hard(70, kind="normal", seed=3)


def run_route() -> Tensor:
    weights, ids = route(X, 6, "softmax", False)
    grouped, others = route(W[:20], 6, "sigmoid", True, 2.5, BIAS[:64], 8, 4)
    return torch.cat((weights, ids.float(), grouped, others.float()), 1)


def run_moe_sort() -> Tensor:
    return torch.cat([part.flatten().float() for part in moe_sort(EXPERT_IDS, 5)])


def run_grouped_linear() -> Tensor:
    return grouped_linear(X, EXPERT_WEIGHTS, *moe_sort(EXPERT_IDS, 5))


def run_moe_combine() -> Tensor:
    y, places = W[:60], torch.arange(60, dtype=torch.int32, device="cpu").view(20, 3)
    return moe_combine(y, X[:, :3].contiguous(), places, X, NORM[:20, None])


OPERATIONS: dict[str, Callable[[], Tensor]] = {
    "linear": lambda: linear(X, W, W[:, 0]),
    "router_logits": lambda: router_logits(X, W),
    "route": run_route,
    "moe_sort": run_moe_sort,
    "grouped_linear": run_grouped_linear,
    "moe_combine": run_moe_combine,
    "row_linear": lambda: row_linear(X, W),
    "rms_norm": lambda: rms_norm(X, NORM, 1e-6),
    "add_rms_norm": lambda: torch.cat(add_rms_norm(X, X * 2, NORM, 1e-6)),
    "rope": lambda: rope(HEADS, IDS, rope_table(16, 1e6, 64), NORM[:16], 1e-6),
    "rope_qkv": lambda: torch.cat(rope_qkv(*rope_qkv_arguments()), 1),
    "rope_qkv_to_cache": run_rope_qkv_to_cache,
    "attention": lambda: attention(HEADS, K, V, INT32, 0.25)[0],
    "paged_attention": run_paged_attention,
    "write_kv_cache": run_write_kv_cache,
    "mla_attention": lambda: mla_attention(Q_NOPE, Q_ROPE, LATENT, K_ROPE, KV_B, INT32, 0.25)[0],
    "paged_mla_attention": run_paged_mla_attention,
    "write_latent_cache": run_write_latent_cache,
    "swiglu": lambda: swiglu(X),
    "sigmoid_gate": lambda: sigmoid_gate(HEADS, HEADS * 2),
    "one_plus": lambda: one_plus(NORM),
    "partial_rope": lambda: partial_rope(HEADS, IDS, rope_table(8, 1e6, 64), NORM[:16], 1e-6),
    "causal_conv": lambda: causal_conv(X, W[:64, :4], INT32),
    "paged_causal_conv": run_paged_causal_conv,
    "delta_gates": lambda: torch.cat(delta_gates(X, X * 2, NORM, NORM)),
    "gated_delta_rule": lambda: gated_delta_rule(*DELTA, INT32),
    "paged_gated_delta_rule": run_paged_gated_delta_rule,
    "gated_rms_norm": lambda: gated_rms_norm(HEADS, HEADS * 2, NORM[:16], 1e-6),
    "embedding": lambda: embedding(IDS, W),
    "lm_head": lambda: lm_head(X, W),
    "log_normalize": lambda: log_normalize(X, 0.7),
    "logprobs": lambda: logprobs(X, W, 0.7),
    "token_logprobs": lambda: token_logprobs(X, W, IDS, 0.7)[0],
    "token_logprobs_kept": lambda: token_logprobs_kept(X, W, IDS, 0.7, 70)[0],
}


@contextmanager
def default_dtype(dtype):
    torch.set_default_dtype(dtype)
    try:
        yield
    finally:
        torch.set_default_dtype(torch.float32)


@contextmanager
def deterministic():
    torch.use_deterministic_algorithms(True)
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(False)


SURROUNDINGS: dict[str, Callable[[], AbstractContextManager]] = {
    "autocast": lambda: torch.autocast("cpu", dtype=torch.bfloat16),
    "default dtype bf16": lambda: default_dtype(torch.bfloat16),
    "default dtype fp64": lambda: default_dtype(torch.float64),
    "default device meta": lambda: torch.device("meta"),
    "inference mode": torch.inference_mode,
    "no grad": torch.no_grad,
    "deterministic algorithms": deterministic,
    "oneDNN off": lambda: torch.backends.mkldnn.flags(enabled=False, allow_tf32=None),
    "8 threads": lambda: threads(8),
}


@pytest.mark.parametrize("around", SURROUNDINGS)
@pytest.mark.parametrize("name", OPERATIONS)
def test_bits_do_not_follow_the_surroundings(name, around):
    plain = OPERATIONS[name]()
    with SURROUNDINGS[around]():
        inside = OPERATIONS[name]()
    assert inside.device.type == "cpu"
    assert_same_bits(inside.clone(), plain, f"{name} under {around}")


@pytest.mark.parametrize("name", OPERATIONS)
def test_results_share_no_storage_with_inputs(name):
    mine = {x.untyped_storage().data_ptr() for x in (X, W, NORM, IDS)}
    assert OPERATIONS[name]().untyped_storage().data_ptr() not in mine


@pytest.mark.parametrize("around", ["inference mode", "default device meta"])
def test_a_rope_table_first_made_there_serves_training_later(around):
    rope_table.cache_clear()
    with SURROUNDINGS[around]():
        rope_table(16, 1e6, 64)
    x = X.clone().requires_grad_()
    rope(x.view(20, 4, 16), IDS, rope_table(16, 1e6, 64), None, 0.0).sum().backward()
    assert x.grad is not None


def digest() -> str:
    """Of the bits of every operation."""
    hashed = hashlib.sha256()
    for name in sorted(OPERATIONS):
        hashed.update(bits(OPERATIONS[name]()).numpy().tobytes())
    return hashed.hexdigest()


@pytest.mark.parametrize(
    "variables",
    [
        {"OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1"},
        {"OMP_NUM_THREADS": "5", "MKL_NUM_THREADS": "3", "MKL_DYNAMIC": "TRUE"},
    ],
)
def test_a_process_of_its_own_has_the_same_bits(variables):
    # An engine sets threads and their binding for its workers, a trainer does not.
    code = "from tests.kernel.test_surroundings import digest; print(digest())"
    root = Path(__file__).parents[2]
    run = subprocess.run(
        [sys.executable, "-c", code],
        cwd=root,
        env=os.environ | variables,
        capture_output=True,
        text=True,
        check=True,
    )
    assert run.stdout.strip() == digest()


def test_every_operation_declares_its_schedule():
    registered = {
        name.removeprefix("isomodels::")
        for name in torch._C._dispatch_get_all_op_names()
        # the bits of a backward are promised from run to run only
        if name.startswith("isomodels::") and not name.endswith(("_backward", "_gradient"))
    }
    declared = {operation for operation, backend in SCHEDULES if backend == "torch"}
    assert registered == declared == set(OPERATIONS)


def test_the_check_can_fail():
    plain = torch.nn.functional.linear(X, W)
    with SURROUNDINGS["autocast"](), pytest.raises(AssertionError):
        assert_same_bits(torch.nn.functional.linear(X, W).float(), plain)


@pytest.mark.slow
@pytest.mark.parametrize(
    "name",
    sorted(n for n in OPERATIONS if not n.startswith("paged_") and not n.endswith("_cache")),
)
def test_operators_under_ahead_of_time_dispatch(name):
    x, w, norm = (t[:7].clone().requires_grad_() for t in (X, W, NORM))
    heads, ids = HEADS[:7].clone().requires_grad_(), IDS[:7]
    k, v = (t[:7].clone().requires_grad_() for t in (K, V))
    norm_of_head = NORM[:16].clone().requires_grad_()
    bounds, rows = torch.tensor([0, 3, 7], dtype=torch.int32), NORM.clone().requires_grad_()
    args = {
        "linear": (linear, (x, w, norm)),
        "router_logits": (router_logits, (x, w)),
        "route": (route, (x, 6, "sigmoid", True, 2.5, BIAS[:64], 8, 4)),
        "moe_sort": (moe_sort, (EXPERT_IDS[:7], 5)),
        "grouped_linear": (
            grouped_linear,
            (x, EXPERT_WEIGHTS.clone().requires_grad_(), *moe_sort(EXPERT_IDS[:7], 5)),
        ),
        "moe_combine": (
            moe_combine,
            (w[:3], x[:1, :3].detach().requires_grad_(), INT32.new_tensor([[2, 0, 1]])),
        ),
        "row_linear": (row_linear, (x, w)),
        "rms_norm": (rms_norm, (x, rows, 1e-6)),
        "add_rms_norm": (add_rms_norm, (x, x.detach() * 2, rows, 1e-6)),
        "rope": (rope, (heads, ids, rope_table(16, 1e6, 64), norm_of_head, 1e-6)),
        "rope_qkv": (
            rope_qkv,
            (heads, ids, rope_table(16, 1e6, 64), norm_of_head, norm_of_head.detach(), 2, 1e-6),
        ),
        "attention": (attention, (heads, k, v, bounds, 0.25)),
        "mla_attention": (
            mla_attention,
            (heads[..., :12], heads[..., 12:], x[:, :16], x[:, 16:20], KV_B, bounds, 0.25),
        ),
        "swiglu": (swiglu, (x,)),
        "sigmoid_gate": (sigmoid_gate, (heads, heads.detach() * 2)),
        "one_plus": (one_plus, (x,)),
        "partial_rope": (
            partial_rope,
            (heads, ids, rope_table(8, 1e6, 64), norm_of_head, 1e-6),
        ),
        "causal_conv": (causal_conv, (x, w[:64, :4], bounds)),
        "delta_gates": (delta_gates, (x, x.detach() * 2, rows, rows.detach())),
        "gated_delta_rule": (
            gated_delta_rule,
            (*(t[:7].clone().requires_grad_() for t in DELTA), bounds),
        ),
        "gated_rms_norm": (gated_rms_norm, (heads, heads.detach() * 2, norm_of_head, 1e-6)),
        "embedding": (embedding, (ids, w)),
        "lm_head": (lm_head, (x, w)),
        "log_normalize": (log_normalize, (x, 0.7)),
        "logprobs": (logprobs, (x, w, 0.7)),
        "token_logprobs": (token_logprobs, (x, w, ids, 0.7)),
        "token_logprobs_kept": (token_logprobs_kept, (x, w, ids, 0.7, 70)),
    }
    operator, arguments = args[name]
    torch.library.opcheck(operator, arguments, test_utils="test_aot_dispatch_dynamic")


def test_numbers_flushed_to_zero_are_refused():
    if not torch.set_flush_denormal(True):
        pytest.skip("this processor cannot flush subnormal numbers to zero")
    try:
        with pytest.raises(RuntimeError, match="subnormal"):
            swiglu(torch.ones(1, 2))
    finally:
        torch.set_flush_denormal(False)
    assert swiglu(torch.ones(1, 2)).shape == (1, 1)
