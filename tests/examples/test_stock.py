"""The stock pair's trainer: the same objective, and weights that the engine is told to load."""

import sys
from argparse import Namespace
from importlib import import_module
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from isomodels.checkpoint import load_checkpoint
from isomodels.parity.checkpoints import random_checkpoint, tiny_config
from tests.examples.conftest import SCRIPT
from tests.examples.module_engine import ModuleEngine


def test_an_update_and_its_way_into_the_engine(grpo, tmp_path, monkeypatch):
    monkeypatch.syspath_prepend(str(SCRIPT.parent))
    for name in ("grpo", "stock"):
        monkeypatch.delitem(sys.modules, name, raising=False)
    stock = import_module("stock")
    raw = tiny_config("Qwen3ForCausalLM") | grpo.SIZES | {"vocab_size": 8}
    base = random_checkpoint(tmp_path / "base", raw, "float32", seed=0)
    engine, told = ModuleEngine(grpo, base), []
    llm = SimpleNamespace(
        collective_rpc=lambda method, kwargs: told.append((method, kwargs)),
        reset_prefix_cache=lambda: told.append("reset"),
        update_weight_version=told.append,
    )
    args = Namespace(out=tmp_path, dtype="float32", device="cpu", lr=1e-2)
    policy = stock.StockPolicy(base, SimpleNamespace(llm=llm), args)
    samples = engine.sample([[1, 2, 3], [1, 4]], seed=0)
    samples[0].advantage, samples[1].advantage = 1.0, -1.0
    update = policy.update(samples)
    assert update.old.tolist() == np.concatenate([s.logprobs for s in samples]).tolist()
    assert update.new == pytest.approx(update.old, abs=1e-4)  # near, not equal: another model
    assert update.grad_norm > 0
    policy.send()
    folder = str(tmp_path / "weights")
    assert told == [("reload_weights", {"weights_path": folder}), "reset", "step 1"]
    sent, old = load_checkpoint(folder), load_checkpoint(base)
    for name, tensor in old.state_dict().items():
        assert not torch.equal(sent.state_dict()[name], tensor), name
