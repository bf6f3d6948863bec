"""The gated delta rule's Triton backend: one definition for whole sequences, chunks and decode."""

import itertools

import pytest
import torch
from torch import Tensor

from isomodels.kernels.gated_delta import state_layout
from tests.kernel.battery import assert_same_bits, bits, relative_rms, unit_error
from tests.kernel.delta_reference import recurrence
from tests.kernel.triton_support import DEVICE, ON_GPU, kernels

triton_rule = kernels("gated_delta_triton")
triton_backward = kernels("gated_delta_backward_triton")

GPU = DEVICE == "cuda"
DTYPES = (torch.float32, torch.bfloat16) if GPU else (torch.float32,)
MODEL = (2, 4, 128, 128)  # key heads, value heads, key and value size
SMALL = ((2, 4, 16, 24), (1, 1, 32, 8)) if GPU else ((1, 2, 16, 16),)
FORMS = [*itertools.product(SMALL, DTYPES), *[(MODEL, torch.bfloat16)] * GPU]
LENGTHS = [1, 3, 4, 5, 0, 63, 64, 65, 127, 1000] if GPU else [3, 0, 67]


def draw(count: int, sizes=MODEL, dtype=torch.bfloat16, seed: int = 0) -> tuple[Tensor, ...]:
    """All hazards: decay 0, 1 and products that are subnormal, beta 0 and 1, zero keys, values."""
    key_heads, heads, key_dim, value_dim = sizes
    generator = torch.Generator().manual_seed(seed)
    shapes = ((key_heads, key_dim), (key_heads, key_dim), (heads, value_dim))
    q, k, v = (torch.randn(count, *s, generator=generator).to(dtype) for s in shapes)
    g, beta = (
        -torch.rand(count, heads, generator=generator),
        torch.rand(count, heads, generator=generator),
    )
    kind = torch.randint(0, 5, g.shape, generator=generator)
    for value, of in ((0.0, 1), (-104.0, 2), (-12.7, 3)):
        g = torch.where(kind == of, value, g)
    beta = torch.where(kind == 0, 0.0, torch.where(kind == 4, 1.0, beta))
    k[::7], q[::11], v[::13] = 0.0, 0.0, -0.0
    return tuple(x.to(DEVICE) for x in (q, k, v, g, beta))


def int32(values: list[int]) -> Tensor:
    return torch.tensor(values, dtype=torch.int32, device=DEVICE)


def bounds(lengths: list[int]) -> Tensor:
    return int32([0, *itertools.accumulate(lengths)])


class Engine:
    """States in shuffled slots, NaN wherever nobody wrote."""

    def __init__(self, count: int, sizes, dtype):
        self.state = [
            torch.full((count + 3, *shape), torch.nan, dtype=of, device=DEVICE)
            for shape, of in state_layout(*sizes, dtype, "cuda")
        ]
        order = torch.randperm(count + 3, generator=torch.Generator().manual_seed(0))
        self.slots = order[:count].int().to(DEVICE)

    def step(self, inputs, counts: list[int], lengths: list[int]) -> Tensor:
        pages = triton_rule.Pages(*self.state, self.slots, int32(lengths))
        return triton_rule.paged_gated_delta_rule(*inputs, pages, bounds(counts), max(counts))


def in_steps(inputs, lengths: list[int], size_of) -> Tensor:
    """Sequence i, of which d tokens are done, gets its next size_of(i, d) tokens at each step."""
    heads = inputs[1].shape[1], inputs[2].shape[1], inputs[1].shape[2], inputs[2].shape[2]
    engine = Engine(len(lengths), heads, inputs[0].dtype)
    starts = [0, *itertools.accumulate(lengths)][:-1]
    done, out = [0] * len(lengths), torch.full_like(inputs[2], torch.nan)
    while done != lengths:
        counts = [
            min(size_of(i, d), n - d) for i, (d, n) in enumerate(zip(done, lengths, strict=True))
        ]
        edges = zip(starts, done, counts, strict=True)
        at = torch.cat([torch.arange(s + d, s + d + c) for s, d, c in edges]).to(DEVICE)
        done = [d + c for d, c in zip(done, counts, strict=True)]
        out[at] = engine.step(tuple(x[at] for x in inputs), counts, done)
    return out


@pytest.mark.parametrize(("sizes", "dtype"), FORMS)
def test_accuracy(sizes, dtype):
    inputs = draw(sum(LENGTHS), sizes, dtype)
    made = triton_rule.gated_delta_rule(*inputs, bounds(LENGTHS))
    exact = recurrence(*(x.double() for x in inputs), bounds(LENGTHS))
    # an fp32 sum of the log decays of a chunk is exact to half its last bit
    sums = 104.0 * 64 * torch.finfo(torch.float32).eps / 2
    assert relative_rms(made, exact) < unit_error(dtype, 64) + sums


@pytest.mark.parametrize(("sizes", "dtype"), FORMS)
def test_cut_anywhere(sizes, dtype):
    inputs = draw(sum(LENGTHS), sizes, dtype, seed=1)
    whole = triton_rule.gated_delta_rule(*inputs, bounds(LENGTHS))
    for steps in ([33], [64, 1, 1, 1], [7, 1, 40, 16], [1000]) if GPU else ([63, 1, 1],):
        made = in_steps(inputs, LENGTHS, lambda i, d, steps=steps: steps[(i + d) % len(steps)])
        if GPU:
            assert_same_bits(made, whole, f"steps of {steps}")
        else:  # numpy's products follow the shapes of their operands
            assert relative_rms(made, whole) < unit_error(dtype, 64)


