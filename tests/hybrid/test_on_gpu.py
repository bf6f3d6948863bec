"""The hybrids' modules on a GPU: one token, one history, the same bits in every way."""

import dataclasses

import pytest
import torch

from isomodels.batch import Batch
from isomodels.checkpoint import load_checkpoint
from tests.hybrid.models import Engine, bounds, tokens
from tests.hybrid.test_invariance import results
from tests.kernel.battery import assert_same_bits

pytestmark = pytest.mark.gpu
ARCHITECTURES = ["qwen3_5", "qwen3_5_moe", "qwen3_next"]
LENGTHS = [1, 3, 0, 4, 5, 63, 64, 0, 65, 127, 300]


@pytest.fixture
def model(checkpoint):
    def get(name):
        folder = checkpoint(name, torch.bfloat16)
        return load_checkpoint(folder, device="cuda").requires_grad_(False)

    return get


def ids_of(count, seed=0):
    return tokens(count, seed=seed).cuda()


def run_packed(model, ids, lengths=None):
    cu_seqlens = bounds(lengths or [len(ids)]).cuda()
    return model(ids, Batch.positions(cu_seqlens), Batch.packed(cu_seqlens))


@pytest.mark.parametrize("name", ARCHITECTURES)
def test_packed_alone_in_steps_and_by_tokens(model, name):
    core, ids = model(name), ids_of(sum(LENGTHS))
    together = results(core, run_packed(core, ids, LENGTHS))
    parts = [part for part in ids.split(LENGTHS) if len(part)]
    expected = [rows for rows in together.split(LENGTHS) if len(rows)]
    for part, rows in zip(parts, expected, strict=True):
        assert_same_bits(results(core, run_packed(core, part)), rows, f"{len(part)} alone")
    for steps in ([1], [7], [64, 1], [63, 2, 200]):
        engine = Engine(core, [len(part) for part in parts])
        done, got = [0] * len(parts), [[] for _ in parts]
        turn = 0
        while any(d < len(p) for d, p in zip(done, parts, strict=True)):
            # the sequences are in different places of their chunks
            new = {
                i: p[done[i] : done[i] + steps[(turn + i) % len(steps)]]
                for i, p in enumerate(parts)
                if done[i] < len(p)
            }
            rows = results(core, engine.step(new)).split([len(x) for x in new.values()])
            for (i, x), own in zip(new.items(), rows, strict=True):
                got[i].append(own)
                done[i] += len(x)
            turn += 1
        for own, rows in zip(got, expected, strict=True):
            assert_same_bits(torch.cat(own), rows, f"in steps of {steps}")


@pytest.mark.parametrize("name", ARCHITECTURES)
def test_a_captured_decode_with_lanes_that_end(model, name):
    """One graph over ends of chunks; lanes without tokens keep what their slot holds."""
    core, count, prompt, more = model(name), 5, 60, 12
    ids = ids_of(count * (prompt + more)).view(count, -1)
    whole = torch.stack([results(core, run_packed(core, one)) for one in ids])
    engine = Engine(core, [prompt + more] * count)
    for i in range(count):  # each begins elsewhere in its chunk
        engine.step({i: ids[i, : prompt - i]})
    batch = None

    def kept(ids, positions, given):
        nonlocal batch
        batch = given
        return core(ids, positions, given)

    engine.model = kept
    # a step that is not kept: it leaves the shapes, and states that the next steps overwrite
    saved = [[x.clone() for x in layer] for layer in engine.states]
    starts = list(engine.done)
    step = lambda t: {i: ids[i, starts[i] + t : starts[i] + t + 1] for i in range(count)}  # noqa: E731
    engine.step(step(0))
    for layer, old in zip(engine.states, saved, strict=True):
        for x, y in zip(layer, old, strict=True):
            x.copy_(y)
    engine.done = list(starts)
    token, position = (torch.zeros(count, dtype=torch.int64, device="cuda") for _ in range(2))
    paged = dataclasses.replace(batch.paged, slot_mapping=batch.paged.slot_mapping.clone())
    fixed = dataclasses.replace(
        batch,
        cu_seqlens_q=batch.cu_seqlens_q.clone(),
        seq_lens=batch.seq_lens.clone(),
        max_seqlen_k=prompt + more,
        paged=paged,
    )

    def fill(t, live):
        for i in range(count):
            place = starts[i] + t
            token[i], position[i] = ids[i, place], place
            fixed.seq_lens[i] = place + 1 if i < live else 0
            fixed.cu_seqlens_q[i + 1] = min(i + 1, live)
            slot = engine.pages[0].slots(i, place, place + 1)
            paged.slot_mapping[i : i + 1] = slot if i < live else -1

    fill(0, 0)  # a capture runs on no sequence
    core(token, position, fixed)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = results(core, core(token, position, fixed))
    for t in range(more):
        live = count if t < 8 else 3
        before = [[x.clone() for x in layer] for layer in engine.states]
        fill(t, live)
        graph.replay()
        for i in range(live):
            assert_same_bits(out[i], whole[i, starts[i] + t], f"sequence {i}, token {t}")
        for layer, old, slots in zip(engine.states, before, engine.slots, strict=True):
            for x, y in zip(layer, old, strict=True):
                for i in range(live, count):
                    assert_same_bits(x[slots[i]], y[slots[i]], "a lane that ended")


@pytest.mark.parametrize("name", ARCHITECTURES)
def test_gradients_repeat(checkpoint, name):
    core = load_checkpoint(checkpoint(name, torch.bfloat16), device="cuda")
    ids, runs = ids_of(333), []
    for _ in range(2):
        core.zero_grad()
        hidden = run_packed(core, ids, [200, 1, 132])
        core.token_logprobs(hidden[:-1], ids[1:]).sum().backward()
        runs.append({n: p.grad.clone() for n, p in core.named_parameters() if p.grad is not None})
    assert len(runs[0]) > 20
    for n, grad in runs[0].items():
        assert grad.isfinite().all(), n
        assert_same_bits(grad, runs[1][n], n)
