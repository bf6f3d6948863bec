"""The RL row: its stock trainer computes our function, its work and its lines are what they say."""

import gc
import json
from dataclasses import asdict
from typing import ClassVar

import pytest
import torch

from benchmarks import rl_pairs, rl_step, rl_stock
from isomodels.batch import Batch
from isomodels.checkpoint import load_checkpoint
from isomodels.parity.checkpoints import random_checkpoint
from tests.benchmarks.test_engine import SMALL

WORK = rl_pairs.Work(
    str(rl_step.ROOT / "tests/data/configs/qwen3-1.7b"),
    overrides=(*SMALL.items(), ("num_hidden_layers", 5)),
    prompts=2,
    group=2,
    tokens_in=5,
    tokens_out=4,
    max_tokens=18,
    device="cpu",
)


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    return random_checkpoint(tmp_path_factory.mktemp("rl") / "c", WORK.raw, "bfloat16", 0)


def samples():
    generator = torch.Generator().manual_seed(0)
    drawn = torch.randint(503, (4, 9), generator=generator).tolist()
    old = torch.full((4,), -6.0).numpy()
    return [
        rl_pairs.grpo.Sample(ids[:5], ids[5:], old, "", advantage=sign)
        for ids, sign in zip(drawn, (1.0, -1.0, 0.5, -0.5), strict=True)
    ]


def test_the_stock_trainer_trains_our_function(checkpoint):
    trainer = rl_stock.StockTrainer(checkpoint, 1e-3, WORK.max_tokens, "cpu")
    one, *_ = given = samples()
    ids = torch.tensor([[*one.prompt, *one.answer]])
    before = dict(trainer.weights())
    assert before.keys() >= {"model.embed_tokens.weight", "model.layers.4.self_attn.k_proj.weight"}
    assert "lm_head.weight" not in before  # tied
    held = {name: tensor.clone() for name, tensor in before.items()}
    loss, norm, new, old = trainer.update(given, rl_pairs.grpo.clipped_loss)
    assert new.shape == old.shape == (16,)
    assert norm > 0
    core = load_checkpoint(checkpoint)
    bounds = torch.tensor([0, 9], dtype=torch.int32)
    hidden = core(ids[0], torch.arange(9), Batch.packed(bounds))
    ours = core.token_logprobs(hidden[4:8], ids[0, 5:])
    assert torch.allclose(ours, torch.from_numpy(new[:4]), atol=0.1)
    moved = [n for n, tensor in trainer.weights() if not torch.equal(tensor, held[n])]
    assert len(moved) > len(held) / 2
    again = trainer.update(given, rl_pairs.grpo.clipped_loss)
    assert again[0] < loss  # the second step sees what the first one gained


def test_the_stock_pair_compares_no_contracts():
    calls = []

    class Llm:
        def __getattr__(self, name):
            return lambda *args: calls.append((name, args))

    client = rl_pairs.stock_client(Llm())
    client.init_weight_transfer_engine({})  # as vLLM's own transfer calls it
    client.start_weight_update()
    client.finish_weight_update()
    assert calls == [
        ("init_weight_transfer_engine", ({"init_info": {}},)),
        ("start_weight_update", ()),
        ("finish_weight_update", (None,)),
    ]


def test_a_warm_up_asserts_no_ratio(monkeypatch, checkpoint):
    ours, seen = rl_pairs.Ours(checkpoint, WORK), []
    policy = rl_pairs.grpo.Policy(None)
    monkeypatch.setattr(ours, "start_trainer", lambda: setattr(ours, "policy", policy) or "name")
    monkeypatch.setattr(ours, "update", lambda given: seen.append((policy.behind, len(given))))
    assert ours.warm() == "name"
    assert seen == [(1, WORK.prompts)]


def test_work_survives_its_way_and_has_a_smaller_form():
    there = rl_pairs.Work(**json.loads(json.dumps(asdict(WORK))))
    assert there.raw == WORK.raw
    assert WORK.smaller.raw["num_hidden_layers"] == 4
    assert WORK.smaller.prompts * WORK.smaller.group == 2  # one microbatch of 18 tokens


def test_a_compiled_convolution_is_the_plain_one():
    x, w = torch.randn(2, 9, 5).transpose(1, 2), torch.randn(5, 4)
    plain = torch.nn.functional.conv1d(x, w[:, None], padding=3, groups=5)[..., :9]
    found = rl_stock.causal_conv(x, w, None, "silu")
    assert torch.allclose(found, torch.nn.functional.silu(plain), atol=1e-6)


def result(seconds: float, **changed) -> dict:
    chosen = dict.fromkeys(("attention", "compilation", "cudagraphs"), "NONE")
    step = dict.fromkeys(rl_pairs.PARTS, seconds)
    step |= {"compared": 10, "differ": 0, "mean_difference": 0.0}
    return {
        "chosen": {**chosen, **dict.fromkeys(rl_step.SAME, 1), **changed},
        "trainer": "trainer",
        "alone": [{"generation": seconds, "decode_step_ms": 7 * seconds}] * 3,
        "warm_up": [step],
        "steps": [step, step],
    }


