"""The short convolution on the Triton backend: packed, from kept windows, gradients, padding."""

import pytest
import torch

from isomodels.kernels.causal_conv import causal_conv, paged_causal_conv
from tests.kernel.battery import DTYPES, assert_same_bits, hard, odd_storage, relative_rms
from tests.kernel.test_causal_conv import bounds, exact
from tests.kernel.triton_support import DEVICE, ON_GPU, assert_same_in_a_graph, kernels

ours = kernels("causal_conv_triton")
HERE = DTYPES if DEVICE == "cuda" else [torch.float32]
LENGTHS = [1, 3, 0, 4, 5, 63, 64, 65, 0, 2]
EPS = {torch.float32: 2e-6, torch.bfloat16: 8e-3}
gpu = ON_GPU


def draw(channels, width, count=sum(LENGTHS), dtype=torch.float32):
    x = hard(count, channels, kind="normal", dtype=dtype).to(DEVICE)
    return x, hard(channels, width, kind="normal", seed=1, dtype=dtype).to(DEVICE)


def on(values):
    return torch.tensor(values, dtype=torch.int32, device=DEVICE)


@pytest.mark.parametrize("dtype", HERE)
@pytest.mark.parametrize(("channels", "width"), [(5, 1), (37, 4), (300, 2), (1030, 3)])
def test_packed(channels, width, dtype):
    x, weight = draw(channels, width, dtype=dtype)
    y = ours.causal_conv(x, weight, bounds(LENGTHS).to(DEVICE))
    right = exact(x.cpu().double(), weight.cpu().double(), bounds(LENGTHS))
    assert relative_rms(y.cpu(), right) < EPS[dtype]


@pytest.mark.parametrize("dtype", HERE)
@pytest.mark.parametrize("width", [1, 2, 4])
@pytest.mark.parametrize("steps", [[1] * 12, [2, 1, 5, 4], [3, 9], [1, 11], [0, 4, 0, 8]])
def test_cut_anywhere(steps, width, dtype):
    x, weight = draw(37, width, 12, dtype)
    whole = ours.causal_conv(x, weight, on([0, 12]))
    # slots in a table, states of other layers between two windows
    windows = torch.full((3, 2 * (width - 1) + 1, 37), torch.nan, dtype=dtype, device=DEVICE)
    windows = windows[:, : width - 1]
    slots, done, rows = on([[2, 9], [9, 9]])[:1, 0], 0, []
    for part in x.split(steps):
        done += len(part)
        edges = on([0, len(part)]), on([done])
        rows.append(ours.paged_causal_conv(part, weight, windows, slots, *edges))
    assert_same_bits(torch.cat(rows), whole)
    assert_same_bits(windows[2], x[12 - (width - 1) :], "window")
    assert windows[:2].isnan().all()


def test_padding_is_zero_and_touches_no_window():
    """As in a captured graph: sequences of no tokens without a slot, tokens of no sequence."""
    x, weight = draw(37, 4, 9)
    x[5:] = torch.nan
    windows = torch.full((4, 3, 37), torch.nan, device=DEVICE)
    slots, lengths = on([1, 3, -1, -1]), on([1, 4, 0, 0])
    y = ours.paged_causal_conv(x, weight, windows, slots, on([0, 1, 5, 5, 5]), lengths)
    assert_same_bits(y[:5], ours.causal_conv(x[:5], weight, on([0, 1, 5])))
    assert not y[5:].any()
    assert windows[[0, 2]].isnan().all()
    assert not windows[[1, 3]].isnan().any()
    assert not ours.causal_conv(
        x,
        weight,
        on([0]),
    ).any()


@pytest.mark.parametrize("dtype", HERE)
@pytest.mark.parametrize(("channels", "width"), [(5, 1), (37, 4), (300, 3)])
def test_gradients(channels, width, dtype):
    x, weight = draw(channels, width, dtype=dtype)
    grad = hard(*x.shape, kind="normal", seed=2, dtype=dtype).to(DEVICE)
    leaves = [part.cpu().double().requires_grad_() for part in (x, weight)]
    right = torch.autograd.grad(exact(*leaves, bounds(LENGTHS)), leaves, grad.cpu().double())
    args = (grad, x, weight, bounds(LENGTHS).to(DEVICE))
    for one, exactly in zip(ours.causal_conv_backward(*args), right, strict=True):
        assert relative_rms(one.cpu(), exactly) < 2 * EPS[dtype]


