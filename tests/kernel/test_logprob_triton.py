import pytest
import torch

from isomodels.kernels.logprob import lm_head, log_normalize, logprobs, token_logprobs
from tests.kernel.battery import assert_same_bits, hard, relative_rms, unit_error
from tests.kernel.triton_support import (
    DEVICE,
    ON_GPU,
    assert_rows_stand_alone_on_gpu,
    assert_same_in_a_graph,
    kernels,
)

logprob_kernels, linear_kernels = kernels("logprob_triton"), kernels("linear_triton")
normalize_kernels = kernels("logprob_normalize_triton")
BF16 = torch.bfloat16
COUNTS = (2, 16, 17, 33, 64, 65, 128, 129, 256)
QWEN3, MIMO = 151936, 151680


def head(rows, vocab, hidden, dtype=torch.float32, scale=1.0):
    """Hidden states and a head whose logits are of the size that models have."""
    h = hard(rows, hidden, kind="normal", dtype=dtype).to(DEVICE)
    generator = torch.Generator(DEVICE).manual_seed(1)
    weight = scale * torch.randn(vocab, hidden, generator=generator, device=DEVICE)
    weight = weight.to(dtype)
    targets = torch.randint(0, vocab, (rows,), generator=torch.Generator().manual_seed(2))
    targets[0], targets[-1] = vocab - 1, 0
    return h, weight, targets.to(DEVICE)


@pytest.mark.parametrize(
    ("rows", "vocab", "temperature"),
    [
        *((rows, vocab, t) for rows, vocab in ((2, 1), (6, 300)) for t in (1.0, 0.7)),
        (35, 1500, 0.7),
        pytest.param(35, 1500, 1.0, marks=ON_GPU),  # long in the interpreter
    ],
)
def test_against_fp64(rows, vocab, temperature):
    h, weight, targets = head(rows, vocab, 40)
    grad = hard(rows, kind="normal", seed=3).to(DEVICE)
    h64, w64 = h.double().requires_grad_(), weight.double().requires_grad_()
    exact = torch.log_softmax(h64 @ w64.T / temperature, -1)
    chosen = exact.gather(1, targets[:, None])[:, 0]
    right = torch.autograd.grad(chosen, (h64, w64), grad.double())
    logits = linear_kernels.linear(h, weight, out_dtype=torch.float32)
    normalized = normalize_kernels.log_normalize(logits, temperature)
    bound = unit_error(torch.float32, vocab)
    assert (normalized - exact).abs().max() < 1e-4
    assert_same_bits(normalize_kernels.logprobs(h, weight, temperature), normalized)
    fused, normalizer = logprob_kernels.token_logprobs(h, weight, targets, temperature)
    assert (fused - chosen).abs().max() < 1e-4
    actual = logprob_kernels.token_logprobs_backward(
        grad, h, weight, targets, normalizer, temperature
    )
    if vocab > 1:
        for one, exact_gradient in zip(actual, right, strict=True):
            assert relative_rms(one, exact_gradient) < 4 * bound


