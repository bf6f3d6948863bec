"""One token, one history, one set of weights: the same bits and the same experts in every way."""

import pytest
import torch

from isomodels.layers.routes import record_routes
from tests.dense.models import run_packed, tokens
from tests.kernel.battery import DTYPES, assert_same_bits, threads
from tests.moe.mla.models import ARCHITECTURES, LatentEngine

cases = pytest.mark.parametrize(
    ("name", "dtype"),
    [("deepseek", torch.float32), ("moonlight", torch.bfloat16), ("glm", torch.bfloat16)],
    ids=str,
)


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
    lengths = [1, 17, 65, 5, 16]
    ids = tokens(sum(lengths))
    together = whole(model, ids, lengths)
    alone = [whole(model, part) for part in ids.split(lengths)]
    assert_same_bits(together, torch.cat(alone), "packed")
    with threads(3):
        assert_same_bits(whole(model, ids, lengths), together, "3 threads")


@cases
def test_decode_and_chunks_against_packed(ours, name, dtype):
    model = ours(name, dtype)
    ids = tokens(34)
    expected = whole(model, ids)
    for step, block_size in ((1, 16), (7, 32), (32, 16)):
        engine = LatentEngine(model, [34], block_size)
        parts = [results(model, lambda t=t, e=engine: e.step({0: t})) for t in ids.split(step)]
        assert_same_bits(torch.cat(parts), expected, f"steps of {step}")


@cases
def test_chunks_decode_rows_and_whole_prompts_together(ours, name, dtype):
    model = ours(name, dtype)
    lengths = [40, 65, 20, 90]
    texts = [tokens(length, seed=i) for i, length in enumerate(lengths)]
    expected = [whole(model, ids) for ids in texts]
    engine = LatentEngine(model, lengths)
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


def test_batches_of_1_to_17(ours):
    model = ours("deepseek", torch.bfloat16)
    texts = [tokens(3 + i % 5, seed=i) for i in range(17)]
    alone = torch.stack([whole(model, ids)[-1] for ids in texts])
    for count in (2, 16, 17):
        engine = LatentEngine(model, [len(ids) for ids in texts[:count]])
        engine.step({i: ids[:-1] for i, ids in enumerate(texts[:count])})
        step = {i: ids[-1:] for i, ids in enumerate(texts[:count])}
        last = results(model, lambda engine=engine, step=step: engine.step(step))
        assert_same_bits(last, alone[:count], f"decode batch of {count}")


@pytest.mark.parametrize("dtype", DTYPES)
def test_no_tokens(ours, dtype):
    for name in ARCHITECTURES:
        model = ours(name, dtype)
        hidden = run_packed(model, tokens(0))
        assert model.logprobs(hidden).shape == (0, 512)


def test_the_checks_can_fail(ours, monkeypatch):
    # The norm of a latent that looks at the number of rows, in one layer, is enough to be seen.
    model = ours("deepseek", torch.bfloat16)
    norm = model.model.layers[1].self_attn.kv_a_layernorm
    call = norm.forward

    def by_rows(x, residual):
        normed, x = call(x, residual)
        return normed * (1 + 0.01 * (len(x) == 1)), x

    ids = tokens(9)
    expected = whole(model, ids)
    monkeypatch.setattr(norm, "forward", by_rows)
    engine = LatentEngine(model, [9])
    rows = [results(model, lambda t=t: engine.step({0: t})) for t in ids.split(1)]
    with pytest.raises(AssertionError, match="differ, first at"):
        assert_same_bits(torch.cat(rows), expected)
