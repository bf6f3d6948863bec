import pytest
import torch

from isomodels.kernels.fixed_order import matmul_nt
from isomodels.kernels.logprob import lm_head, log_normalize, logprobs, token_logprobs
from tests.kernel.battery import (
    DTYPES,
    KINDS,
    ROWS,
    THREADS,
    assert_gradients,
    assert_registered,
    assert_row_invariant,
    assert_same_bits,
    hard,
    odd_storage,
    relative_rms,
    threads,
    unit_error,
)

# Odd, around the alignment of 1,024, and the target vocabularies.
VOCABS = [1, 7, 127, 128, 1003, 1023, 1024, 1025]
LARGE_VOCABS = [32000, 151669, 151936]
TEMPERATURES = [0.1, 0.6, 0.7, 1.0, 1.3, 1.5]


def logits_of(rows, vocab, scale=4.0, seed=0):
    return hard(rows, vocab, kind="normal", seed=seed) * scale


@pytest.mark.parametrize("vocab", VOCABS)
def test_rows_of_the_normaliser_stand_alone(vocab):
    assert_row_invariant(log_normalize, logits_of(ROWS, vocab))


@pytest.mark.parametrize("kind", KINDS)
def test_rows_stand_alone_for_hard_logits(kind):
    assert_row_invariant(log_normalize, hard(ROWS, 1003, kind=kind))
    assert_row_invariant(lambda x: log_normalize(x, 0.7), hard(ROWS, 130, kind=kind))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("vocab", [7, 1003, 1024])
def test_rows_of_the_head_stand_alone(vocab, dtype):
    weight = hard(vocab, 65, seed=1, dtype=dtype)
    assert_row_invariant(lambda x: lm_head(x, weight), hard(ROWS, 65, dtype=dtype))


@pytest.mark.parametrize("dtype", DTYPES)
def test_rows_of_token_logprobs_stand_alone(dtype):
    weight = hard(1003, 64, kind="normal", seed=1, dtype=dtype)
    weight[0] = hard(64, kind="normal", seed=2, dtype=dtype)

    def op(x):
        # one target for every row: the battery moves rows about
        return token_logprobs(x, weight, torch.full((len(x),), 17))[0]

    assert_row_invariant(op, hard(ROWS, 64, kind="normal", dtype=dtype))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("vocab", [*VOCABS, *LARGE_VOCABS])
def test_token_logprobs_are_the_normalised_logits_at_the_target(vocab, dtype):
    rows = 3 if vocab > 2000 else ROWS
    hidden = hard(rows, 24, kind="normal", dtype=dtype)
    weight = hard(vocab, 24, kind="normal", seed=1, dtype=dtype)
    targets = torch.randint(0, vocab, (rows,), generator=torch.Generator().manual_seed(0))
    targets[0], targets[-1] = vocab - 1, 0
    for temperature in (1.0, 0.6):
        whole = log_normalize(lm_head(hidden, weight), temperature)
        assert_same_bits(logprobs(hidden, weight, temperature), whole, f"T = {temperature}")
        chosen = token_logprobs(hidden, weight, targets, temperature)[0]
        assert_same_bits(chosen, whole.gather(1, targets[:, None])[:, 0], f"T = {temperature}")


@pytest.mark.parametrize("vocab", LARGE_VOCABS)
def test_large_vocabularies(vocab):
    logits = logits_of(17, vocab)
    whole = log_normalize(logits)
    right = torch.log_softmax(logits[:5].double(), 1)
    assert relative_rms(whole[:5], right) < unit_error(torch.float32)
    for row in (0, 7, 15, 16):
        assert_same_bits(log_normalize(logits[row : row + 1]), whole[row : row + 1], f"row {row}")
    assert_same_bits(log_normalize(odd_storage(logits[:3])), whole[:3], "odd offset")
    for count in THREADS[1:]:
        with threads(count):
            assert_same_bits(log_normalize(logits), whole, f"{count} threads")


@pytest.mark.parametrize("vocab", [1003, 151936])
def test_a_shard_of_the_head_has_the_logits_of_the_whole(vocab):
    hidden, weight = hard(2, 16), hard(vocab, 16, seed=1)
    whole = lm_head(hidden, weight)
    for shards in (2, 4, 8):
        parts = [lm_head(hidden, odd_storage(w)) for w in weight.chunk(shards)]
        assert_same_bits(torch.cat(parts, 1), whole, f"{shards} shards")


def test_logits_are_not_rounded_to_the_model_dtype():
    # Row 29 of the field reports: rounding logits to bf16 dominates the gap between two hosts.
    hidden = hard(5, 64, kind="normal", dtype=torch.bfloat16)
    weight = hard(300, 64, kind="normal", seed=1, dtype=torch.bfloat16)
    logits = lm_head(hidden, weight)
    assert logits.dtype == torch.float32
    assert_same_bits(logits, matmul_nt(hidden, weight).contiguous())
    exact = hidden.double() @ weight.double().t()
    assert relative_rms(logits, exact) < 1e-6


@pytest.mark.parametrize("temperature", TEMPERATURES)
@pytest.mark.parametrize("vocab", [1003, 1024])
def test_row_23_of_the_field_reports_temperature(vocab, temperature):
    # Samplers divide in place by a column of temperatures, then take the log-softmax.
    logits = logits_of(ROWS, vocab)
    divided = logits.clone().div_(torch.full((ROWS,), temperature).unsqueeze(1))
    assert_same_bits(log_normalize(logits, temperature), log_normalize(divided), "temperature")
    if temperature == 1.0:
        assert_same_bits(divided, logits, "dividing by 1")
        assert_same_bits(log_normalize(logits, 1.0), log_normalize(logits), "default")


