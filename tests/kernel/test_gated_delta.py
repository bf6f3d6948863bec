"""The gated delta rule: one definition for packed sequences, chunks of a prompt, and decode."""

import itertools

import pytest
import torch
from torch import Tensor

from isomodels.kernels.gated_delta import (
    CHUNK,
    gated_delta_rule,
    paged_gated_delta_rule,
    state_layout,
)
from tests.kernel.battery import (
    DTYPES,
    THREADS,
    assert_gradients,
    assert_registered,
    assert_same_bits,
    bits,
    odd_storage,
    relative_rms,
    threads,
    unit_error,
)
from tests.kernel.delta_reference import recurrence

SIZES = (2, 4, 16, 24)  # key heads, value heads, key size, value size
LENGTHS = [1, 3, 0, 4, 5, 63, 64, 65, 0, 127]
# Each is hard in its own way; the numbers are (smallest, largest) log decay.
DECAYS = {"none": (0.0, 0.0), "weak": (-0.01, 0.0), "typical": (-1.0, 0.0), "strong": (-104.0, -20)}


def draw(
    count: int,
    dtype: torch.dtype = torch.float32,
    decay: str = "typical",
    sizes: tuple[int, int, int, int] = SIZES,
    seed: int = 0,
) -> tuple[Tensor, ...]:
    """q, k, v, g, beta of `count` tokens."""
    key_heads, heads, key_dim, value_dim = sizes
    generator = torch.Generator().manual_seed(seed)
    shapes = ((key_heads, key_dim), (key_heads, key_dim), (heads, value_dim))
    q, k, v = (torch.randn(count, *s, generator=generator).to(dtype) for s in shapes)
    low, high = DECAYS[decay]
    g = low + (high - low) * torch.rand(count, heads, generator=generator)
    return q, k, v, g, torch.rand(count, heads, generator=generator)


def mixed(count: int, dtype: torch.dtype = torch.float32, seed: int = 0) -> tuple[Tensor, ...]:
    """All hazards in one sequence: decay 0 and 1 and products that are subnormal, beta 0 and 1,
    zero keys and queries."""
    q, k, v, g, beta = draw(count, dtype, seed=seed)
    kind = torch.randint(0, 5, g.shape, generator=torch.Generator().manual_seed(seed + 1))
    for value, of in ((0.0, 1), (-104.0, 2), (-12.7, 3)):
        g = torch.where(kind == of, value, g)
    beta = torch.where(kind == 0, 0.0, torch.where(kind == 4, 1.0, beta))
    k[::7], q[::11], v[::13] = 0.0, 0.0, -0.0
    return q, k, v, g, beta


def sum_error(g: Tensor) -> float:
    """Of exp(G_i - G_j): an fp32 sum of the log decays of a chunk is exact to half its last bit."""
    return float(g.abs().max()) * CHUNK * torch.finfo(torch.float32).eps / 2


def bounds(lengths: list[int]) -> Tensor:
    return torch.tensor([0, *lengths]).cumsum(0).int()


def packed(inputs: tuple[Tensor, ...], lengths: list[int] | None = None) -> Tensor:
    return gated_delta_rule(*inputs, bounds(lengths or [len(inputs[0])]))


class Pages:
    """States of an engine: NaN wherever nobody wrote, strides as in vLLM's shared pages."""

    def __init__(self, slots: list[int], dtype: torch.dtype, sizes=SIZES):
        self.slots = torch.tensor(slots, dtype=torch.int32)
        self.tensors = []
        for shape, of in state_layout(*sizes, dtype):
            count = torch.Size(shape).numel()
            page = torch.full((max(slots) + 2, count + 5), torch.nan, dtype=of)
            self.tensors.append(page[:, 2 : 2 + count].view(-1, *shape))
        self.done = [0] * len(slots)

    def step(self, inputs: tuple[Tensor, ...], counts: dict[int, int]) -> Tensor:
        """Sequence i gets its next counts[i] tokens; the inputs are one after the other."""
        sequences = list(counts)
        for i in sequences:
            self.done[i] += counts[i]
        return paged_gated_delta_rule(
            *inputs,
            *self.tensors,
            self.slots[sequences],
            bounds(list(counts.values())),
            torch.tensor([self.done[i] for i in sequences], dtype=torch.int32),
            max(counts.values()),
        )


