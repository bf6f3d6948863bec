"""The short convolution: packed against carried windows, accuracy, gradients, hazards."""

import itertools

import pytest
import torch
import torch.nn.functional as F

from isomodels.kernels.causal_conv import causal_conv, paged_causal_conv
from tests.kernel.battery import (
    DTYPES,
    KINDS,
    THREADS,
    assert_gradients,
    assert_registered,
    assert_same_bits,
    hard,
    odd_storage,
    relative_rms,
    threads,
    unit_error,
)

LENGTHS = [1, 3, 0, 4, 5, 63, 64, 65, 0, 2]
CHANNELS, WIDTH = 37, 4


def bounds(lengths):
    return torch.tensor([0, *lengths]).cumsum(0).int()


def exact(x, weight, cu_seqlens):
    """PyTorch's own convolution of each sequence, left-padded with zeros."""
    rows = []
    for start, end in itertools.pairwise(cu_seqlens.tolist()):
        if end > start:
            padded = F.pad(x[start:end].t()[None], (weight.shape[1] - 1, 0))
            rows.append(F.conv1d(padded, weight[:, None], groups=len(weight))[0].t())
    return F.silu(torch.cat(rows))


def draw(dtype, kind="normal"):
    x = hard(sum(LENGTHS), CHANNELS, kind=kind, dtype=dtype)
    return x, hard(CHANNELS, WIDTH, kind="normal", seed=1, dtype=dtype)


@pytest.mark.parametrize("dtype", DTYPES)
def test_accuracy(dtype):
    x, weight = draw(dtype)
    right = exact(x.double(), weight.double(), bounds(LENGTHS))
    assert relative_rms(causal_conv(x, weight, bounds(LENGTHS)), right) < unit_error(dtype)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("kind", KINDS)
def test_row_44_of_the_field_reports_packed_against_each_alone(kind, dtype):
    x, weight = draw(dtype, kind)
    together = causal_conv(x, weight, bounds(LENGTHS))
    alone = [causal_conv(part, weight, bounds([len(part)])) for part in x.split(LENGTHS)]
    assert_same_bits(together, torch.cat(alone))
    for count in THREADS:
        with threads(count):
            assert_same_bits(causal_conv(x, weight, bounds(LENGTHS)), together, f"{count} threads")
    assert_same_bits(causal_conv(odd_storage(x), weight, bounds(LENGTHS)), together, "storage")
    for channel in (0, 3, CHANNELS - 1):  # a vector body and its tail
        one = slice(channel, channel + 1)
        column = causal_conv(x[:, one], weight[one], bounds(LENGTHS))
        assert_same_bits(column, together[:, one].contiguous(), f"channel {channel}")


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("steps", [[1] * 12, [2, 1, 5, 4], [3, 9], [12], [1, 11], [0, 4, 0, 8]])
def test_cut_anywhere(steps, dtype):
    x, weight = hard(12, CHANNELS, dtype=dtype), draw(dtype)[1]
    whole = causal_conv(x, weight, bounds([12]))
    windows = torch.full((3, WIDTH - 1, CHANNELS), torch.nan, dtype=dtype)
    slots, done, rows = torch.tensor([2], dtype=torch.int32), 0, []
    for part in x.split(steps):
        done += len(part)
        length = torch.tensor([done], dtype=torch.int32)
        rows.append(paged_causal_conv(part, weight, windows, slots, bounds([len(part)]), length))
    assert_same_bits(torch.cat(rows), whole)
    assert_same_bits(windows[2], x[-3:], "window")
    assert windows[:2].isnan().all()


def test_sequences_of_one_step_do_not_meet():
    x, weight = hard(9, CHANNELS), draw(torch.float32)[1]
    windows = torch.full((4, 3, CHANNELS), torch.nan)
    slots = torch.tensor([3, 0, 1], dtype=torch.int32)

    def step(parts, lengths):
        counts = bounds([len(part) for part in parts])
        lengths = torch.tensor(lengths, dtype=torch.int32)
        return paged_causal_conv(torch.cat(parts), weight, windows, slots, counts, lengths)

    first = step([x[:2], x[:0], x[4:5]], [2, 0, 1])
    second = step([x[2:3], x[3:4], x[5:9]], [3, 1, 5])
    alone = [causal_conv(x[s], weight, bounds([len(x[s])])) for s in (slice(0, 3), slice(3, 4))]
    assert_same_bits(torch.cat((first[:2], second[:1])), alone[0])
    assert_same_bits(second[1:2], alone[1])
    last = causal_conv(x[4:9], weight, bounds([5]))
    assert_same_bits(torch.cat((first[2:], second[2:])), last)


@pytest.mark.parametrize("dtype", DTYPES)
def test_gradients(dtype):
    lengths = [1, 3, 0, 4, 9]
    x, weight = (part[:17] if part.shape[1] == CHANNELS else part for part in draw(dtype))
    assert_gradients(
        lambda a, w: causal_conv(a, w, bounds(lengths)),
        lambda a, w: exact(a, w, bounds(lengths)),
        x,
        weight,
        bound=unit_error(dtype, 17),
    )


def test_registration():
    x, weight = draw(torch.float32)
    args = (x[:9].requires_grad_(), weight.requires_grad_(), bounds([2, 7]))
    assert_registered(causal_conv, args)
    windows, one = torch.zeros(2, 3, CHANNELS), torch.tensor([1], dtype=torch.int32)
    args = (x.detach()[:9], weight.detach(), windows, one, bounds([9]), one * 9)
    assert_registered(paged_causal_conv, args, trainable=False)


def test_wrong_operands_are_named():
    x, weight = draw(torch.float32)
    with pytest.raises(ValueError, match=r"causal_conv needs x \[T, channels\] and a weight"):
        causal_conv(x, weight[:5], bounds(LENGTHS))
    windows, one = torch.zeros(2, 3, CHANNELS), torch.tensor([1], dtype=torch.int32)
    with pytest.raises(TypeError, match=r"the windows hold torch\.float32"):
        paged_causal_conv(x.bfloat16(), weight.bfloat16(), windows, one, bounds([9]), one)