@pytest.mark.parametrize("vocab", [1003, 1024, 2048, 32000])
def test_row_27_of_the_field_reports_masked_and_huge_logits(vocab):
    logits = logits_of(6, vocab)
    logits[0, 1:] = -torch.inf  # one token left: logprob 0
    logits[1, ::2] = -torch.inf
    logits[2] *= 1e30
    logits[3] += 1e30  # all equal after rounding
    logits[4, 3] = 1e4  # all others underflow
    logits[5] = 0.0
    got = log_normalize(logits)
    right = torch.log_softmax(logits.double(), 1)
    assert got[0, 0] == 0.0
    finite = torch.isfinite(right)
    assert torch.equal(torch.isneginf(got), torch.isneginf(right))
    assert relative_rms(got[finite], right[finite]) < 1e-6
    for row in range(6):
        assert_same_bits(log_normalize(logits[row : row + 1]), got[row : row + 1], f"row {row}")
    # the whole sums to one, the target's logprob is the one that the engine returns
    total = got[1].double().exp().sum()
    assert abs(float(total) - 1) < 1e-5


def test_padded_columns_do_not_count():
    # Row 69: a head padded for tensor parallelism would add exp(0) for every pad.
    hidden, weight = hard(5, 16, kind="normal"), hard(1003, 16, kind="normal", seed=1)
    normalized = logprobs(hidden, weight)
    assert normalized.shape == (5, 1003)
    sums = normalized.double().exp().sum(1)
    assert torch.allclose(sums, torch.ones_like(sums), rtol=0, atol=1e-5)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("temperature", [1.0, 0.6])
def test_accuracy(temperature, dtype):
    hidden = hard(10, 64, kind="normal", dtype=dtype)
    weight = (hard(1003, 64, kind="normal", seed=1) / 2).to(dtype)
    exact = torch.log_softmax(hidden.double() @ weight.double().t() / temperature, 1)
    got = log_normalize(lm_head(hidden, weight), temperature)
    assert relative_rms(got, exact) < 1e-6


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("temperature", [1.0, 0.6])
def test_gradients(temperature, dtype):
    hidden = hard(20, 32, kind="normal", dtype=dtype)
    weight = (hard(130, 32, kind="normal", seed=1) / 4).to(dtype)
    targets = torch.randint(0, 130, (20,), generator=torch.Generator().manual_seed(0))

    def reference(hidden, weight):
        return torch.log_softmax(hidden @ weight.t() / temperature, 1)

    bound = unit_error(dtype, 130)
    apart = lambda h, w: log_normalize(lm_head(h, w), temperature)  # noqa: E731
    fused = lambda h, w: logprobs(h, w, temperature)  # noqa: E731
    for op in (apart, fused):
        assert_gradients(op, reference, hidden, weight, bound=bound)
    assert_gradients(
        lambda h, w: token_logprobs(h, w, targets, temperature)[0],
        lambda h, w: reference(h, w).gather(1, targets[:, None])[:, 0],
        hidden,
        weight,
        bound=bound,
    )


@pytest.mark.parametrize("bad", [-1, -100, 7])
def test_a_target_outside_the_vocabulary(bad):
    with pytest.raises(IndexError, match="vocabulary of 7"):
        token_logprobs(hard(2, 8), hard(7, 8), torch.tensor([0, bad]))


@pytest.mark.parametrize("temperature", [0.0, -1.0, float("nan")])
def test_a_temperature_not_above_zero(temperature):
    with pytest.raises(ValueError, match="temperature must be above 0"):
        log_normalize(hard(2, 8), temperature)
    with pytest.raises(ValueError, match="temperature must be above 0"):
        logprobs(hard(2, 8), hard(7, 8), temperature)


def test_logits_of_another_dtype_are_refused():
    with pytest.raises(TypeError, match="float32"):
        log_normalize(hard(2, 8, dtype=torch.bfloat16))


def test_no_rows():
    empty = torch.empty(0, dtype=torch.int64)
    assert token_logprobs(hard(0, 8), hard(7, 8), empty)[0].shape == (0,)
    assert log_normalize(lm_head(hard(0, 8), hard(7, 8))).shape == (0, 7)
    assert logprobs(hard(0, 8), hard(7, 8)).shape == (0, 7)


def test_opcheck():
    hidden, weight = hard(3, 8).requires_grad_(), hard(7, 8).requires_grad_()
    assert_registered(lm_head, (hidden, weight))
    assert_registered(logprobs, (hidden, weight, 0.7))
    assert_registered(log_normalize, (hard(3, 7).requires_grad_(), 0.7))
    assert_registered(token_logprobs, (hidden, weight, torch.tensor([0, 6, 3]), 0.7))


def test_the_battery_can_fail():
    # A sum by the library takes its order from the shape.
    def by_the_library(logits):
        shifted = logits - logits.amax(1, keepdim=True)
        return shifted - shifted.t().contiguous().exp().sum(0)[:, None].log()

    with pytest.raises(AssertionError, match="differ, first at"):
        assert_row_invariant(by_the_library, logits_of(ROWS, 1003))


def test_the_temperature_check_can_fail():
    # Scaling by the reciprocal, or scaling the logprob, is another function.
    logits = logits_of(ROWS, 1003)
    for wrong in (log_normalize(logits * (1 / 0.7)), log_normalize(logits) / 0.7):
        with pytest.raises(AssertionError):
            assert_same_bits(wrong, log_normalize(logits, 0.7))


def test_a_message_names_the_operation():
    with pytest.raises(ValueError, match=r"^lm_head needs .* \[2, 8\] and \[7, 9\]"):
        lm_head(hard(2, 8), hard(7, 9))
    with pytest.raises(TypeError, match=r"^token_logprobs needs"):
        token_logprobs(hard(2, 8), hard(7, 8).bfloat16(), torch.tensor([0, 1]))