def cut(inputs: tuple[Tensor, ...], steps: list[int], dtype: torch.dtype) -> tuple[Tensor, Pages]:
    """One sequence in steps of these lengths."""
    pages = Pages([1], dtype)
    edges = [0, *itertools.accumulate(steps)]
    rows = [
        pages.step(tuple(x[start:end] for x in inputs), {0: end - start})
        for start, end in itertools.pairwise(edges)
    ]
    return torch.cat(rows), pages


def assert_same_state(one: Pages, two: Pages, length: int, what: str) -> None:
    """The boundary state and the rows of the open chunk, one sequence each."""
    for name, a, b in zip(("S", "k", "u", "G"), one.tensors, two.tensors, strict=True):
        a, b = a[one.slots[0]], b[two.slots[0]]
        if name != "S":
            a, b = a[: length % CHUNK], b[: length % CHUNK]
        assert_same_bits(a, b, f"{what}: {name}")


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("decay", DECAYS)
def test_accuracy(decay, dtype):
    inputs = draw(sum(LENGTHS), dtype, decay)
    exact = recurrence(*(x.double() for x in inputs), bounds(LENGTHS))
    error = relative_rms(packed(inputs, LENGTHS), exact)
    assert error < unit_error(dtype, 16)


def test_accuracy_of_hazards_and_of_one_head_size():
    inputs = mixed(200)
    exact = recurrence(*(x.double() for x in inputs), bounds([200]))
    assert relative_rms(packed(inputs), exact) < sum_error(inputs[3])
    inputs = draw(70, sizes=(1, 2, 128, 128))
    exact = recurrence(*(x.double() for x in inputs), bounds([70]))
    assert relative_rms(packed(inputs), exact) < unit_error(torch.float32, 64)


@pytest.mark.parametrize("dtype", DTYPES)
def test_row_44_of_the_field_reports_packed_against_each_alone(dtype):
    inputs = mixed(sum(LENGTHS), dtype)
    together = packed(inputs, LENGTHS)
    parts = zip(*(x.split(LENGTHS) for x in inputs), strict=True)
    alone = [packed(part) for part in parts if len(part[0])]
    assert_same_bits(together, torch.cat(alone))


@pytest.mark.parametrize("dtype", DTYPES)
def test_row_44_of_the_field_reports_gradients_packed_against_each_alone(dtype):
    inputs = draw(sum(LENGTHS), dtype)

    def gradients(x, lengths):
        leaves = [part.clone().requires_grad_() for part in x]
        out = packed(tuple(leaves), lengths)
        seed = torch.arange(out[0].numel()).view(out[0].shape).sin().to(out.dtype)
        return torch.autograd.grad(out, leaves, seed.expand_as(out))

    together = gradients(inputs, LENGTHS)
    alone = [
        gradients(part, None)
        for part in zip(*(x.split(LENGTHS) for x in inputs), strict=True)
        if len(part[0])
    ]
    for i, parts in enumerate(zip(*alone, strict=True)):
        assert_same_bits(together[i], torch.cat(parts), f"gradient {i}")


@pytest.mark.parametrize("dtype", DTYPES)
def test_prefill_and_decode_against_one_pass(dtype):
    inputs = mixed(200, dtype)
    whole = packed(inputs)
    _, at_once = cut(inputs, [200], dtype)
    for first in (0, 63, 64, 190):
        steps = [first] * bool(first) + [1] * (200 - first)
        out, pages = cut(inputs, steps, dtype)
        assert_same_bits(out, whole, f"prefill of {first}, then decode")
        assert_same_state(pages, at_once, 200, f"prefill of {first}, then decode")


