"""The GRPO example: task, objective and loop here, with the bare module as the engine."""

import json
from argparse import Namespace
from dataclasses import replace
from pathlib import Path
from types import ModuleType

import numpy as np
import pytest
import torch

from isomodels.errors import ContractError
from isomodels.kernels.schedule import SCHEDULES
from isomodels.megatron import Trainer
from isomodels.parity.checkpoints import random_checkpoint, tiny_config
from isomodels.sync import WeightSender
from tests.examples.module_engine import ModuleEngine


def sample(grpo: ModuleType, prompt: list[int], answer: list[int]):
    logprobs = np.zeros(len(answer), np.float32)
    return grpo.Sample(prompt, answer, logprobs, "step 0", grpo.reward(prompt, answer))


def test_the_reward_is_exact(grpo: ModuleType):
    prompt = [1, 2, 3, 3, 4]  # begin ( [ [ {
    right = [7, 6, 6, 5, 0]
    assert grpo.solve(prompt) == right
    assert grpo.reward(prompt, right) == 1.0
    for wrong in (right[:-1], [*right, 0], [7, 6, 5, 6, 0], []):
        assert grpo.reward(prompt, wrong) == 0.0


def test_advantages_are_of_the_group(grpo: ModuleType):
    prompt, right = [1, 2], [5, 0]
    samples = [sample(grpo, prompt, a) for a in (right, [6, 0], right, right, [0], [0], [0], [0])]
    grpo.advantages(samples, 4)
    first = np.array([s.advantage for s in samples[:4]])
    assert abs(first.mean()) < 1e-12
    assert (first > 0).tolist() == [True, False, True, True]
    assert [s.advantage for s in samples[4:]] == [0.0] * 4  # nothing to learn from


def test_the_objective_is_clipped_on_the_side_that_gains(grpo: ModuleType):
    new = torch.tensor([0.0, 0.5, -0.5, 0.5, -0.5], requires_grad=True)
    advantage = torch.tensor([2.0, 1.0, 1.0, -1.0, -1.0])
    loss = grpo.clipped_loss(new, torch.zeros(5), advantage)
    low, high = np.exp(-0.5), np.exp(0.5)
    expected = -(2.0 + (1 + grpo.CLIP) + low - high - (1 - grpo.CLIP))
    assert float(loss) == pytest.approx(expected, rel=1e-6)
    loss.backward()
    assert new.grad is not None
    assert (new.grad != 0).tolist() == [True, False, True, True, False]


@pytest.mark.parametrize("changed", [-2.0 - 2.0**-22, np.nan])
def test_a_ratio_that_is_not_one_stops(grpo: ModuleType, changed: float):
    old = np.full(5, -2.0, np.float32)
    new = old.copy()
    grpo.assert_ratio_one(new, old, "step 3")
    new[2] = changed
    with pytest.raises(grpo.RatioError, match=r"step 3: 1 of 5 logprobs differ"):
        grpo.assert_ratio_one(new, old, "step 3")


def test_the_log_tells_rollouts_apart_by_a_bit(grpo: ModuleType):
    def rollouts(answer: list[int], logprob: float) -> str:
        one = sample(grpo, [1, 2], answer)
        one.logprobs[0] = logprob
        update = grpo.Update(0.0, 0.0, one.logprobs, one.logprobs)
        return grpo.describe(0, [one], update, [0.0] * 4)["rollouts"]

    assert rollouts([5, 0], -1.0) == rollouts([5, 0], -1.0)
    others = {rollouts([6, 0], -1.0), rollouts([5, 0], np.nextafter(np.float32(-1), np.float32(0)))}
    assert len(others | {rollouts([5, 0], -1.0)}) == 3


@pytest.fixture(scope="module")
def base(grpo: ModuleType, tmp_path_factory: pytest.TempPathFactory) -> Path:
    raw = tiny_config("Qwen3ForCausalLM") | grpo.SIZES | {"vocab_size": 8}
    return random_checkpoint(tmp_path_factory.mktemp("base"), raw, "float32", seed=0)


def arguments(out: Path, base: Path, **changed) -> Namespace:
    given = {"steps": 4, "prompts": 2, "group": 4, "behind": 0, "seed": 0, "resume": False}
    given |= {"lr": 1e-2, "dtype": "float32", "device": "cpu", "engine": "isomodels"}
    return Namespace(out=out, checkpoint=base, **given | changed)


