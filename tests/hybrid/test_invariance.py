"""One token, one history, one set of weights: the same bits in every way to compute it."""

import pytest
import torch

from tests.hybrid.models import (
    ARCHITECTURES,
    WITH_EXPERTS,
    Engine,
    load_ours,
    run_packed,
    tokens,
)
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
    lengths = [1, 3, 4, 5, 63, 64, 65, 127, 1000, 0]
    ids = tokens(sum(lengths))
    together = results(model, run_packed(model, ids, lengths))
    alone = [results(model, run_packed(model, part)) for part in ids.split(lengths) if len(part)]
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
    model = ours("qwen3_5", dtype)
    ids = tokens(200)
    whole = results(model, run_packed(model, ids))
    for lengths in torch.arange(1, 201).split(40):  # of which each decodes until it has all tokens
        engine = Engine(model, [200] * len(lengths))
        step = {i: ids[:length] for i, length in enumerate(lengths.tolist())}
        while step:
            rows = results(model, engine.step(step))
            for (i, part), own in zip(
                step.items(), rows.split([len(part) for part in step.values()]), strict=True
            ):
                end = engine.done[i]
                what = f"prefill of {lengths[i]}, tokens to {end}"
                assert_same_bits(own, whole[end - len(part) : end], what)
            step = {i: ids[end : end + 1] for i, end in enumerate(engine.done) if end < 200}


@pytest.mark.slow
def test_2000_decode_steps_against_one_prefill(ours):
    model = ours("qwen3_5", torch.bfloat16)
    ids = tokens(2000)
    packed = run_packed(model, ids)
    engine = Engine(model, [2000, 2000])
    assert_same_bits(engine.step({0: ids}), packed, "one prefill")
    rows = [engine.step({1: token}) for token in ids.split(1)]
    assert_same_bits(results(model, torch.cat(rows)), results(model, packed), "2,000 steps")


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


@pytest.mark.parametrize("dtype", DTYPES)
def test_hazards_in_every_way(checkpoint, dtype):
    """Heads that forget at once, never, or by steps whose products are subnormal; no writing,
    whole writing, and keys that are zero."""
    model = load_ours(checkpoint("qwen3_5", dtype)).requires_grad_(False)
    ids = tokens(140)
    seen = []
    for layer in (model.model.layers[i].linear_attn for i in (0, 1)):
        layer.gates.A_log.copy_(torch.tensor([4.65, -40.0, 0.5, 0.0]))
        layer.gates.dt_bias.copy_(torch.tensor([30.0, -30.0, 1.0, 0.0]))
        layer.conv1d.weight[48:64] = 0.0  # of the second key head, behind 32 channels of queries
        layer.in_proj.weight[-8:-6] *= 1e4  # b of two heads
        layer.rule.register_forward_hook(lambda _, given, out: seen.append(given))
    whole = results(model, run_packed(model, ids))
    for _, k, _, g, beta, _ in seen:
        assert k[:, 0].ne(0).all()
        assert k[:, 1].eq(0).all()
        assert g[:, 0].exp().eq(0).all()
        assert g[:, 1].exp().eq(1).all()
        assert {0.0, 1.0} <= set(beta[:, :2].flatten().tolist())
        products = g[:64].cumsum(0).exp()
        assert ((products > 0) & (products < torch.finfo(torch.float32).tiny)).any()
    assert whole.isfinite().all()
    together = results(model, run_packed(model, ids, [75, 65]))
    alone = [results(model, run_packed(model, part)) for part in ids.split([75, 65])]
    assert_same_bits(together, torch.cat(alone), "packed")
    engine = Engine(model, [140])
    steps = ids.split([59, *[1] * 8, 70, 3])
    rows = [results(model, engine.step({0: part})) for part in steps]
    assert_same_bits(torch.cat(rows), whole, "in steps")


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
