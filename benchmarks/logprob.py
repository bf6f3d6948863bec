"""Rows of the head: normalised logprobs, and the logprobs of targets without a [T, V] tensor."""

from collections.abc import Iterator

import torch
import torch.nn.functional as F

from benchmarks.harness import Timing, against, against_bandwidth, row
from isomodels.kernels.logprob import lm_head
from isomodels.kernels.logprob_kept import columns_to_keep, token_logprobs_kept
from isomodels.kernels.logprob_normalize_triton import log_normalize, logprobs
from isomodels.kernels.logprob_triton import token_logprobs, token_logprobs_backward

TEST = "tests/kernel/test_logprob_triton.py"
VOCAB, HIDDEN = 151936, 4096
BF16 = {"device": "cuda", "dtype": torch.bfloat16}


@row("logprob", TEST)
def normalize() -> Iterator[Timing]:
    for rows in (64, 256, 1024):
        logits = [torch.randn(rows, VOCAB, device="cuda") for _ in range(2)]
        calls = [lambda x=x: log_normalize(x, 1.0) for x in logits]
        moved = 2 * logits[0].nbytes
        yield against_bandwidth("logprob", f"log_normalize {rows} x {VOCAB}", calls, moved, 0.85)


@row("head", TEST)
def head() -> Iterator[Timing]:
    weight = torch.randn(VOCAB, HIDDEN, **BF16) / HIDDEN**0.5
    for rows in (8, 64, 256):
        hidden = torch.randn(rows, HIDDEN, **BF16)
        ours, theirs = [lambda h=hidden: lm_head(h, weight)], [lambda h=hidden: F.linear(h, weight)]
        shape = f"lm_head {rows} x {VOCAB}, fp32 logits"
        yield against("head", shape, "cuBLAS through torch, bf16 logits", ours, theirs, 0.0)
        # what an engine asks of its head: stock vLLM casts the logits and takes their log-softmax
        ours = [lambda h=hidden: logprobs(h, weight, 1.0)]
        theirs = [lambda h=hidden: F.linear(h, weight).float().log_softmax(-1)]
        shape = f"logprobs {rows} x {VOCAB}"
        baseline = "torch: cuBLAS with bf16 logits, cast, log_softmax"
        yield against("head", shape, baseline, ours, theirs, 0.0)
    rows = 8192
    hidden = torch.randn(rows, HIDDEN, **BF16)
    targets = torch.randint(0, VOCAB, (rows,), device="cuda")
    grad = torch.randn(rows, device="cuda")
    _, normalizer = token_logprobs(hidden, weight, targets, 1.0)
    columns = columns_to_keep(hidden.detach().requires_grad_(), weight)
    kept = f"{columns} columns kept"
    _, _, *made = token_logprobs_kept(hidden, weight, targets, 1.0, columns)
    theirs = [lambda: F.linear(hidden, weight)]
    baseline = "cuBLAS through torch, the product alone"
    shape = f"token_logprobs {rows} x {VOCAB}"
    ours = [lambda: token_logprobs(hidden, weight, targets, 1.0)]
    yield against("head", shape, baseline, ours, theirs, 0.0)
    ours = [lambda: token_logprobs_kept(hidden, weight, targets, 1.0, columns)]
    yield against("head", f"{shape}, {kept}", baseline, ours, theirs, 0.0)

    def product_gradients() -> None:
        logits = F.linear(hidden, weight)
        torch.mm(logits, weight)
        torch.mm(logits.t(), hidden)

    arguments = (grad, hidden, weight, targets, normalizer, 1.0)
    baseline = "cuBLAS through torch, the three products alone"
    shape = f"token_logprobs backward {rows} x {VOCAB}"
    for ours, label in (
        ([lambda: token_logprobs_backward(*arguments)], shape),
        ([lambda: token_logprobs_backward(*arguments, (made[0], made[1]))], f"{shape}, {kept}"),
    ):
        yield against("head", label, baseline, ours, [product_gradients], 0.0)