class Scripted:
    """A pair's process; what `failing` is asked for at `fails_at` raises."""

    failing, error = "", RuntimeError("a ratio is not 1")
    fails_at = ("step", WORK.warm_up + 2)
    order: ClassVar[list] = []

    def __init__(self, label, name, *_):
        self.label = self.name = name
        self.asked = []

    def ask(self, *request):
        self.asked.append(request)

    def answer(self):
        (method, *arguments) = self.asked[-1]
        self.order.append((self.label, method))
        if self.name == self.failing and (method, *arguments) == self.fails_at:
            raise self.error
        given = {"step": result(1.0)["steps"][0], "generate": result(1.0)["alone"][0]}
        return given.get(method, method), 0.1, {}

    def close(self):
        pass


def scripted(monkeypatch, tmp_path, failing, error, seconds=60.0, fails_at=Scripted.fails_at):
    monkeypatch.setattr(Scripted, "failing", failing)
    monkeypatch.setattr(Scripted, "error", error)
    monkeypatch.setattr(Scripted, "fails_at", fails_at)
    monkeypatch.setattr(Scripted, "order", [])
    monkeypatch.setattr(rl_step, "Remote", Scripted)
    monkeypatch.setattr("isomodels.parity.checkpoints.random_checkpoint", lambda *_: None)
    results = {}
    try:
        rl_step.measure(("ours", "stock"), WORK, tmp_path, seconds, results)
    except KeyboardInterrupt:
        results["interrupted"] = True
    return results


@pytest.mark.parametrize("failing", ["ours", "stock"])
def test_a_pair_that_fails_late_has_no_line(monkeypatch, tmp_path, capsys, failing):
    results = scripted(monkeypatch, tmp_path, failing, RuntimeError("a ratio is not 1"))
    other = {"ours": "stock", "stock": "ours"}[failing]
    assert results[failing] == {}
    assert len(results[other]["steps"]) == WORK.steps
    assert f"{failing} failed: a ratio is not 1" in capsys.readouterr().out


def test_engines_generate_in_turn_before_a_trainer_starts(monkeypatch, tmp_path):
    results = scripted(monkeypatch, tmp_path, "", None)
    order = Scripted.order
    assert [one for one in order if one[1] == "generate"] == [
        ("ours", "generate"),
        ("stock", "generate"),
    ] * WORK.rounds
    assert order.index(("ours", "start_trainer")) > order.index(("stock", "generate"))
    assert [len(one["alone"]) for one in results.values()] == [WORK.rounds] * 2


def test_a_pair_that_cannot_generate_is_left_out(monkeypatch, tmp_path, capsys):
    fails_at = ("generate", rl_pairs.WARM + 3)
    results = scripted(monkeypatch, tmp_path, "stock", RuntimeError("no memory"), fails_at=fails_at)
    assert list(results) == ["ours"]
    assert len(results["ours"]["steps"]) == WORK.steps
    assert capsys.readouterr().out.count("stock failed: no memory") == 1


def test_the_callers_heap_is_left_alone():
    """Objects from before a step are no collection's any more."""
    stale = [[] for _ in range(3)]
    stale[0].append(stale)
    rl_pairs.leave_heap_alone()
    try:
        assert not any(one is stale for one in gc.get_objects())
    finally:
        gc.unfreeze()
    assert any(one is stale for one in gc.get_objects())


def test_what_was_measured_is_kept_when_time_is_over(monkeypatch, tmp_path):
    results = scripted(monkeypatch, tmp_path, "stock", KeyboardInterrupt())
    assert results["interrupted"]
    assert [len(results[name]["steps"]) for name in ("ours", "stock")] == [WORK.steps, 2]
    results = scripted(monkeypatch, tmp_path, "", None, seconds=0.0)
    assert [len(results[name]["steps"]) for name in ("ours", "stock")] == [1, 1]
    rl_step.show(results)


def test_lines_of_the_table():
    whole, *parts = rl_step.compare(result(1.04), result(1.0), WORK)
    assert whole.ratio > whole.floor
    assert "30 ratios of ours" in whole.note
    assert [line.floor for line in parts] == [0.0] * 5
    assert [round(line.ours_ms) for line in parts[-2:]] == [1040, 7]  # of seconds, of milliseconds
    whole, *_ = rl_step.compare(result(1.06), result(1.0), WORK)
    assert whole.ratio < whole.floor
    with pytest.raises(RuntimeError, match="not the same scheduler: max_num_seqs"):
        rl_step.compare(result(1.0, max_num_seqs=2), result(1.0), WORK)