@pytest.fixture
def sides(grpo: ModuleType, base: Path, monkeypatch: pytest.MonkeyPatch):
    """An engine and a policy; untrained answers are right half of the time."""
    monkeypatch.setattr(grpo, "reward", lambda prompt, answer: float(sum(answer) % 2))
    with Trainer(base, dtype=torch.float32, lr=1e-2) as trainer:
        engine = ModuleEngine(grpo, base)
        policy = grpo.Policy(trainer, sender=engine)
        policy.send()
        yield engine, policy


def lines(out: Path) -> list[dict]:
    return [json.loads(line) for line in (out / "log.jsonl").read_text().splitlines()]


def test_rollouts_of_old_weights_tell_staleness_from_mismatch(grpo, sides, tmp_path, base):
    engine, policy = sides
    verified, verify = [], policy.verify

    def noted(samples):
        verify(samples)  # at the weights that they name
        verified.append({s.version for s in samples})

    policy.behind, policy.verify, policy.save = 1, noted, lambda folder: None
    grpo.loop(arguments(tmp_path, base, behind=1), 0, engine, policy)
    log = lines(tmp_path)
    assert [line["step"] for line in log] == [1, 2, 3]
    assert verified == [{"step 0"}, {"step 0"}, {"step 1"}, {"step 2"}]
    # trained one step later: the first before any update, the others after one
    assert [line["weights"] for line in log] == ["step 0", "step 0", "step 1"]
    assert log[0]["differ"] == 0
    for line in log[1:]:
        assert line["differ"] > line["tokens"] / 2
        assert line["mean_difference"] > 1e-4


@pytest.mark.parametrize("behind", [0, 1])
def test_a_mismatch_stops_before_the_update(grpo, sides, tmp_path, base, behind):
    engine, policy = sides
    policy.behind = behind  # 1: it is not taken for staleness
    before = {name: tensor.clone() for name, tensor in policy.trainer.weights().items()}
    with torch.no_grad():
        engine.core.model.norm.weight *= 1 + 2.0**-20
    with pytest.raises(grpo.RatioError, match=r"step 0: .* logprobs differ"):
        grpo.loop(arguments(tmp_path, base, behind=behind), 0, engine, policy)
    assert policy.version == "step 0"
    assert not (tmp_path / "log.jsonl").read_text()
    for name, tensor in policy.trainer.weights().items():
        assert torch.equal(tensor.view(torch.uint8), before[name].view(torch.uint8)), name


def test_logprobs_are_recomputed_at_the_weights_that_they_name_alone(grpo, sides):
    engine, policy = sides
    samples = engine.sample([[1, 2, 3]], seed=0)
    policy.trainer.steps = 1
    with pytest.raises(grpo.RatioError, match="rollouts of 'step 0', but the trainer is at 'st"):
        policy.verify(samples)


def test_a_resumed_log_has_no_line_twice(grpo, sides, tmp_path, base):
    engine, policy = sides
    args = arguments(tmp_path, base, steps=2)
    grpo.loop(args, 0, engine, policy)
    policy.trainer.load(tmp_path / "state")
    with (tmp_path / "log.jsonl").open("a") as file:
        file.write('{"step": 2, "killed": "before its state was saved"}\n')
    args.steps = 3
    grpo.loop(args, policy.trainer.steps, engine, policy)
    assert [line["step"] for line in lines(tmp_path)] == [0, 1, 2]
    assert "killed" not in lines(tmp_path)[2]


@pytest.mark.parametrize("operation", ["attention", "row_linear"])
def test_another_schedule_stops_before_the_first_sync(grpo, base, tmp_path, monkeypatch, operation):
    engine = ModuleEngine(grpo, base)
    key = (operation, "torch")
    constants = dict(SCHEDULES[key].constants)
    name = next(n for n, value in constants.items() if isinstance(value, int))
    constants[name] += 1
    monkeypatch.setitem(SCHEDULES, key, replace(SCHEDULES[key], constants=constants))
    monkeypatch.setattr(grpo, "start_engine", lambda *_: engine)
    monkeypatch.setattr(WeightSender, "send", lambda *_: pytest.fail("weights were sent"))
    with pytest.raises(ContractError, match=f"numerical_policy.*{operation}.*{name}"):
        grpo.train(arguments(tmp_path, base))
    assert not (tmp_path / "log.jsonl").exists()
