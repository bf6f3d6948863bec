"""Every check sees the fault that it is for: each kernel here is broken in one way."""

import itertools
import re

import pytest
import torch
from torch import Tensor

from isomodels.kernels.linear import linear
from isomodels.validate.battery import operators
from tests.validate.conftest import Broken, fault_of


def up_one(x: Tensor) -> Tensor:
    """One unit in the last place more."""
    integers = torch.int32 if x.dtype == torch.float32 else torch.int16
    return (x.view(integers) + 1).view(x.dtype)


def backwards(x: Tensor, weight: Tensor, *rest: Tensor) -> tuple:
    """The same products, summed from the other end."""
    return x.flip(1), weight.flip(1), *rest


def by_batch(real):
    """A kernel that picks its order of sums by the number of rows."""
    return lambda x, *rest: real(*(backwards(x, *rest) if len(x) > 20 else (x, *rest)))


def by_place(real):
    """The first row of a tile goes another way."""

    def kernel(x, *rest):
        out = real(x, *rest)
        out[::16] = real(*backwards(x[::16], *rest))
        return out

    return kernel


def by_run(real):
    """As with atomics: every other run rounds otherwise."""
    runs = itertools.count()
    return lambda *args: real(*args) if next(runs) % 2 else up_one(real(*args))


def by_neighbours(real):
    """A masked row still enters a sum."""
    return lambda x, *rest: real(x, *rest) + 0.0 * x.float().sum().to(x.dtype)


def by_storage(real):
    """Strides are ignored."""
    return lambda x, *rest: real(x.as_strided(x.shape, x.contiguous().stride()), *rest)


def by_shard(real):
    """The number of columns picks the order of sums."""
    return lambda x, w, *rest: real(*(backwards(x, w, *rest) if len(w) < 130 else (x, w, *rest)))


def truncated(real):
    """Cuts instead of rounding."""

    def kernel(x, weight, *rest):
        out = real(x.float(), weight.float(), *(b if b is None else b.float() for b in rest))
        return (out.view(torch.int32) & -65536).view(torch.float32).to(x.dtype)

    return kernel


def overflowing(real):
    """Scales before it normalises."""
    return lambda x, *rest: real((x.float() * 2.0**100).to(x.dtype), *rest)


def wrong_by(factor):
    return lambda real: lambda *args: real(*args) * factor


def two_roundings(real):
    """Normalises the sum before it is rounded."""

    def kernel(x, residual, weight, eps):
        total = x.float() + residual.float()
        return real(total, torch.zeros_like(total), weight.float(), eps)[0].to(x.dtype), total.to(
            x.dtype
        )

    return kernel


def unsigned_zeros(real):
    return lambda ids, weight: real(ids, weight) + 0.0


def next_slot_too(real):
    """Writes one slot too many."""

    def kernel(k, v, cache, slots):
        real(k, v, cache, (slots + 1) % (cache.shape[0] * cache.shape[2]))
        real(k, v, cache, slots)

    return kernel


def one_token_ahead(real):
    """The causal mask is off by one."""

    def kernel(q, k, v, bounds, scale):
        out, lse = real(q, k, v, bounds, scale)
        return torch.cat((out[1:], out[-1:])), lse

    return kernel


def by_sequences(real):
    """A batch of several sequences is computed in another order of heads' dimensions."""

    def kernel(q, k, v, bounds, scale):
        if len(bounds) == 2:
            return real(q, k, v, bounds, scale)
        out, lse = real(q.flip(2), k.flip(2), v, bounds, scale)
        return out, lse

    return kernel


