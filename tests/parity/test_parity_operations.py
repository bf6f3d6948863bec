"""Requested, installed and served operations of both hosts: experts, latents, states."""

from pathlib import Path

import pytest

pytest.importorskip("vllm", reason="vllm is not installed")
pytest.importorskip("megatron.core", reason="megatron-core is not installed")

from isomodels.contract import contract_of
from isomodels.parity import run
from isomodels.parity.checkpoints import random_checkpoint, tiny_config
from isomodels.parity.ranks import Ranks
from isomodels.parity.workload import WORKLOADS

FAULTY = "tests.parity.faulty_trainer:FaultyTrainer"
# Operators that get a foreign kernel of equal bits.
FAMILIES = {
    "Qwen3MoeForCausalLM": "route",
    "Glm4MoeLiteForCausalLM": "mla_attention",
    "Qwen3_5MoeForCausalLM": "gated_delta_rule",
}


@pytest.fixture(autouse=True)
def importable(monkeypatch: pytest.MonkeyPatch, pytestconfig: pytest.Config) -> None:
    """The trainer's process finds the tests."""
    monkeypatch.setenv("PYTHONPATH", str(pytestconfig.rootpath))


def drawn(architecture: str, path: Path) -> Path:
    return random_checkpoint(path / "drawn", tiny_config(architecture), "bfloat16", 0)


def assert_served(report: run.Report, side: str, form: str, runs: int) -> None:
    """By name a side served what the contract requests, and no other forward pass."""
    served = [one for one in report.served[side] if one["form"] == form]
    forms = contract_of(Path(report.checkpoint)).numerical_policy["forms"]
    forwards = [one["operators"] for one in served if one["part"] == "forward"]
    assert forwards == [forms[form]["forward"]]
    assert sum(one["runs"] for one in served) >= runs


def assert_foreign(faults: list[str], operator: str) -> None:
    (fault,) = faults
    assert fault.startswith(f"the trainer's {operator} was registered by ")
    assert fault.endswith("not by isomodels")
    assert "faulty_trainer.py" in fault


def test_a_foreign_kernel_in_a_trainers_process_is_named(tmp_path: Path) -> None:
    architecture, operator = "Qwen3_5MoeForCausalLM", "gated_delta_rule"
    path = drawn(architecture, tmp_path)
    report = run.empty_report(path, "cpu", 0, WORKLOADS["quick"])
    arguments = {"dtype": "bfloat16", "seed": 0, "lr": 1e-3, "max_tokens": 64}
    with Ranks("trainer", FAULTY, 1, checkpoint=str(path), operator=operator, **arguments) as one:
        one.result()
        one.call("score", [[1, 2, 3]])
        run.check_operations(report, {"trainer": one})
    assert_foreign(report.operation_faults, operator)
    assert_served(report, "trainer", "packed", 1)


@pytest.mark.slow
@pytest.mark.parametrize("architecture", FAMILIES)
def test_a_foreign_kernel_fails_a_run_whose_bits_are_equal(
    architecture: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Neither bits nor names of operations tell: only who registered the kernel."""
    operator = FAMILIES[architecture]

    def ranks(name: str, factory: str, *args: object, **kwargs: object) -> Ranks:
        assert factory == "isomodels.parity.trainer:ParityTrainer"
        return Ranks(name, FAULTY, *args, operator=operator, **kwargs)

    monkeypatch.setattr(run, "Ranks", ranks)
    report = run.run_parity(drawn(architecture, tmp_path), stock=False)
    assert all(report.total(case).differ == 0 for case in report.cases)
    assert_foreign(report.faults(), operator)
    assert_served(report, "engine", "paged", 20)
    assert_served(report, "trainer", "packed", 20)
