"""One token, one history, one set of weights: the same bits and the same experts in every way."""

import pytest
import torch

from isomodels.kernels import moe_combine
from isomodels.layers import moe
from isomodels.layers.routes import record_routes
from tests.dense.models import Engine, run_packed, tokens
from tests.kernel.battery import DTYPES, assert_same_bits, threads
from tests.moe.qwen3_moe.models import KINDS

cases = pytest.mark.parametrize(("name", "dtype"), [(n, d) for n in KINDS for d in DTYPES], ids=str)


def results(model, run):
    """Everything of a forward, [T, H + V + layers * k]: hidden states, logprobs, routes."""
    with record_routes(model) as recorded:
        hidden = run()
    routes = recorded.take().flatten(1).float()
    return torch.cat((hidden.float(), model.logprobs(hidden), routes), 1)


def whole(model, ids, lengths=None):
    return results(model, lambda: run_packed(model, ids, lengths))


@cases
def test_row_32_packed_against_each_alone(ours, name, dtype):
    model = ours(name, dtype)
    lengths = [1, 17, 64, 5, 70, 16]
    ids = tokens(sum(lengths))
    together = whole(model, ids, lengths)
    alone = [whole(model, part) for part in ids.split(lengths)]
    assert_same_bits(together, torch.cat(alone), "packed")
    for count in (1, 3, 8):
        with threads(count):
            assert_same_bits(whole(model, ids, lengths), together, f"{count} threads")


@cases
def test_decode_against_packed(ours, name, dtype):
    model = ours(name, dtype)
    for length in (17, 33):
        ids = tokens(length, seed=length)
        engine = Engine(model, [length])
        rows = [results(model, lambda t=t, e=engine: e.step({0: t})) for t in ids.split(1)]
        assert_same_bits(torch.cat(rows), whole(model, ids), f"row by row, {length} tokens")


@cases
def test_chunks_decode_rows_and_whole_prompts_together(ours, name, dtype):
    model = ours(name, dtype)
    lengths = [40, 65, 20, 90]
    texts = [tokens(length, seed=i) for i, length in enumerate(lengths)]
    expected = [whole(model, ids) for ids in texts]
    engine = Engine(model, lengths)
    steps = [
        {0: texts[0][:39], 1: texts[1][:10]},
        {1: texts[1][10:64], 0: texts[0][39:], 2: texts[2]},  # chunk, decode row, whole prompt
        {3: texts[3][:89], 1: texts[1][64:]},
        {3: texts[3][89:]},
    ]
    got = [[] for _ in lengths]
    for step in steps:
        rows = results(model, lambda step=step: engine.step(step))
        for i, part in zip(step, rows.split([len(ids) for ids in step.values()]), strict=True):
            got[i].append(part)
    for i, parts in enumerate(got):
        assert_same_bits(torch.cat(parts), expected[i], f"sequence {i}")


def test_batches_of_1_to_64(ours):
    model = ours("qwen3-moe")
    texts = [tokens(3 + i % 5, seed=i) for i in range(64)]
    alone = torch.stack([whole(model, ids)[-1] for ids in texts])
    for count in (2, 15, 17, 64):
        engine = Engine(model, [len(ids) for ids in texts[:count]])
        engine.step({i: ids[:-1] for i, ids in enumerate(texts[:count])})
        step = {i: ids[-1:] for i, ids in enumerate(texts[:count])}
        last = results(model, lambda e=engine, s=step: e.step(s))
        assert_same_bits(last, alone[:count], f"decode batch of {count}")


def test_no_tokens(ours):
    for name in KINDS:
        model = ours(name)
        assert model.logprobs(run_packed(model, tokens(0))).shape == (0, 512)


def test_the_checks_can_fail(ours, monkeypatch):
    # An expert's outputs added in the order of places, which follows the batch, is seen.
    def by_place(y, weights, places, shared=None, gate=None):
        order = places.argsort(1)
        return moe_combine.moe_combine(y, weights.gather(1, order), places.gather(1, order))

    def by_batch(x, weight, *sorting):
        return sane(x, weight, *sorting) * (1 + len(x) * 2.0**-23)

    model, ids = ours("qwen3-moe"), tokens(33)
    sane = moe.grouped_linear
    packed = whole(model, ids)
    monkeypatch.setattr(moe, "moe_combine", by_place)
    with pytest.raises(AssertionError, match="differ, first at"):
        assert_same_bits(whole(model, ids), packed)
    monkeypatch.undo()
    monkeypatch.setattr(moe, "grouped_linear", by_batch)
    engine = Engine(model, [33])
    rows = torch.cat([results(model, lambda t=t: engine.step({0: t})) for t in ids.split(1)])
    with pytest.raises(AssertionError, match="differ, first at"):
        assert_same_bits(rows, whole(model, ids))
