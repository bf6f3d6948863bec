"""`isomodels::lm_head`, `isomodels::log_normalize` and `isomodels::token_logprobs`."""

from dataclasses import replace

import torch
from torch import Tensor

from isomodels.kernels.logprob import (
    VOCAB_BLOCK,
    lm_head,
    log_normalize,
    logits_backward,
    logprobs,
    token_logprobs,
    token_logprobs_backward,
)
from isomodels.kernels.logprob_kept import token_logprobs_kept
from isomodels.validate.accuracy import assert_close, unit_error
from isomodels.validate.battery import Place
from isomodels.validate.bits import Fault
from isomodels.validate.cases import Case, Inputs, row_operation
from isomodels.validate.operations.linear import assert_exact_integers

TEMPERATURE = 0.7
# Vocabularies of Qwen3 and MiMo; both are no multiple of the fold's 1,024.
QWEN3, MIMO = 151936, 151680
_FINITE = ("normal", "zeros", "ties", "subnormal", "tiny")  # others have infinite logits


def _scaled(draw: Inputs, vocab: int, hidden: int) -> tuple[Tensor, Tensor]:
    """Hidden states and a head whose logits are of the size that models have, for normal inputs."""
    return draw.floats(draw.num_rows, hidden), draw.floats(vocab, hidden, seed=1) / 8


# the vocabulary first; in sums over it the backward is long
@row_operation(
    "lm_head",
    "logits_backward",
    small=((300, 40), (1003, 65), (7, 8)),
    real=((20000, 2048), (4096, 4096)),
)
def head(draw: Inputs, vocab: int, hidden: int) -> Case:
    """fp32 logits."""
    return Case(
        run=lm_head,
        exact=lambda hidden, weight: hidden @ weight.t(),
        rows=(draw.floats(draw.num_rows, hidden),),
        shared=(draw.floats(vocab, hidden, seed=1),),
        terms=max(vocab, hidden),
        backward=logits_backward,
    )


@head.check("rounding")
def logits_are_not_rounded(place: Place) -> None:
    """Logits stay fp32 whatever the operands are."""
    assert_exact_integers(place, lm_head, torch.float32)


@row_operation(
    "log_normalize",
    small=((300,), (1003,), (1024,), (1,)),
    real=((QWEN3,), (1025,)),
    fp32_only=True,
)
def normalize(draw: Inputs, vocab: int) -> Case:
    """Log-softmax with a temperature."""
    rows = min(draw.num_rows, 128) if vocab > 100_000 else draw.num_rows
    logits = replace(draw, dtype=torch.float32).floats(rows, vocab)
    return Case(
        run=lambda x: log_normalize(x, TEMPERATURE),
        exact=lambda x: torch.log_softmax(x / TEMPERATURE, -1),
        rows=(logits,),
        terms=vocab,
    )


@normalize.check("temperature")
def as_samplers_divide(place: Place) -> None:
    """A sampler divides in place by a column of temperatures; 1 leaves every bit."""
    rows = place.few_rows
    logits = place.hard(rows, 1003, kind="normal") * 4
    column = torch.full((rows, 1), TEMPERATURE, dtype=torch.float32, device=place.device)
    place.same(
        log_normalize(logits, TEMPERATURE), log_normalize(logits / column, 1.0), "divided before"
    )


@normalize.check("masks")
def masked_huge_and_shifted(place: Place) -> None:
    """Masked tokens, one token left, huge and equal logits; padding neither counts nor wins."""
    logits = place.hard(8, 1003, kind="normal") * 4
    logits[0, 1:] = -torch.inf
    logits[1, ::2] = -torch.inf
    logits[2] *= 1e30
    logits[3] += 1e30
    logits[4, 3] = 1e4
    logits[5] = 0.0
    logits[6] -= 300.0
    logits[7] += 300.0
    got, right = log_normalize(logits, 1.0), torch.log_softmax(logits.double(), 1)
    if not torch.equal(torch.isneginf(got), torch.isneginf(right)):
        raise Fault("masked tokens: not minus infinity where, and only where, they are masked")
    finite = torch.isfinite(right)
    error = (got.double() - right)[finite].abs() - 1e-6 * right[finite].abs()
    if not error.max() <= 1e-4:
        raise Fault(f"masked and huge logits: off by {float(error.max()):.3g}")
    for row in range(8):
        place.same(log_normalize(logits[row : row + 1]), got[row : row + 1], f"row {row} alone")


