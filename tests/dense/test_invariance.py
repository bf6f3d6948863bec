"""One token, one history, one set of weights: the same bits in every way to compute it."""

import pytest
import torch
import torch.nn.functional as F

from tests.dense.models import ARCHITECTURES, Engine, run_packed, tokens
from tests.kernel.battery import DTYPES, assert_same_bits, threads

cases = pytest.mark.parametrize(
    ("name", "dtype"), [(n, d) for n in ARCHITECTURES for d in DTYPES], ids=str
)


def results(model, hidden):
    """Everything a host reads from hidden states, [T, H + V]."""
    return torch.cat((hidden.float(), model.logprobs(hidden)), 1)


@cases
def test_packed_against_each_alone(ours, name, dtype):
    model = ours(name, dtype)
    lengths = [1, 17, 64, 5, 70, 16]
    ids = tokens(sum(lengths))
    together = results(model, run_packed(model, ids, lengths))
    alone = [results(model, run_packed(model, part)) for part in ids.split(lengths)]
    assert_same_bits(together, torch.cat(alone), "packed")
    for count in (1, 3, 8):
        with threads(count):
            again = results(model, run_packed(model, ids, lengths))
            assert_same_bits(again, together, f"{count} threads")


@cases
def test_rows_16_and_21_of_the_field_reports_decode_against_packed(ours, name, dtype):
    model = ours(name, dtype)
    for length in (15, 16, 17, 31, 33, 70):
        ids = tokens(length, seed=length)
        whole = results(model, run_packed(model, ids))
        engine = Engine(model, [length])
        rows = [results(model, engine.step({0: token})) for token in ids.split(1)]
        assert_same_bits(torch.cat(rows), whole, f"row by row, {length} tokens")


@cases
def test_chunks_and_resumption(ours, name, dtype):
    model = ours(name, dtype)
    ids = tokens(100)
    whole = results(model, run_packed(model, ids))
    for step in (7, 16, 64, 99):
        engine = Engine(model, [100], block_size=32)
        chunks = [results(model, engine.step({0: part})) for part in ids.split(step)]
        assert_same_bits(torch.cat(chunks), whole, f"chunks of {step}")
    # preempted: its pages are gone, the history comes back in one prefill
    engine = Engine(model, [100])
    engine.step({0: ids[:90]})
    engine = Engine(model, [100], block_size=128)
    again = results(model, engine.step({0: ids[:95]}))
    last = results(model, engine.step({0: ids[95:]}))
    assert_same_bits(torch.cat((again, last)), whole, "resumed")


@cases
def test_row_2_of_the_field_reports_decode_and_prefill_rows_together(ours, name, dtype):
    model = ours(name, dtype)
    lengths = [40, 65, 20, 90]
    texts = [tokens(length, seed=i) for i, length in enumerate(lengths)]
    whole = [results(model, run_packed(model, ids)) for ids in texts]
    engine = Engine(model, lengths)
    steps = [
        {0: texts[0][:39], 1: texts[1][:10]},
        {1: texts[1][10:64], 0: texts[0][39:], 2: texts[2]},  # chunk, decode row, whole prompt
        {3: texts[3][:89], 1: texts[1][64:]},
        {3: texts[3][89:]},
    ]
    got = [[] for _ in lengths]
    for step in steps:
        parts = results(model, engine.step(step)).split([len(ids) for ids in step.values()])
        for i, part in zip(step, parts, strict=True):
            got[i].append(part)
    for i, parts in enumerate(got):
        assert_same_bits(torch.cat(parts), whole[i], f"sequence {i}")


@pytest.mark.parametrize("name", ARCHITECTURES)
def test_row_10_of_the_field_reports_batches_of_1_to_64(ours, name):
    model = ours(name)
    texts = [tokens(3 + i % 5, seed=i) for i in range(64)]
    alone = [results(model, run_packed(model, ids))[-1] for ids in texts]
    for count in (2, 3, 8, 15, 16, 17, 33, 64):
        engine = Engine(model, [len(ids) for ids in texts[:count]])
        engine.step({i: ids[:-1] for i, ids in enumerate(texts[:count])})
        last = results(model, engine.step({i: ids[-1:] for i, ids in enumerate(texts[:count])}))
        assert_same_bits(last, torch.stack(alone[:count]), f"decode batch of {count}")


@pytest.mark.parametrize("name", ARCHITECTURES)
def test_row_15_of_the_field_reports_logprobs_of_a_shared_prefix(ours, name):
    model = ours(name)
    prefix = tokens(50)
    one, two = torch.cat((prefix, tokens(30, seed=1))), torch.cat((prefix, tokens(7, seed=2)))
    got = [results(model, run_packed(model, ids))[:50] for ids in (one, two)]
    assert_same_bits(*got, "shared prefix")


@cases
def test_row_27_of_the_field_reports_token_logprobs(ours, name, dtype):
    model = ours(name, dtype)
    ids = tokens(40)
    hidden = run_packed(model, ids)
    targets = tokens(40, seed=1)
    for temperature in (0.6, 1.0, 1.5):  # row 23
        whole = model.logprobs(hidden, temperature)
        chosen = model.token_logprobs(hidden, targets, temperature)
        expected = whole.gather(1, targets[:, None])[:, 0]
        assert_same_bits(chosen, expected, f"T = {temperature}")
        logits = model.logits(hidden)
        divided = logits.div_(torch.full((40,), temperature).unsqueeze(1))
        shifted = divided - divided.amax(1, keepdim=True)
        assert torch.allclose(whole, shifted.log_softmax(1), atol=1e-5)


def test_no_tokens(ours):
    for name in ARCHITECTURES:
        model = ours(name)
        hidden = run_packed(model, tokens(0))
        assert model.logprobs(hidden).shape == (0, 512)
        assert model.token_logprobs(hidden, tokens(0)).shape == (0,)


def test_the_checks_can_fail(ours, monkeypatch):
    # The library's product in one projection is enough to be seen.
    model = ours("qwen3")
    projection = model.model.layers[1].self_attn.qkv_proj
    monkeypatch.setattr(projection, "forward", lambda x: F.linear(x, projection.weight))
    ids = tokens(33)
    whole = results(model, run_packed(model, ids))
    engine = Engine(model, [33])
    rows = torch.cat([results(model, engine.step({0: token})) for token in ids.split(1)])
    with pytest.raises(AssertionError, match="differ, first at"):
        assert_same_bits(rows, whole)