@pytest.mark.parametrize(("columns", "temperature"), [(0, 1.0), (256, 0.7), (700, 1.0)])
def test_kept_exponentials(columns, temperature, monkeypatch):
    """The same logprobs, and gradients made of what was kept and of what was not, in parts."""
    monkeypatch.setattr(logprob_kernels, "_CHUNK", 384)
    h, weight, targets = head(6, 700, 40)
    grad = hard(6, kind="normal", seed=3).to(DEVICE)
    plain = logprob_kernels.token_logprobs(h, weight, targets, temperature)
    kept = (
        torch.full((6, -(-columns // 8) * 8), torch.nan, device=DEVICE),
        torch.full((6, 6), torch.nan, device=DEVICE),
    )
    made = logprob_kernels.token_logprobs(h, weight, targets, temperature, kept)
    for one, two in zip(made, plain, strict=True):
        assert_same_bits(one, two)
    assert not kept[0].isnan().any()
    gradients = [
        logprob_kernels.token_logprobs_backward(grad, h, weight, targets, made[1], temperature, k)
        for k in (None, kept)
    ]
    for one, two in zip(*gradients, strict=True):
        assert relative_rms(two, one) < 2 * unit_error(torch.float32, 700)


@pytest.mark.parametrize("lag", [1, 7, 100])
def test_a_row_in_parts(lag, monkeypatch):
    """Sums of a part and the result of an older one, also where a program has but one of both."""
    logits = hard(5, 1500, kind="wide").to(DEVICE)
    whole = normalize_kernels.log_normalize(logits, 0.7)
    monkeypatch.setattr(normalize_kernels, "_PART_BLOCKS", 4)
    monkeypatch.setattr(normalize_kernels, "_LAG", lag)
    assert_same_bits(normalize_kernels.log_normalize(logits, 0.7), whole)
    assert_same_bits(normalize_kernels.log_normalize(logits, 0.7, out=logits), whole, "in place")


def test_gradient_of_logits_in_parts(monkeypatch):
    monkeypatch.setattr(logprob_kernels, "_CHUNK", 128)
    h, weight, targets = head(5, 300, 40)
    grad = hard(5, 300, kind="normal").to(DEVICE)
    dh, dweight = logprob_kernels.logits_backward(grad, h, weight)
    assert relative_rms(dh, grad.double() @ weight.double()) < unit_error(torch.float32, 300)
    assert relative_rms(dweight, grad.double().T @ h.double()) < unit_error(torch.float32, 5)
    once = torch.ones(5, device=DEVICE)
    _, normalizer = logprob_kernels.token_logprobs(h, weight, targets, 1.0)
    parts = logprob_kernels.token_logprobs_backward(once, h, weight, targets, normalizer, 1.0)
    monkeypatch.setattr(logprob_kernels, "_CHUNK", 1024)
    whole = logprob_kernels.token_logprobs_backward(once, h, weight, targets, normalizer, 1.0)
    for one, two in zip(parts, whole, strict=True):
        assert relative_rms(one, two) < unit_error(torch.float32, 300)


@ON_GPU
@pytest.mark.parametrize("temperature", [1.0, 0.7])
@pytest.mark.parametrize(
    ("vocab", "hidden", "dtype"),
    [
        (QWEN3, 4096, BF16),
        (MIMO, 1024, BF16),
        (1001, 72, BF16),
        (1500, 72, torch.float32),
        (5, 8, BF16),
    ],
)
def test_fused_is_the_normalised_logit_at_the_target(vocab, hidden, dtype, temperature):
    for rows in (1, 5, 64, 65, 300):
        h, weight, targets = head(rows, vocab, hidden, dtype, scale=8 / hidden**0.5)
        whole = log_normalize(lm_head(h, weight), temperature)
        assert_same_bits(logprobs(h, weight, temperature), whole, f"{rows} rows, in place")
        fused, _ = token_logprobs(h, weight, targets, temperature)
        assert_same_bits(fused, whole.gather(1, targets[:, None])[:, 0], f"{rows} rows")
        # as a sampler does it: one division by a tensor, then no temperature
        scaled = lm_head(h, weight) / torch.full((rows, 1), temperature, device="cuda")
        assert_same_bits(log_normalize(scaled), whole, "divided before")
        exact = torch.log_softmax(lm_head(h, weight).double() / temperature, -1)
        assert (whole - exact).abs().max() < 2e-5


@ON_GPU
@pytest.mark.parametrize("kind", ["wide", "zeros", "subnormal"])
@pytest.mark.parametrize("vocab", [QWEN3, 1001])
def test_rows_stand_alone(vocab, kind):
    logits = hard(70, vocab, kind=kind).cuda()
    assert_rows_stand_alone_on_gpu(log_normalize, logits, COUNTS)


@ON_GPU
@pytest.mark.parametrize("vocab", [QWEN3, 5000])
def test_parts_and_neighbours_move_no_bit(vocab, monkeypatch):
    """Programs that wait for one another, beside others that take the multiprocessors."""
    logits = hard(600, vocab, kind="wide").cuda()
    whole = log_normalize(logits, 0.7)
    for blocks, warps, lag in ((8, 4, 1), (16, 8, 50), (32, 4, 300), (128, 8, 1000), (256, 16, 1)):
        monkeypatch.setattr(normalize_kernels, "_PART_BLOCKS", blocks)
        monkeypatch.setattr(normalize_kernels, "_PART_WARPS", warps)
        monkeypatch.setattr(normalize_kernels, "_LAG", lag)
        assert_same_bits(log_normalize(logits, 0.7), whole, f"parts of {blocks} blocks")
    monkeypatch.undo()
    streams, busy = [torch.cuda.Stream() for _ in range(3)], torch.randn(4096, 4096, device="cuda")
    torch.cuda.synchronize()
    results = []
    for _ in range(5):
        for stream in streams:
            with torch.cuda.stream(stream):
                busy @ busy
                results.append(log_normalize(logits[:100], 0.7))
    torch.cuda.synchronize()
    for result in results:
        assert_same_bits(result, whole[:100], "beside other work")


@ON_GPU
def test_gradients_of_logprobs_in_bf16():
    h, weight, _ = head(40, 5000, 512, BF16, scale=0.2)
    h.requires_grad_(), weight.requires_grad_()
    grad = hard(40, 5000, kind="normal", seed=3).cuda()
    first = torch.autograd.grad(logprobs(h, weight, 0.9), (h, weight), grad)
    apart = log_normalize(lm_head(h, weight), 0.9)
    for one, two in zip(first, torch.autograd.grad(apart, (h, weight), grad), strict=True):
        assert_same_bits(one, two)


@ON_GPU
def test_rows_of_the_head_stand_alone():
    h, weight, _ = head(300, 20000, 2048, BF16)
    assert_rows_stand_alone_on_gpu(lambda h: lm_head(h, weight), h, COUNTS)
    target = torch.full((300,), 12345, device="cuda")
    op = lambda h: token_logprobs(h, weight, target[: len(h)])[0]  # noqa: E731
    assert_rows_stand_alone_on_gpu(op, h, COUNTS)


@ON_GPU
def test_gradients_in_bf16():
    h, weight, targets = head(200, 40000, 512, BF16, scale=0.2)
    h.requires_grad_(), weight.requires_grad_()
    grad = hard(200, kind="normal", seed=3).cuda()
    runs = [
        torch.autograd.grad(token_logprobs(h, weight, targets, 0.9)[0], (h, weight), grad)
        for _ in range(2)
    ]
    h64, w64 = h.detach().double().requires_grad_(), weight.detach().double().requires_grad_()
    exact = torch.log_softmax(h64 @ w64.T / 0.9, -1).gather(1, targets[:, None])[:, 0]
    right = torch.autograd.grad(exact, (h64, w64), grad.double())
    for one, two, exact_gradient in zip(*runs, right, strict=True):
        assert_same_bits(one, two, "second run")
        assert relative_rms(one, exact_gradient) < 2 * unit_error(BF16)


@ON_GPU
def test_a_target_outside_the_vocabulary_is_nan():
    h, weight, targets = head(5, 300, 40)
    targets[2], targets[3] = 300, -1
    bad = token_logprobs(h, weight, targets)[0].isnan()
    assert bad.tolist() == [False, False, True, True, False]


@ON_GPU
def test_same_in_a_graph():
    h, weight, targets = head(64, 5000, 512, BF16)
    assert_same_in_a_graph(lambda h: log_normalize(lm_head(h, weight)), h)
    assert_same_in_a_graph(lambda h: logprobs(h, weight, 0.7), h)
    assert_same_in_a_graph(lambda h: token_logprobs(h, weight, targets)[0], h)


@pytest.mark.parametrize("offset", [-300.0, 300.0])
def test_far_from_zero(offset):
    # padding must neither be the maximum nor add to the sum
    logits = (hard(3, 300, kind="normal") + offset).to(DEVICE)
    normalized = normalize_kernels.log_normalize(logits, 1.0)
    assert (normalized - torch.log_softmax(logits.double(), -1)).abs().max() < 1e-5