@ON_GPU
def test_every_split_into_prefill_and_decode():
    # sequence t: a prompt of t tokens, then one after the other
    lengths = [200] * 201
    inputs = draw(sum(lengths), seed=2)
    whole = triton_rule.gated_delta_rule(*inputs, bounds(lengths))
    made = in_steps(inputs, lengths, lambda t, done: t if done == 0 and t else 1)
    assert_same_bits(made, whole)


@ON_GPU
def test_2000_decode_steps_against_one_pass():
    inputs = draw(2000, seed=3)
    whole = triton_rule.gated_delta_rule(*inputs, bounds([2000]))
    assert_same_bits(in_steps(inputs, [2000], lambda i, d: 1), whole)


@ON_GPU
def test_packed_against_each_alone_and_heads_of_a_model():
    inputs = draw(sum(LENGTHS), (16, 32, 128, 128), seed=4)
    whole = triton_rule.gated_delta_rule(*inputs, bounds(LENGTHS))
    parts = zip(*(x.split(LENGTHS) for x in inputs), strict=True)
    alone = [
        triton_rule.gated_delta_rule(*part, bounds([len(part[0])]))
        for part in parts
        if len(part[0])
    ]
    assert_same_bits(torch.cat(alone), whole)
    head = [inputs[0][:, 5:6], inputs[1][:, 5:6], *(x[:, 11:12] for x in inputs[2:])]
    one = triton_rule.gated_delta_rule(*head, bounds(LENGTHS))
    assert_same_bits(one, whole[:, 11:12].contiguous(), "value head 11 of key head 5")


@ON_GPU
def test_decode_in_a_graph_with_lanes_of_padding():
    count, steps = 6, 70
    inputs = draw(count * steps, seed=5)
    by_step = [x.view(count, steps, *x.shape[1:]).transpose(0, 1).contiguous() for x in inputs]
    engine = Engine(count, MODEL, torch.bfloat16)
    now, lengths = [x[0].clone() for x in by_step], int32([0] * count)
    pages = triton_rule.Pages(*engine.state, engine.slots, lengths)
    lanes = int32([0, 1, 2, 3, 4, 5, 5])  # the last has no token

    def step() -> Tensor:
        return triton_rule.paged_gated_delta_rule(*now, pages, lanes, 1)

    lengths.fill_(1)
    step()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = step()
    made = []
    for t in range(steps):
        for x, values in zip(now, by_step, strict=True):
            x.copy_(values[t])
        lengths.fill_(t + 1)
        graph.replay()
        made.append(out.clone())
    whole = triton_rule.gated_delta_rule(*inputs, bounds([steps] * count))
    whole = whole.view(count, steps, *whole.shape[1:]).transpose(0, 1)
    assert_same_bits(torch.stack(made)[:, :5].contiguous(), whole[:, :5].contiguous())
    assert not torch.stack(made)[:, 5].any()


@ON_GPU
def test_the_check_of_a_kept_state_can_fail():
    inputs = draw(130, seed=6)
    whole = triton_rule.gated_delta_rule(*inputs, bounds([130]))
    for spoiled in range(4):
        engine = Engine(1, MODEL, torch.bfloat16)
        engine.step(tuple(x[:101] for x in inputs), [101], [101])
        engine.state[spoiled].mul_(1.0625)
        rest = engine.step(tuple(x[101:] for x in inputs), [29], [130])
        assert (bits(rest) != bits(whole[101:])).any(), f"tensor {spoiled}"


@pytest.mark.parametrize(("sizes", "dtype"), [(MODEL if GPU else SMALL[0], DTYPES[-1])])
def test_gradients(sizes, dtype):
    lengths = [1, 0, 66, 3, 130] if GPU else [3, 66]
    count = sum(lengths)
    inputs = draw(count + 2, sizes, dtype, seed=7)  # two tokens of no sequence
    grad = torch.randn(inputs[2].shape, generator=torch.Generator().manual_seed(8))
    grad = grad.to(DEVICE, dtype)
    made = triton_backward.gated_delta_rule_backward(grad, *inputs, bounds(lengths))
    leaves = [x[:count].double().requires_grad_() for x in inputs]
    right = torch.autograd.grad(recurrence(*leaves, bounds(lengths)), leaves, grad[:count].double())
    again = triton_backward.gated_delta_rule_backward(grad, *inputs, bounds(lengths))
    sums = 104.0 * 64 * torch.finfo(torch.float32).eps / 2
    for name, mine, exact, other in zip("qkvgb", made, right, again, strict=True):
        assert relative_rms(mine[:count], exact) < unit_error(dtype, 256) + sums, name
        assert not mine[count:].any(), name
        assert_same_bits(mine, other, name)


def test_what_a_sequence_keeps():
    size = sum(
        torch.Size(shape).numel() * dtype.itemsize
        for shape, dtype in state_layout(16, 32, 128, 128, torch.bfloat16, "cuda")
    )
    assert size / (32 * 128 * 128 * 4) < 1.45