def test_no_gradient_crosses_a_document():
    x, weight = draw(7, 4, 8)
    grad = torch.zeros_like(x)
    grad[4] = 1.0  # the second document's first token
    dx, _ = ours.causal_conv_backward(grad, x, weight, on([0, 4, 8]))
    assert dx[4].all()
    assert not dx[:4].any()
    assert not dx[5:].any()


@gpu
def test_tiles_move_no_bit(monkeypatch):
    x, weight = draw(8192, 4, 700, torch.bfloat16)
    cu, lengths, slots = on([0, 1, 1, 300, 301, 700]), on([1, 0, 299, 1, 399]), on([4, 0, 3, 2, 1])
    whole = ours.causal_conv(x, weight, cu)
    for run, columns, edges, warps in [(8, 1024, 256, 4), (32, 128, 512, 8), (256, 512, 2048, 2)]:
        monkeypatch.setattr(ours, "_RUN", run)
        monkeypatch.setattr(ours, "_CHANNELS", columns)
        monkeypatch.setattr(ours, "_EDGE_CHANNELS", edges)
        monkeypatch.setattr(ours, "_WARPS", warps)
        assert_same_bits(ours.causal_conv(x, weight, cu), whole, f"runs of {run} tokens")
        assert_same_bits(ours.causal_conv(odd_storage(x), weight, cu), whole, "odd storage")
        windows = torch.full((5, 3, 8192), torch.nan, dtype=torch.bfloat16, device=DEVICE)
        y = ours.paged_causal_conv(x, weight, windows, slots, cu, lengths)
        assert_same_bits(y, whole, f"runs of {run} tokens, windows")
        assert_same_bits(windows[1], x[-3:])
        assert windows[0].isnan().all()


@gpu
def test_a_decode_of_a_thousand_sequences_has_the_bits_of_a_prefill():
    count, length = 1000, 6
    x, weight = draw(512, 4, count * length, torch.bfloat16)
    cu = torch.arange(count + 1, dtype=torch.int32, device="cuda") * length
    whole = causal_conv(x, weight, cu).view(count, length, 512)
    windows = torch.full((count, 3, 512), torch.nan, dtype=torch.bfloat16, device="cuda")
    slots = torch.arange(count, dtype=torch.int32, device="cuda").flip(0)
    ones = torch.arange(count + 1, dtype=torch.int32, device="cuda")
    for t in range(length):
        step = x.view(count, length, 512)[:, t]
        y = paged_causal_conv(step, weight, windows, slots, ones, torch.full_like(slots, t + 1))
        assert_same_bits(y, whole[:, t].contiguous(), f"token {t}")


@gpu
def test_a_replayed_decode_keeps_its_windows():
    x, weight = draw(256, 4, 40, torch.bfloat16)
    windows = torch.zeros(8, 3, 256, dtype=torch.bfloat16, device="cuda")
    token, slots, lengths = x[:8].clone(), on([*range(8)]), on([0] * 8)
    cu = on([*range(9)])
    call = lambda: paged_causal_conv(token, weight, windows, slots, cu, lengths)  # noqa: E731
    call()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = call()
    rows = []
    for t in range(5):
        token.copy_(x.view(8, 5, 256)[:, t])
        lengths.fill_(t + 1)
        if t == 3:  # the last three lanes are padding from here on
            cu.copy_(on([0, 1, 2, 3, 4, 5, 5, 5, 5]))
            slots[5:] = -1
        graph.replay()
        rows.append(out.clone())
    whole = causal_conv(x, weight, on([*range(0, 41, 5)])).view(8, 5, 256)
    for t, row in enumerate(rows):
        live = 5 if t >= 3 else 8
        assert_same_bits(row[:live], whole[:live, t].contiguous(), f"token {t}")
        assert not row[live:].any()


@gpu
def test_gradients_repeat_and_the_forward_is_the_same_in_a_graph():
    x, weight = draw(8192, 4, 3000, torch.bfloat16)
    cu = on([0, 700, 701, 3000])
    first, second = (ours.causal_conv_backward(x.flip(0), x, weight, cu) for _ in range(2))
    for one, two in zip(first, second, strict=True):
        assert_same_bits(one, two, "second run")
    assert_same_in_a_graph(lambda x: causal_conv(x, weight, cu), x)