@row_operation(
    "logprobs",
    "logits_backward",
    small=((300, 40), (1003, 64), (7, 8)),
    real=((20000, 2048), (MIMO, 1024)),
    kinds=_FINITE,
)
def whole(draw: Inputs, vocab: int, hidden: int) -> Case:
    """The normalised row that an engine returns."""
    if vocab > 100_000:
        draw = replace(draw, num_rows=min(draw.num_rows, 300))
    h, weight = _scaled(draw, vocab, hidden)
    return Case(
        run=lambda h, weight: logprobs(h, weight, TEMPERATURE),
        exact=lambda h, weight: torch.log_softmax(h @ weight.t() / TEMPERATURE, -1),
        rows=(h,),
        shared=(weight,),
        terms=vocab,
    )


@whole.check("parts")
def is_the_head_then_the_normaliser(place: Place) -> None:
    """The bits of `log_normalize` of `lm_head`."""
    vocab, hidden = (20000, 2048) if place.on_gpu else (1003, 64)
    draw = Inputs(place, place.sharp, "normal", place.few_rows)
    h, weight = _scaled(draw, vocab, hidden)
    for temperature in (TEMPERATURE,) if place.interpreted else (1.0, TEMPERATURE):
        apart = log_normalize(lm_head(h, weight), temperature)
        place.same(logprobs(h, weight, temperature), apart, f"temperature {temperature}")


@row_operation(
    "token_logprobs",
    "token_logprobs_backward",
    "token_logprobs_kept",
    small=((300, 40), (1003, 64), (7, 8)),
    real=((20000, 2048), (MIMO, 1024)),
    kinds=_FINITE,
)
def chosen(draw: Inputs, vocab: int, hidden: int) -> Case:
    """Logprob of a target a row."""
    h, weight = _scaled(draw, vocab, hidden)

    def exact(h: Tensor, targets: Tensor, weight: Tensor) -> Tensor:
        logprobs = torch.log_softmax(h @ weight.t() / TEMPERATURE, -1)
        return logprobs.gather(1, targets[:, None])[:, 0]

    def backward(grad: Tensor, h: Tensor, targets: Tensor, weight: Tensor) -> tuple:
        _, normalizer = token_logprobs(h, weight, targets, TEMPERATURE)
        args = (grad.float(), h, weight, targets, normalizer, TEMPERATURE)
        return token_logprobs_backward(*args)

    return Case(
        run=lambda h, targets, weight: token_logprobs(h, weight, targets, TEMPERATURE)[0],
        exact=exact,
        rows=(h, draw.integers(vocab)),
        shared=(weight,),
        terms=vocab,
        backward=backward,
    )


@chosen.check("fused")
def is_the_normalised_logit(place: Place) -> None:
    """What a trainer gets for a target is what the engine's full row holds there."""
    sizes = [(300, 40)] if not place.on_gpu else [(20000, 2048)]
    if place.on_gpu and not place.brief:
        sizes += [(QWEN3, 1024), (1001, 72)]
    for vocab, hidden in sizes:
        for rows in (5,) if place.interpreted else (1, 16) if place.brief else (1, 5, 64, 65, 300):
            draw = Inputs(place, place.sharp, "normal", min(rows, place.num_rows))
            (h, weight), targets = _scaled(draw, vocab, hidden), draw.integers(vocab)
            for temperature in (TEMPERATURE,) if place.interpreted else (1.0, TEMPERATURE):
                whole = log_normalize(lm_head(h, weight), temperature)
                fused, _ = token_logprobs(h, weight, targets, temperature)
                expected = whole.gather(1, targets[:, None])[:, 0]
                place.same(fused, expected, f"{rows} rows, vocabulary {vocab}, T {temperature}")


@chosen.check("parts")
def what_a_forward_keeps(place: Place) -> None:
    """A trainer's forward keeps a part of the vocabulary: the same bits, and right gradients."""
    vocab, hidden = (20000, 2048) if place.on_gpu else (300, 40)
    draw = Inputs(place, place.sharp, "normal", place.few_rows)
    (h, weight), targets = _scaled(draw, vocab, hidden), draw.integers(vocab)
    logprobs, normalizer = token_logprobs(h, weight, targets, TEMPERATURE)
    half = vocab // 2 // VOCAB_BLOCK * VOCAB_BLOCK
    for columns in (half,) if place.brief else (0, half, vocab):
        label = f"{columns} of {vocab} columns kept"
        made = token_logprobs_kept(h, weight, targets, TEMPERATURE, columns)
        place.same(made[0], logprobs, label)
        place.same(made[1], normalizer, f"normaliser, {label}")
        if place.backend == "torch" or not place.trains:  # the CPU has no operator of its own
            continue
        args = (torch.ones_like(logprobs), h, weight, targets, normalizer, TEMPERATURE)
        plain, kept = token_logprobs_backward(*args), token_logprobs_backward(*args, *made[2:])
        for name, one, two in zip(("hidden", "weight"), kept, plain, strict=True):
            bound = 2 * unit_error(h.dtype, vocab)
            assert_close(one, two.double(), bound, f"gradient of {name}, {label}")
