"""Every contestant of the training row computes the same function, in a small model on the CPU."""

import dataclasses

import pytest
import torch

from benchmarks import train_step
from isomodels.validate.bits import bits
from tests.benchmarks.test_engine import SMALL

WORK = train_step.Work(layers=2, lengths=(16, 40, 5), device="cpu", overrides=tuple(SMALL.items()))


def loss_and_gradients(name: str, work: train_step.Work = WORK):
    model, loss_of = train_step.CONTESTANTS[name](work, train_step.Data.of(work))
    loss = loss_of()
    loss.backward()
    return loss.item(), {n: p.grad.float() for n, p in model.named_parameters()}


def test_plain_torch_is_our_function():
    loss, ours = loss_and_gradients("ours")
    other, theirs = loss_and_gradients("torch-eager")
    assert loss == pytest.approx(other, rel=2e-3)
    assert ours.keys() == theirs.keys()
    for name, gradient in ours.items():
        distance = (gradient - theirs[name]).norm() / theirs[name].norm()
        assert distance < 0.04, name


def test_weights_follow_from_names_alone():
    first, second = torch.nn.Linear(4, 3), torch.nn.Linear(4, 3)
    train_step.fill([("a", first.weight), ("b", first.bias)])
    train_step.fill([("b", second.bias), ("a", second.weight)])
    assert torch.equal(bits(first.weight), bits(second.weight))
    assert torch.equal(first.bias, second.bias)


def result(**changed) -> dict:
    return {"loss": 10.0, "step_ms": [2.0, 2.0, 2.0], "peak_bytes": 2**31, **changed}


def test_lines_of_the_table():
    theirs = result(step_ms=[1.0, 1.0, 1.0], peak_bytes=2**30)
    time, memory = train_step.compare(result(), theirs, "shape", "torch", 1.0)
    assert (time.ratio, memory.ratio, memory.mean) == (0.5, 0.5, True)
    assert "2.00 against 1.00 GiB" in memory.note


def test_runs_in_turns_are_taken_together():
    both = train_step.merged(result(), result(step_ms=[4.0, 4.0, 4.0], peak_bytes=2**32))
    time, _ = train_step.compare(both, result(step_ms=[3.0]), "shape", "torch", 1.0)
    assert (time.ratio, both["peak_bytes"]) == (1.0, 2**32)
    assert time.spread > 0.5


def test_another_function_is_no_baseline():
    with pytest.raises(RuntimeError, match=r"not the same function: loss 10\.0 against 11"):
        train_step.compare(result(), result(loss=11.0), "shape", "torch", 1.0)


def test_work_survives_its_way_to_the_other_process():
    import json

    assert train_step.Work(**json.loads(json.dumps(dataclasses.asdict(WORK)))).parsed
