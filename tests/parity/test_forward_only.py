"""`isomodels parity --forward-only`: weights drawn by both sides, one after the other."""

import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from typer.testing import CliRunner

from isomodels.cli.main import app
from isomodels.config import read_config
from isomodels.parity import forward_only
from isomodels.parity.checkpoints import draw_weights, tiny_config
from isomodels.parity.forward_trainer import ForwardPasses
from isomodels.parity.remote import Remote
from isomodels.parity.workload import WORKLOADS
from isomodels.registry import load_object


def _core(arch: str, **arguments: object) -> torch.nn.Module:
    spec, config = read_config({**tiny_config(arch), "dtype": "bfloat16"})
    return load_object(spec.model)(config, dtype=torch.bfloat16, **arguments)


@pytest.mark.parametrize("arch", ["Glm4MoeLiteForCausalLM", "Qwen3_5MoeForCausalLM"])
def test_drawn_weights_follow_seed_and_name_alone(arch: str) -> None:
    engine, trainer, other = _core(arch), _core(arch, carry_mtp=True), _core(arch)
    for core, seed in ((engine, 1), (trainer, 1), (other, 2)):
        for tensor in core.state_dict().values():
            tensor.fill_(float("nan"))
        draw_weights(core, seed)
    theirs, others = trainer.state_dict(), other.state_dict()
    for name, tensor in engine.state_dict().items():
        assert torch.isfinite(tensor).all(), name
        assert torch.equal(tensor, theirs[name]), name
        assert not torch.equal(tensor, others[name]), name
    experts = next(x for n, x in theirs.items() if x.dim() == 3 and "expert" in n)
    assert not torch.equal(experts[0], experts[1])


def _folder(path: Path) -> Path:
    raw = {**tiny_config("Glm4MoeLiteForCausalLM"), "dtype": "bfloat16"}
    (path / "config.json").write_text(json.dumps(raw))
    return path


def test_a_forward_pass_with_gradients_to_come_keeps_nothing_for_them(tmp_path: Path) -> None:
    """At full depth the activations of one microbatch take as much memory as the weights."""
    passes = ForwardPasses(str(_folder(tmp_path)), torch.bfloat16, 0, 64)
    outputs: list[torch.Tensor] = []
    passes.core.model.layers[0].mlp.register_forward_hook(lambda *a: outputs.append(a[2]))
    try:
        sequences = [[1, 2, 3, 4], [5, 6]]
        rows, scores = passes.forward_logprobs(sequences), passes.score(sequences)
    finally:
        passes.close()
    for row, score in zip(rows, scores, strict=True):
        assert torch.equal(row.view(torch.int32), score.view(torch.int32))
    training, scoring = outputs
    assert (training.requires_grad, scoring.requires_grad) == (True, False)
    with pytest.raises(RuntimeError, match="kept nothing for a backward pass"):
        training.float().sum().backward()


@pytest.mark.slow
def test_equal_bits_and_the_exit_code(tmp_path: Path) -> None:
    file = tmp_path / "report.json"
    arguments = ["--config", str(_folder(tmp_path)), "--forward-only", "--json", str(file)]
    done = CliRunner().invoke(app, ["parity", *arguments])
    assert done.exit_code == 0, done.output
    report = json.loads(file.read_text())
    assert report["forward_only"]
    assert list(report["phases"]) == ["before_update"]
    assert "trainer_recompute" not in report["cases"]
    for case in report["cases"].values():
        assert (case["compared"] >= 200, case["differ"]) == (True, 0)
    routes = report["phases"]["before_update"]["routes"]
    assert routes["compared"] > 2500
    assert routes["differ"] == 0


@pytest.mark.slow
def test_other_weights_are_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def remote(name: str, factory: str, **given: int) -> Remote:
        if name == "engine":
            given["draw_seed"] += 1
        return Remote(name, factory, **given)

    monkeypatch.setattr(forward_only, "Remote", remote)
    report = forward_only.run_forward_only(
        _folder(tmp_path),
        device="cpu",
        seed=0,
        workload=replace(WORKLOADS["quick"], scored=(7, 40, 90), prefixes=((40, 3),), crowded=4),
        say=lambda _: None,
    )
    found = " ".join(report.faults())
    assert "engine_decode before_update" in found
    assert "trainer_score" not in found
    assert report.place is not None
    assert report.place.operation is None


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--arch", "Qwen3MoeForCausalLM"], "--config"),
        (["--config", "/nowhere", "--trainer-layout", "tp2"], "layouts"),
    ],
)
def test_what_it_does_not_do_is_refused(arguments: list[str], words: str) -> None:
    done = CliRunner().invoke(app, ["parity", "--forward-only", *arguments])
    assert done.exit_code == 2
    assert words in done.stderr
