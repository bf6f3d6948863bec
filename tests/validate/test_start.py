"""The start of a host, and the command: go on, refuse, or prove first."""

import json
import logging
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
from typer.testing import CliRunner

from isomodels.cli.main import app
from isomodels.errors import UnsupportedError
from isomodels.validate import require_validated, start
from isomodels.validate.battery import load_operations
from isomodels.validate.device import facts
from isomodels.validate.report import load, store
from tests.validate.conftest import Broken
from tests.validate.test_faults import wrong_by
from tests.validate.test_report import report

CPU = torch.device("cpu")
MODEL = {"dtype": torch.bfloat16, "head_dim": 32}
pytestmark = pytest.mark.usefixtures("few_operations")


def run(*arguments: object):
    return CliRunner().invoke(app, ["validate", *(str(a) for a in arguments)])


def test_without_a_report_the_quick_battery_runs_once(
    cache: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    with caplog.at_level(logging.WARNING):
        require_validated(CPU, **MODEL)
    assert "not validated yet; running the quick battery" in caplog.text
    kept, _ = load(facts(CPU))
    assert kept is not None
    assert kept.kind == "quick"
    assert kept.passed
    monkeypatch.setattr(start, "run_battery", None)  # it must not be called again
    caplog.clear()
    begin = time.perf_counter()
    require_validated(CPU, **MODEL)
    assert time.perf_counter() - begin < 1.0
    assert not caplog.records


@pytest.mark.parametrize("kind", ["quick", "full"])
def test_a_failing_report_refuses(cache: Path, kind: str) -> None:
    store(report(kind, fault="row 3 differs"))
    match = r"kernels failed their checks on .* \(rms_norm\): run `isomodels validate --device cpu`"
    with pytest.raises(UnsupportedError, match=match):
        require_validated(CPU, **MODEL)


def test_a_passing_report_decides_at_once(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    store(report())
    monkeypatch.setattr(start, "run_battery", None)
    require_validated(CPU, **MODEL)


def test_a_faulty_kernel_refuses_now_and_at_the_next_start(cache: Path, broken: Broken) -> None:
    broken("swiglu", wrong_by(1.1))
    for _ in range(2):
        with pytest.raises(UnsupportedError, match=r"\(swiglu\): run `isomodels validate"):
            require_validated(CPU, **MODEL)


def test_a_host_proves_what_its_model_runs_and_no_more(
    cache: Path, broken: Broken, caplog: pytest.LogCaptureFixture
) -> None:
    engine = {**MODEL, "operators": {"embedding"}, "trains": False}
    broken("swiglu", wrong_by(1.1))
    require_validated(CPU, **engine)
    kept, _ = load(facts(CPU))
    assert kept is not None
    assert set(kept.outcomes) == {"embedding"}
    assert "gradients" not in kept.outcomes["embedding"].checks
    # A trainer of the same model lacks the gradients, another model lacks an operation.
    require_validated(CPU, **{**engine, "trains": True})
    kept, _ = load(facts(CPU))
    assert kept is not None
    assert "gradients" in kept.outcomes["embedding"].checks
    require_validated(CPU, **{**engine, "operators": {"embedding", "rms_norm"}})
    kept, _ = load(facts(CPU))
    assert kept is not None
    assert set(kept.outcomes) == {"embedding", "rms_norm"}
    caplog.clear()
    require_validated(CPU, **{**engine, "operators": {"rms_norm"}})
    assert not caplog.records
    with pytest.raises(UnsupportedError, match=r"\(swiglu\)"):
        require_validated(CPU, **{**engine, "operators": {"rms_norm", "swiglu"}})
    require_validated(CPU, **engine)  # the fault is not in what this model runs


def test_a_damaged_report_is_made_anew(cache: Path, caplog: pytest.LogCaptureFixture) -> None:
    file = store(report(fault="row 3 differs"))
    file.write_text("{")
    require_validated(CPU, **MODEL)
    assert f"{file} is damaged" in caplog.text
    kept, _ = load(facts(CPU))
    assert kept is not None
    assert kept.passed


def test_a_cache_that_cannot_be_written_costs_time_only(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "isomodels").write_text("")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    require_validated(CPU, **MODEL)
    assert "the report is not kept" in caplog.text


def test_a_model_that_has_no_kernels_is_refused_before(cache: Path) -> None:
    store(report())
    with pytest.raises(UnsupportedError, match="float16"):
        require_validated(CPU, dtype=torch.float16, head_dim=32)


def test_too_little_memory_is_no_fault(cache: Path, broken: Broken, monkeypatch) -> None:
    # Once: the check is repeated with the device to itself. Always: no verdict, and nothing stored.
    def failing_times(times: int):
        def make(real):
            left = [times]

            def kernel(*args):
                left[0] -= 1
                if left[0] >= 0:
                    raise torch.OutOfMemoryError("CUDA out of memory")
                return real(*args)

            return kernel

        return make

    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (2**29, 2**30))
    with monkeypatch.context():
        broken("swiglu", failing_times(1))
        require_validated(CPU, **MODEL)
        assert load(facts(CPU))[0] is not None
    for file in cache.iterdir():
        file.unlink()
    broken("swiglu", failing_times(10**6))
    with pytest.raises(UnsupportedError, match=r"0\.5 GiB of free memory on cpu .* check swiglu"):
        require_validated(CPU, **MODEL)
    assert load(facts(CPU))[0] is None


def test_workers_that_start_at_once(cache: Path) -> None:
    code = (
        "import torch\n"
        "from isomodels.validate import require_validated, run, start\n"
        "few = {n: o for n, o in run.load_operations().items() if n in ('swiglu', 'embedding')}\n"
        "run.load_operations = start.load_operations = lambda: few\n"
        "require_validated(torch.device('cpu'), dtype=torch.float32, head_dim=32)\n"
    )
    root = Path(__file__).parents[2]
    workers = [subprocess.Popen([sys.executable, "-c", code], cwd=root) for _ in range(3)]
    assert [worker.wait(120) for worker in workers] == [0, 0, 0]
    assert len(list(cache.iterdir())) == 1


# The command


def test_the_command_keeps_a_report_and_writes_it(cache: Path, tmp_path: Path) -> None:
    file = tmp_path / "report.json"
    result = run("--device", "cpu", "--quick", "--json", file)
    assert result.exit_code == 0, result.output
    written = json.loads(file.read_text())
    assert written["passed"]
    assert written["kind"] == "quick"
    assert {"torch", "device", "isa", "kernels"} <= set(written["facts"])
    for operation in written["operations"].values():
        assert len(operation["digest"]) == 64
        assert operation["seconds"] >= 0
    kept, _ = load(facts(CPU))
    assert kept is not None
    assert "pass" in result.stdout
    assert str(cache) in result.stdout


def test_json_on_stdout_is_alone(cache: Path) -> None:
    result = run("--device", "cpu", "--quick", "--operation", "swiglu", "--json", "-")
    assert result.exit_code == 0
    assert json.loads(result.stdout)["operations"].keys() == {"swiglu"}


def test_a_fault_exits_with_1_and_is_printed(cache: Path, broken: Broken) -> None:
    broken("swiglu", wrong_by(1.1))
    result = run("--device", "cpu", "--quick")
    assert result.exit_code == 1, result.output
    assert "✗ swiglu, accuracy: float32 [33]: relative error" in result.stdout
    assert "Failed: swiglu" in result.stdout
    kept, _ = load(facts(CPU))
    assert kept is not None
    assert not kept.passed


def test_some_operations_are_no_report(cache: Path) -> None:
    result = run("--device", "cpu", "--quick", "--operation", "swiglu")
    assert result.exit_code == 0
    assert "Not kept: some operations only" in result.stdout
    assert load(facts(CPU))[0] is None


def test_a_quick_pass_does_not_replace_a_full_one(cache: Path) -> None:
    store(report("full"))
    result = run("--device", "cpu", "--quick")
    assert "the full battery passed here before" in result.stdout
    kept, _ = load(facts(CPU))
    assert kept is not None
    assert kept.kind == "full"
    store(report("full", fault="broken then"))
    run("--device", "cpu", "--quick")
    kept, _ = load(facts(CPU))
    assert kept is not None
    assert not kept.passed, "a quick pass must not hide what the full battery found"


def test_two_machines_are_compared(cache: Path, tmp_path: Path, broken: Broken) -> None:
    one, arguments = tmp_path / "one.json", ("--device", "cpu", "--quick", "--compare")
    assert run("--device", "cpu", "--quick", "--json", one).exit_code == 0
    result = run(*arguments, one)
    assert result.exit_code == 0, result.output
    assert "in every operation" in result.stdout
    broken("swiglu", wrong_by(1.0 + 2.0**-20))  # within every bound
    result = run(*arguments, one)
    assert result.exit_code == 1
    assert "Other bits than in" in result.stdout
    assert result.stdout.rstrip().endswith("swiglu.")
    one.write_text(one.read_text().replace('"backend": "torch"', '"backend": "triton"'))
    result = run(*arguments, one)
    assert result.exit_code == 2
    assert "compare two runs of one backend" in result.stderr
    one.write_text("{}")
    assert "no report of isomodels validate" in run(*arguments, one).stderr


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--device", "tpu9"), "--device tpu9: write cpu, cuda or cuda:1"),
        (("--device", "mps"), "--device mps: write cpu, cuda or cuda:1"),
        (("--device", "cpu", "--operation", "softmax"), "--operation softmax: choose one of"),
        (("--device", "cpu", "--json", "/nowhere/x.json"), "there is no folder /nowhere: make it"),
        (("--compare", "/nowhere/x.json"), "there is no report /nowhere/x.json"),
        (("--interpret", "--compare", "x.json"), "--interpret shows no bits"),
        (("--interpret", "--quick"), "--interpret runs on the CPU and has one form"),
        (("--interpret", "--device", "cuda"), "--interpret runs on the CPU and has one form"),
    ],
)
def test_bad_input(arguments: tuple, message: str, cache: Path) -> None:
    result = run(*arguments)
    assert result.exit_code == 2, result.output
    assert message in result.stderr
    assert len(result.stderr.strip().splitlines()) == 1


def test_help_teaches() -> None:
    text = run("--help").stdout
    for word in ("Exit code", "Example: isomodels validate", "digest", "--interpret", "cache"):
        assert word in text


def test_all_operations_by_name() -> None:
    assert {"linear", "rope", "attention", "paged_attention"} <= set(load_operations())
