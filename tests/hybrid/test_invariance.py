"""One token, one history, one set of weights: the same bits in every way to compute it."""

import pytest
import torch

from tests.hybrid.models import ARCHITECTURES, WITH_EXPERTS, Engine, run_packed, tokens
from tests.kernel.battery import DTYPES, assert_same_bits, threads

ONE = [("qwen3_5", dtype) for dtype in DTYPES]
one_model = pytest.mark.parametrize(("name", "dtype"), ONE, ids=str)
# The others have the same layers: experts, and rows in another order of files.
cases = pytest.mark.parametrize(
    ("name", "dtype"), [*ONE, *((n, torch.bfloat16) for n in WITH_EXPERTS)], ids=str
)
# Packed in this order; the empty ones stand between neighbours.
LENGTHS = [1, 3, 0, 4, 5, 63, 64, 0, 65, 127]


def results(model, hidden):
    """Everything a host reads from hidden states, [T, H + V]."""
    return torch.cat((hidden.float(), model.logprobs(hidden)), 1)


@one_model
def test_row_44_of_the_field_reports_packed_against_each_alone(ours, name, dtype):
    model = ours(name, dtype)
    ids = tokens(sum(LENGTHS))
    together = results(model, run_packed(model, ids, LENGTHS))
    alone = [results(model, run_packed(model, part)) for part in ids.split(LENGTHS) if len(part)]
    assert_same_bits(together, torch.cat(alone), "packed")
    with threads(3):
        assert_same_bits(results(model, run_packed(model, ids, LENGTHS)), together, "3 threads")


@pytest.mark.slow
@one_model
def test_a_long_sequence_among_short_ones(ours, name, dtype):
    model = ours(name, dtype)
    lengths = [64, 1000, 1, 65]
    ids = tokens(sum(lengths))
    together = results(model, run_packed(model, ids, lengths))
    alone = [results(model, run_packed(model, part)) for part in ids.split(lengths)]
    assert_same_bits(together, torch.cat(alone), "packed")


@one_model
def test_decode_against_packed(ours, name, dtype):
    model = ours(name, dtype)
    ids = tokens(132)
    whole = results(model, run_packed(model, ids))
    for start, end in ((0, 6), (61, 67), (126, 132)):  # from nothing, and over ends of chunks
        engine = Engine(model, [132])
        rows = [results(model, engine.step({0: ids[:start]}))] if start else []
        rows += [results(model, engine.step({0: token})) for token in ids[start:end].split(1)]
        assert_same_bits(torch.cat(rows), whole[:end], f"row by row from {start}")


@pytest.mark.slow
@pytest.mark.parametrize("dtype", DTYPES)
def test_prefill_of_every_length_and_decode(ours, dtype):
    # The states are copied between steps, as prefix hits and preemption do.
    model = ours("qwen3_5", dtype)
    ids = tokens(200)
    whole = results(model, run_packed(model, ids))
    for first in range(1, 200, 7):
        engine = Engine(model, [200])
        rows = [results(model, engine.step({0: ids[:first]}))]
        rows += [results(model, engine.step({0: token})) for token in ids[first:].split(1)]
        assert_same_bits(torch.cat(rows), whole, f"prefill of {first}")


@cases
def test_chunks_and_resumption(ours, name, dtype):
    model = ours(name, dtype)
    ids = tokens(150)
    whole = results(model, run_packed(model, ids))
    for step in (7, 64, 149):
        engine = Engine(model, [150], block_size=32)
        chunks = [results(model, engine.step({0: part})) for part in ids.split(step)]
        assert_same_bits(torch.cat(chunks), whole, f"chunks of {step}")
    # preempted: its memory is another's by now, the history comes back in one prefill
    engine = Engine(model, [150])
    engine.step({0: tokens(77, seed=5)})
    engine.done = [0]
    again = results(model, engine.step({0: ids[:95]}))
    last = results(model, engine.step({0: ids[95:]}))
    assert_same_bits(torch.cat((again, last)), whole, "resumed")


@one_model
def test_row_48_of_the_field_reports_a_prefix_hit_inside_a_chunk(ours, name, dtype):
    model = ours(name, dtype)
    prefix = tokens(90)
    engine = Engine(model, [140, 140])
    engine.step({0: prefix[:80]})
    for hit in (80,):  # 16 rows into the second chunk
        # what an engine shares and copies: pages, and each tensor of the state
        for page in engine.pages:
            blocks = -(-hit // page.block_size)
            source, target = (page.block_table[i, :blocks].long() for i in (0, 1))
            page.cache[target] = page.cache[source]
        for tensors, slots in zip(engine.states, engine.slots, strict=True):
            for tensor in tensors:
                tensor[slots[1]] = tensor[slots[0]]
        engine.done[1] = hit
        own = tokens(50, seed=hit)
        whole = results(model, run_packed(model, torch.cat((prefix[:hit], own))))
        assert_same_bits(results(model, engine.step({1: own})), whole[hit:], f"hit of {hit}")


@cases
def test_decode_and_prefill_rows_together(ours, name, dtype):
    model = ours(name, dtype)
    lengths = [40, 65, 20, 130]
    texts = [tokens(length, seed=i) for i, length in enumerate(lengths)]
    whole = [results(model, run_packed(model, ids)) for ids in texts]
    engine = Engine(model, lengths)
    steps = [
        {0: texts[0][:39], 1: texts[1][:10]},
        {1: texts[1][10:64], 0: texts[0][39:], 2: texts[2]},  # chunk, decode row, whole prompt
        {3: texts[3][:129], 1: texts[1][64:]},
        {3: texts[3][129:]},
    ]
    got = [[] for _ in lengths]
    for step in steps:
        parts = results(model, engine.step(step)).split([len(ids) for ids in step.values()])
        for i, part in zip(step, parts, strict=True):
            got[i].append(part)
    for i, parts in enumerate(got):
        assert_same_bits(torch.cat(parts), whole[i], f"sequence {i}")


@pytest.mark.parametrize("name", ARCHITECTURES[:1])
def test_decode_batches_of_many_sizes(ours, name):
    model = ours(name)
    # each at another place of its chunk
    texts = [tokens(3 + 5 * i % 66, seed=i) for i in range(17)]
    alone = [results(model, run_packed(model, ids))[-1] for ids in texts]
    for count in (2, 17):
        engine = Engine(model, [len(ids) for ids in texts[:count]])
        engine.step({i: ids[:-1] for i, ids in enumerate(texts[:count])})
        last = results(model, engine.step({i: ids[-1:] for i, ids in enumerate(texts[:count])}))
        assert_same_bits(last, torch.stack(alone[:count]), f"decode batch of {count}")


def test_no_tokens(ours):
    for name in ARCHITECTURES:
        model = ours(name)
        hidden = run_packed(model, tokens(0))
        assert model.logprobs(hidden).shape == (0, 512)


def test_the_checks_can_fail(ours):
    # A convolution that loses its window between two steps is seen at the first token after.
    model, ids = ours("qwen3_5"), tokens(40)
    whole = results(model, run_packed(model, ids))
    engine = Engine(model, [40])
    engine.step({0: ids[:30]})
    for window, *_ in engine.states:
        window.zero_()
    with pytest.raises(AssertionError, match=r"differ, first at \[0"):
        assert_same_bits(results(model, engine.step({0: ids[30:]})), whole[30:])