@pytest.mark.slow
@pytest.mark.parametrize("dtype", DTYPES)
def test_every_split_into_prefill_and_decode(dtype):
    inputs = mixed(200, dtype, seed=3)
    whole = packed(inputs)
    for first in range(1, 201):
        out, _ = cut(inputs, [first] + [1] * (200 - first), dtype)
        assert_same_bits(out, whole, f"prefill of {first}, then decode")


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_prompt_cut_anywhere(dtype):
    inputs = mixed(300, dtype, seed=1)
    whole = packed(inputs)
    _, at_once = cut(inputs, [300], dtype)
    for size in (7, 16, 63, 64, 65, 100, 129, 299):
        steps = [size] * (300 // size) + [300 % size] * bool(300 % size)
        out, pages = cut(inputs, steps, dtype)
        assert_same_bits(out, whole, f"steps of {size}")
        assert_same_state(pages, at_once, 300, f"steps of {size}")


def test_row_47_of_the_field_reports_500_decode_steps_against_one_pass():
    inputs = draw(500, torch.bfloat16, "weak", sizes=(1, 2, 16, 16), seed=2)
    pages = Pages([1], torch.bfloat16, (1, 2, 16, 16))
    rows = [pages.step(tuple(x[t : t + 1] for x in inputs), {0: 1}) for t in range(500)]
    assert_same_bits(torch.cat(rows), packed(inputs))


@pytest.mark.slow
@pytest.mark.parametrize("decay", DECAYS)
def test_2000_decode_steps_against_one_pass(decay):
    inputs = draw(2000, torch.bfloat16, decay, sizes=(1, 2, 16, 16), seed=2)
    pages = Pages([1], torch.bfloat16, (1, 2, 16, 16))
    rows = [pages.step(tuple(x[t : t + 1] for x in inputs), {0: 1}) for t in range(2000)]
    assert_same_bits(torch.cat(rows), packed(inputs))


@pytest.mark.parametrize("dtype", DTYPES)
def test_prefill_and_decode_rows_in_one_step(dtype):
    lengths = [1000, 70, 3, 131, 64, 65]
    texts = [mixed(length, dtype, seed=i) for i, length in enumerate(lengths)]
    whole = [packed(text) for text in texts]
    pages = Pages([5, 2, 0, 7, 1, 3], dtype)
    plan = [
        {0: 500, 1: 63, 4: 63},
        {1: 1, 4: 1, 0: 13, 3: 128},  # 64 rows end a chunk, 513 and 128 do not
        {2: 0, 5: 65, 1: 5, 0: 486},  # a sequence without tokens keeps out
        {3: 2, 2: 3, 1: 1, 0: 1},
        {3: 1},
    ]
    got: list[list[Tensor]] = [[] for _ in lengths]
    for counts in plan:
        parts = [
            tuple(x[pages.done[i] : pages.done[i] + n] for x in texts[i]) for i, n in counts.items()
        ]
        out = pages.step(tuple(torch.cat(x) for x in zip(*parts, strict=True)), counts)
        for i, part in zip(counts, out.split(list(counts.values())), strict=True):
            got[i].append(part)
    for i, parts in enumerate(got):
        made = torch.cat(parts)
        assert_same_bits(made, whole[i][: len(made)], f"sequence {i}")


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_later_state_of_the_same_page_changes_nothing(dtype):
    # A prefix hit or a preempted sequence gets pages with what was there before.
    inputs = mixed(130, dtype)
    whole = packed(inputs)
    pages = Pages([1], dtype)
    pages.step(mixed(101, dtype, seed=9), {0: 101})
    pages.done = [0]
    first = pages.step(tuple(x[:90] for x in inputs), {0: 90})
    copy = Pages([3], dtype)  # the whole state, copied inside a chunk
    for mine, theirs in zip(copy.tensors, pages.tensors, strict=True):
        mine[3] = theirs[1]
    copy.done = [90]
    last = copy.step(tuple(x[90:] for x in inputs), {0: 40})
    assert_same_bits(torch.cat((first, last)), whole)


def test_later_tokens_do_not_reach_earlier_rows():
    inputs = draw(150)
    whole = packed(inputs)
    for poison in (torch.nan, torch.inf, 1e30):
        changed = [x.clone() for x in inputs]
        for x in changed[:3]:
            x[70] = poison
        rows = packed(tuple(changed))
        assert_same_bits(rows[:70], whole[:70], f"{poison}")
        by_steps, _ = cut(tuple(changed), [60, *[1] * 20, 70], torch.float32)
        assert_same_bits(by_steps, rows, f"{poison} in steps")
        assert rows[70:].isnan().all() == (poison != 1e30)


@pytest.mark.parametrize("dtype", DTYPES)
def test_threads_and_storage(dtype):
    inputs = draw(100, dtype)
    whole = packed(inputs, [70, 30])
    for count in THREADS:
        with threads(count):
            assert_same_bits(packed(inputs, [70, 30]), whole, f"{count} threads")
    fused = torch.cat([x.flatten(1) for x in inputs[:3]], 1)
    widths = [x[0].numel() for x in inputs[:3]]
    views = [part.view(x.shape) for part, x in zip(fused.split(widths, 1), inputs, strict=False)]
    assert_same_bits(packed((*views, *inputs[3:]), [70, 30]), whole, "views of one projection")
    moved = tuple(odd_storage(x) for x in inputs)
    assert_same_bits(packed(moved, [70, 30]), whole, "odd offset")


def test_value_heads_share_key_heads_in_order():
    q, k, v, g, beta = draw(80, sizes=(2, 6, 16, 16))
    whole = packed((q, k, v, g, beta))
    for head in range(6):
        one = slice(head, head + 1)
        key = slice(head // 3, head // 3 + 1)
        alone = packed((q[:, key], k[:, key], v[:, one], g[:, one], beta[:, one]))
        assert_same_bits(whole[:, one].contiguous(), alone, f"head {head}")


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("decay", ["none", "typical", "strong"])
def test_gradients(dtype, decay):
    lengths = [1, 0, 66, 3, 70]
    inputs = draw(140, dtype, decay)
    assert_gradients(
        lambda *x: gated_delta_rule(*x, bounds(lengths)),
        lambda *x: recurrence(*x, bounds(lengths)),
        *inputs,
        bound=unit_error(dtype, 256) + sum_error(inputs[3]),
    )


def test_gradients_of_a_wrong_formula_are_seen(monkeypatch):
    from isomodels.kernels import gated_delta_backward

    class Wrong(gated_delta_backward._Chunk):
        def backward(self, do, dstate):
            *rest, dg, dbeta, into = super().backward(do, dstate)
            return *rest, dg * 1.0003, dbeta, into

    monkeypatch.setattr(gated_delta_backward, "_Chunk", Wrong)
    with pytest.raises(AssertionError, match="gradient 3"):
        test_gradients(torch.float32, "typical")


def test_registration():
    args = (*draw(20), bounds([13, 7]))
    assert_registered(
        gated_delta_rule, tuple(x.requires_grad_(x.is_floating_point()) for x in args)
    )
    pages = Pages([1], torch.float32)
    for page in pages.tensors:
        page.zero_()
    step = pages.slots, bounds([20]), torch.tensor([20], dtype=torch.int32), 20
    args = (*draw(20), *(p.contiguous() for p in pages.tensors), *step)
    assert_registered(paged_gated_delta_rule, args, trainable=False)


def test_nothing_at_all():
    assert packed(draw(0), [0]).shape == (0, 4, 24)
    assert Pages([1], torch.float32).step(draw(0), {0: 0}).shape == (0, 4, 24)


def test_wrong_shapes_are_named():
    q, k, v, g, beta = draw(10)
    for wrong in ((q[:5], k, v, g, beta), (q, k, v[:, :3], g, beta), (q, k, v, g[:, :2], beta)):
        with pytest.raises(ValueError, match=r"gated_delta_rule needs q and k \[T, k_heads, K\]"):
            packed(wrong)
    with pytest.raises(TypeError, match=r"g and beta must be float32, got torch\.bfloat16"):
        packed((q, k, v, g.bfloat16(), beta))


@pytest.mark.parametrize(("index", "name"), [(0, "boundary"), (2, "updates"), (3, "decays")])
def test_rows_47_and_49_of_the_field_reports_a_state_of_another_dtype_is_refused(index, name):
    pages = Pages([1], torch.bfloat16)
    pages.tensors[index] = pages.tensors[index].bfloat16()
    match = rf"the state's {name} must be torch.float32, got torch.bfloat16"
    with pytest.raises(TypeError, match=match):
        pages.step(draw(3, torch.bfloat16), {0: 3})


def test_the_check_of_resumption_can_fail():
    # A state kept in bf16 between two steps is seen at once.
    inputs = draw(130, decay="weak")
    pages = Pages([1], torch.float32)
    pages.step(tuple(x[:100] for x in inputs), {0: 100})
    pages.tensors[0] = pages.tensors[0].bfloat16().float()
    rest = pages.step(tuple(x[100:] for x in inputs), {0: 30})
    assert (bits(rest) != bits(packed(inputs)[100:])).any()
