"""Qwen3-MoE's module on a GPU: the same bits and the same experts in every way."""

import dataclasses

import pytest
import torch

from isomodels.checkpoint import load_checkpoint
from isomodels.layers.routes import record_routes, replay_routes
from tests.dense.models import Engine, run_packed, tokens
from tests.kernel.battery import assert_same_bits
from tests.moe.qwen3_moe.models import KINDS
from tests.moe.qwen3_moe.test_invariance import results, whole

pytestmark = pytest.mark.gpu
kinds = pytest.mark.parametrize("name", KINDS)
LENGTHS = [1, 17, 64, 5, 300, 16, 129]


@pytest.fixture
def model(checkpoint):
    def get(name):
        folder = checkpoint(name, torch.bfloat16)
        return load_checkpoint(folder, device="cuda").requires_grad_(False)

    return get


@kinds
def test_packed_alone_and_in_steps(model, name):
    core, ids = model(name), tokens(sum(LENGTHS)).cuda()
    together = whole(core, ids, LENGTHS)
    parts, expected = ids.split(LENGTHS), together.split(LENGTHS)
    for part, rows in zip(parts, expected, strict=True):
        assert_same_bits(whole(core, part), rows, f"{len(part)} alone")
    for steps in ([1], [7, 1], [64, 3, 200]):
        engine, got, turn = Engine(core, LENGTHS), [[] for _ in parts], 0
        while any(done < len(part) for done, part in zip(engine.done, parts, strict=True)):
            new = {
                i: part[engine.done[i] :][: steps[(turn + i) % len(steps)]]
                for i, part in enumerate(parts)
                if engine.done[i] < len(part)
            }
            rows = results(core, lambda e=engine, n=new: e.step(n))
            for i, own in zip(new, rows.split([len(x) for x in new.values()]), strict=True):
                got[i].append(own)
            turn += 1
        for own, rows in zip(got, expected, strict=True):
            assert_same_bits(torch.cat(own), rows, f"in steps of {steps}")


@kinds
def test_one_captured_decode_for_tokens_of_any_experts(model, name):
    """No size of an expert is baked into a graph."""
    core, count, prompt, more = model(name), 6, 40, 8
    ids = tokens(count * (prompt + more)).cuda().view(count, -1)
    expected = torch.stack([whole(core, one) for one in ids])
    engine = Engine(core, [prompt + more] * count)
    engine.step({i: ids[i, :prompt] for i in range(count)})
    fixed = None
    for t in range(prompt, prompt + more):
        given = engine.prepared({i: ids[i, t : t + 1] for i in range(count)})
        if fixed is None:
            batch = dataclasses.replace(given[2], max_seqlen_k=prompt + more)
            fixed = (*given[:2], batch)
            core(*fixed)  # compiles
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph):
                out = core(*fixed)
        fixed[0].copy_(given[0])
        fixed[1].copy_(given[1])
        batch.seq_lens.copy_(given[2].seq_lens)
        batch.paged.slot_mapping.copy_(given[2].paged.slot_mapping)
        graph.replay()
        rows = torch.cat((out.float(), core.logprobs(out)), 1)
        assert_same_bits(rows, expected[:, t, : rows.shape[1]], f"token {t}")


@kinds
def test_a_replay_of_its_own_routes_changes_no_bit(model, name):
    core, ids = model(name), tokens(200).cuda()
    with record_routes(core) as recorded:
        hidden = run_packed(core, ids)
    with replay_routes(core, recorded.take()):
        assert_same_bits(run_packed(core, ids), hidden)


@kinds
def test_gradients_repeat(checkpoint, name):
    core = load_checkpoint(checkpoint(name, torch.bfloat16), device="cuda")
    ids, runs = tokens(333).cuda(), []
    for _ in range(2):
        core.zero_grad()
        hidden = run_packed(core, ids, [200, 1, 132])
        core.token_logprobs(hidden[:-1], ids[1:]).sum().backward()
        runs.append({n: p.grad.clone() for n, p in core.named_parameters()})
    for n, grad in runs[0].items():
        assert grad.isfinite().all(), n
        assert_same_bits(runs[1][n], grad, n)
