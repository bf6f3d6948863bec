import pytest
import torch

from isomodels.kernels import logprob_kept
from isomodels.kernels.logprob import token_logprobs
from isomodels.kernels.logprob_kept import (
    COLUMNS,
    MOST_KEPT,
    columns_to_keep,
    target_logprobs,
    token_logprobs_kept,
)
from tests.kernel.battery import (
    DTYPES,
    assert_gradients,
    assert_registered,
    assert_same_bits,
    hard,
    relative_rms,
    unit_error,
)
from tests.kernel.triton_support import ON_GPU

BF16 = torch.bfloat16


def head(rows, vocab, hidden, dtype=torch.float32, device="cpu"):
    h = hard(rows, hidden, kind="normal", dtype=dtype).to(device)
    weight = (hard(vocab, hidden, kind="normal", seed=1, dtype=dtype) / 4).to(device)
    targets = torch.randint(0, vocab, (rows,), generator=torch.Generator().manual_seed(2))
    targets[0], targets[-1] = vocab - 1, 0
    return h, weight, targets.to(device)


def in_fp64(h, weight, targets, temperature):
    logprobs = torch.log_softmax(h @ weight.t() / temperature, 1)
    return logprobs.gather(1, targets[:, None])[:, 0]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("temperature", [1.0, 0.6])
def test_bits_and_gradients(temperature, dtype):
    h, weight, targets = head(20, 130, 32, dtype)
    plain, normalizer = token_logprobs(h, weight, targets, temperature)
    for columns in (0, 128, 130, 1000):
        kept = token_logprobs_kept(h, weight, targets, temperature, columns)
        assert_same_bits(kept[0], plain)
        assert_same_bits(kept[1], normalizer)
        assert_gradients(
            lambda h, w, c=columns: token_logprobs_kept(h, w, targets, temperature, c)[0],
            lambda h, w: in_fp64(h, w, targets, temperature),
            h,
            weight,
            bound=unit_error(dtype, 130),
        )


@pytest.mark.parametrize("columns", [-128, 1, 100, 129])
def test_part_of_a_block_is_refused(columns):
    with pytest.raises(ValueError, match=f"multiple of 128 columns, or all 300, got {columns}"):
        token_logprobs_kept(*head(3, 300, 8), 1.0, columns)


def test_opcheck():
    h, weight, targets = head(3, 7, 8)
    arguments = (h.requires_grad_(), weight.requires_grad_(), targets, 0.7, 7)
    assert_registered(token_logprobs_kept, arguments)


@pytest.mark.parametrize(
    ("rows", "vocab", "columns"),
    [
        (8192, 151936, 5 * COLUMNS),
        (1, 151936, 151936),
        (0, 151936, 151936),
        (4416, 151936, 151936),
        (4417, 151936, 9 * COLUMNS),
        (40960, 151936, COLUMNS),
        (40961, 151936, 0),
        (10**6, 151936, 0),
        (8192, 81920, 81920),
    ],
)
def test_what_is_kept_is_bounded(rows, vocab, columns, monkeypatch):
    monkeypatch.setattr(torch.Tensor, "is_cuda", True)
    hidden = torch.empty(rows, 1, dtype=BF16, device="meta", requires_grad=True)
    weight = torch.empty(vocab, 1, dtype=BF16, device="meta")
    assert columns_to_keep(hidden, weight) == columns
    assert rows * columns * 2 <= MOST_KEPT
    with torch.no_grad():
        assert columns_to_keep(hidden, weight) == 0
    assert columns_to_keep(hidden.detach(), weight) == 0
    assert columns_to_keep(hidden.detach(), weight.requires_grad_()) == columns


def test_nothing_is_kept_on_a_cpu():
    h, weight, targets = head(5, 300, 8)
    assert columns_to_keep(h.requires_grad_(), weight) == 0
    plain = token_logprobs(h, weight, targets, 0.7)[0]
    assert_same_bits(target_logprobs(h, weight, targets, 0.7), plain)


@ON_GPU
@pytest.mark.parametrize("temperature", [1.0, 0.7])
@pytest.mark.parametrize(
    ("vocab", "hidden", "dtype"),
    [(151936, 4096, BF16), (151680, 1024, BF16), (1001, 72, BF16), (1500, 72, torch.float32)],
)
def test_keeping_moves_no_bit(vocab, hidden, dtype, temperature):
    for rows in (1, 5, 64, 65, 300):
        h, weight, targets = head(rows, vocab, hidden, dtype, "cuda")
        weight /= hidden**0.5 / 16
        plain, normalizer = token_logprobs(h, weight, targets, temperature)
        for columns in (0, 256, 512, vocab):
            kept = token_logprobs_kept(h, weight, targets, temperature, columns)
            assert_same_bits(kept[0], plain, f"{rows} rows, {columns} kept")
            assert_same_bits(kept[1], normalizer, f"{rows} rows, {columns} kept")


@ON_GPU
@pytest.mark.parametrize("columns", [0, 16384, 40000])
def test_gradients_on_a_gpu(columns):
    h, weight, targets = head(200, 40000, 512, BF16, "cuda")
    weight /= 8
    h.requires_grad_(), weight.requires_grad_()
    grad = hard(200, kind="normal", seed=3).cuda()

    def gradients():
        chosen = token_logprobs_kept(h, weight, targets, 0.9, columns)[0]
        return torch.autograd.grad(chosen, (h, weight), grad)

    h64, w64 = h.detach().double().requires_grad_(), weight.detach().double().requires_grad_()
    right = torch.autograd.grad(in_fp64(h64, w64, targets, 0.9), (h64, w64), grad.double())
    for one, two, exact in zip(gradients(), gradients(), right, strict=True):
        assert_same_bits(one, two, "second run")
        assert relative_rms(one, exact) < 2 * unit_error(BF16)


@ON_GPU
def test_a_confident_row_keeps_its_small_gradient():
    """p - 1 of the likeliest token, down to 2^-13, though exponentials are kept in bf16."""
    weight = torch.zeros(1000, 64, dtype=BF16, device="cuda")
    weight[7, 0] = 1.0
    logits = torch.tensor([4.0, 8.0, 12.0, 16.0], device="cuda")
    h = torch.zeros(4, 64, dtype=BF16, device="cuda")
    h[:, 0] = logits.to(BF16)
    h.requires_grad_()
    targets = torch.full((4,), 7, device="cuda")
    target_logprobs(h, weight, targets).sum().backward()
    rest = 999 / (999 + logits.double().exp())  # 1 - p
    assert ((h.grad[:, 0].double() - rest) / rest).abs().max() < 2.0**-7


@ON_GPU
def test_a_training_forward_keeps_within_its_bound(monkeypatch):
    monkeypatch.setattr(logprob_kept, "MOST_KEPT", 3 * COLUMNS * 2 * 512)
    h, weight, targets = head(512, 100_000, 64, BF16, "cuda")
    h.requires_grad_()
    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated()
    chosen = target_logprobs(h, weight, targets, 0.7)
    kept = torch.cuda.memory_allocated() - before
    small = 512 * (-(-100_000 // 128) + 16) * 4  # maxima of blocks, normaliser, results
    assert 3 * COLUMNS * 2 * 512 <= kept < 3 * COLUMNS * 2 * 512 + 2 * small
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    chosen.sum().backward()
    # the weight's gradient and that of one part's logits, but no zeros for what was kept
    assert torch.cuda.max_memory_allocated() - before < 100_000 * 64 * 2 + 1.5 * COLUMNS * 2 * 512
    assert_same_bits(chosen.detach(), token_logprobs(h.detach(), weight, targets, 0.7)[0])