def past_the_end(real):
    """Reads one slot past a sequence's end, where pages hold NaN."""

    def kernel(q, cache, table, bounds, lengths, *rest):
        out = real(q, cache, table, bounds, lengths, *rest)
        for i, length in enumerate(lengths.tolist()):
            page, slot = table[i, length // cache.shape[2]], length % cache.shape[2]
            rows = slice(int(bounds[i]), int(bounds[i + 1]))
            out[rows] = out[rows] + 0.0 * cache[page, 0, slot, -1]
        return out

    return kernel


def decode_otherwise(real):
    """One new token goes another way than many."""

    def kernel(q, cache, table, bounds, lengths, scale, most_q, most_k):
        if most_q > 1:
            return real(q, cache, table, bounds, lengths, scale, most_q, most_k)
        dim = q.shape[2]
        turned = torch.cat((cache[..., :dim].flip(-1), cache[..., dim:]), -1)
        return real(q.flip(2), turned, table, bounds, lengths, scale, most_q, most_k)

    return kernel


def pages_side_by_side(real):
    """Takes the next page in memory for the next page of the table."""

    def kernel(q, cache, table, *rest):
        ahead = (table[:, :1] + torch.arange(table.shape[1], dtype=torch.int32)) % len(cache)
        return real(q, cache, ahead, *rest)

    return kernel


def reciprocal(real):
    return lambda logits, temperature: real(logits * (1.0 / temperature), 1.0)


def finite_masks(real):
    return lambda logits, temperature: real(logits.clamp(min=-1e4), temperature)


def ties_to_the_last(real):
    """Equal scores go to the highest index."""

    def kernel(logits, *rest):
        weights, ids = real(logits.flip(1), *rest)
        return weights, logits.shape[1] - 1 - ids

    return kernel


def never_starts(real):
    """A sequence that starts reads what its state's place held before."""

    def kernel(*args):
        at = len(args) - (2 if isinstance(args[-1], int) else 1)  # where the lengths stand
        return real(*args[:at], args[at] + 1, *args[at + 1 :])

    return kernel


def decode_up_one(real):
    """A step of single tokens rounds otherwise."""
    return lambda *args: up_one(real(*args)) if args[-2] == 1 else real(*args)


def first_up_one(real):
    """The first of several results is off by a unit in the last place."""

    def kernel(*args):
        first, *rest = real(*args)
        return up_one(first), *rest

    return kernel


def failing(real):
    def kernel(*args):
        raise RuntimeError("out of shared memory")

    return kernel


FAULTS = [
    ("linear", "invariance", by_batch),
    ("linear", "invariance", by_place),
    ("linear", "invariance", by_run),
    ("linear", "degenerate", by_storage),
    ("linear", "column shards", by_shard),
    ("linear", "rounding", truncated),
    ("linear", "accuracy", wrong_by(1.05)),
    ("row_linear", "ranks", lambda real: lambda x, weight: linear(x, weight)),
    ("row_linear", "rounding", truncated),
    ("lm_head", "rounding", lambda real: lambda h, w: real(h, w).to(h.dtype).float()),
    ("rms_norm", "invariance", by_neighbours),
    ("rms_norm", "hazards", overflowing),
    ("rms_norm", "accuracy", wrong_by(0.97)),
    ("add_rms_norm", "sum", two_roundings),
    ("swiglu", "invariance", by_neighbours),
    ("swiglu", "range", lambda real: lambda x: real(x.clamp(-80.0, 80.0))),
    ("embedding", "hazards", unsigned_zeros),
    ("embedding", "invariance", by_run),
    ("write_kv_cache", "invariance", next_slot_too),
    ("log_normalize", "temperature", reciprocal),
    ("log_normalize", "masks", finite_masks),
    ("logprobs", "parts", lambda real: lambda *args: up_one(real(*args))),
    ("token_logprobs", "fused", lambda real: lambda *a: (up_one(real(*a)[0]), real(*a)[1])),
    (
        "rope",
        "heads",
        lambda real: lambda x, *a: real(x, *a) if x.is_contiguous() else -real(x, *a),
    ),
    ("attention", "causality", one_token_ahead),
    ("attention", "invariance", by_sequences),
    ("paged_attention", "invariance", past_the_end),
    ("paged_attention", "invariance", decode_otherwise),
    ("paged_attention", "pages", pages_side_by_side),
    ("swiglu", "accuracy", failing),
    ("rope_qkv", "rope", first_up_one),
    ("route", "ties", ties_to_the_last),
    ("moe_sort", "invariance", lambda real: lambda ids, experts: real(ids.flip(0), experts)),
    ("grouped_linear", "linear", lambda real: lambda x, w, *rest: real(x, w.roll(1, 0), *rest)),
    ("moe_combine", "accuracy", lambda real: lambda y, w, *rest: real(y, w.flip(1), *rest)),
    ("paged_causal_conv", "invariance", never_starts),
    ("paged_gated_delta_rule", "invariance", never_starts),
    ("paged_mla_attention", "invariance", decode_up_one),
    ("write_latent_cache", "hazards", lambda real: lambda x, *rest: real(x + 0.0, *rest)),
]


@pytest.mark.parametrize(
    ("name", "check", "make"), FAULTS, ids=[f"{n}-{c}-{i}" for i, (n, c, _) in enumerate(FAULTS)]
)
def test_a_broken_kernel_is_seen(broken: Broken, name, check, make) -> None:
    broken(name, make)
    assert fault_of(name, check)


def test_a_fault_names_the_coordinate_and_both_patterns(broken: Broken) -> None:
    broken("rms_norm", by_run)
    fault = fault_of("rms_norm", "invariance")
    pattern = r"second run: \d+ of \d+ differ, first at \[\d+, \d+\]: [0-9a-f]{4,8} \(\S+\) against"
    assert re.search(pattern, fault), fault


def test_a_kernel_that_raises_is_a_fault(broken: Broken) -> None:
    broken("swiglu", failing)
    fault = fault_of("swiglu", "accuracy")
    assert fault.startswith("RuntimeError: out of shared memory (test_faults.py:")


@pytest.mark.parametrize("name", ["linear", "rms_norm", "swiglu", "rope", "attention", "embedding"])
@pytest.mark.parametrize("fault", ["a factor", "not repeated", "an input left out"])
def test_a_wrong_gradient_is_seen(monkeypatch: pytest.MonkeyPatch, name, fault) -> None:
    operator = operators()[name]
    right, runs = operator._backward_fn, itertools.count()

    def wrong(ctx, *grads):
        gradients = right(ctx, *grads)
        gradients = gradients if isinstance(gradients, tuple) else (gradients,)
        first = next(i for i, x in enumerate(gradients) if x is not None)
        changed = list(gradients)
        if fault == "a factor":
            changed[first] = changed[first] * 2
        elif fault == "not repeated" and next(runs) % 2:
            changed[first] = up_one(changed[first])
        elif fault == "an input left out":
            changed[first] = torch.zeros_like(changed[first])
        return tuple(changed) if len(changed) > 1 else changed[0]

    monkeypatch.setattr(operator, "_backward_fn", wrong)
    message = fault_of(name, "gradients")
    assert message
    assert ("second run" in message) == (fault == "not repeated"), message
