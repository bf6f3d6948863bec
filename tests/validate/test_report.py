"""Reports: what they hold, that only a sound one of this very machine counts, and their place."""

import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from isomodels.errors import CheckpointError
from isomodels.validate import device
from isomodels.validate.report import Report, cache_file, load, read_json, store
from isomodels.validate.run import Outcome

CPU = torch.device("cpu")


def report(kind: str = "full", fault: str | None = None) -> Report:
    outcomes = {"rms_norm": Outcome({"accuracy": fault, "gradients": None}, 0.5, "ab" * 32)}
    return Report(kind, device.facts(CPU), outcomes, 0.7)


def test_json_and_back() -> None:
    for one in (report(), report(fault="row 3: 1 of 9 differ"), report("quick")):
        again = read_json(json.loads(json.dumps(one.as_json())))
        assert again == one
        assert again.passed == one.passed


def test_a_report_without_checks_has_not_passed() -> None:
    assert not Report("full", {}, {}, 0.0).passed
    assert not Report("full", {}, {"rope": Outcome()}, 0.0).passed


def test_stored_and_found(cache: Path) -> None:
    here = device.facts(CPU)
    assert load(here) == (None, "this device and these versions were not validated yet")
    file = store(report())
    assert file == cache_file(here)
    assert file.parent == cache
    assert [p.name for p in cache.iterdir()] == [file.name], "no temporary file is left"
    assert load(here)[0] == report(), "the newest"
    store(report(fault="worse"))
    found, _ = load(here)
    assert found is not None
    assert not found.passed


DAMAGES = {
    "cut off": lambda text: text[: len(text) // 2],
    "empty": lambda text: "",
    "no JSON": lambda text: "passed",
    "another program's": lambda text: '{"passed": true}',
    "a list": lambda text: "[1, 2]",
    "a verdict that was edited": lambda text: text.replace('"passed": false', '"passed": true', 1),
    "an unknown format": lambda text: text.replace('"format": 1', '"format": 2'),
    "no operation left": lambda text: json.dumps({**json.loads(text), "operations": {}}),
}


@pytest.mark.parametrize("damage", DAMAGES)
def test_a_damaged_report_is_none(cache: Path, damage: str) -> None:
    file = store(report(fault="row 3 differs"))
    file.write_text(DAMAGES[damage](file.read_text()))
    found, reason = load(device.facts(CPU))
    assert found is None
    assert str(file) in reason
    assert "damaged" in reason


def test_a_report_of_another_machine_is_none(cache: Path) -> None:
    file = store(report())
    text = file.read_text().replace(torch.__version__, "2.0.0")
    file.write_text(text)
    found, reason = load(device.facts(CPU))
    assert found is None
    assert reason == f"{file} is the report of another machine or version"
    file.write_text(json.dumps({**report().as_json(), "kind": "interpreted"}))
    assert load(device.facts(CPU))[0] is None


@pytest.mark.parametrize(
    "variable", ["MKL_CBWR", "ATEN_CPU_CAPABILITY", "ONEDNN_MAX_CPU_ISA", "TRITON_PTXAS_PATH"]
)
def test_what_moves_bits_is_in_the_key(monkeypatch: pytest.MonkeyPatch, variable: str) -> None:
    before = cache_file(device.facts(CPU))
    monkeypatch.setenv(variable, "1")
    assert cache_file(device.facts(CPU)) != before


def test_the_source_of_kernels_and_battery_is_in_the_key(monkeypatch: pytest.MonkeyPatch) -> None:
    facts = device.facts(CPU)
    assert facts["torch"] == torch.__version__
    assert facts["backend"] == "torch"
    before = cache_file(facts)
    monkeypatch.setattr(device, "source_digest", lambda: "another")
    assert cache_file(device.facts(CPU)) != before


def test_every_kernel_file_counts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "a.py").write_text("one")
    monkeypatch.setattr(device, "kernel_folder", lambda: tmp_path)
    digests = [device.source_digest.__wrapped__()]
    (tmp_path / "a.py").write_text("two")
    digests.append(device.source_digest.__wrapped__())
    (tmp_path / "b.py").write_text("")
    digests.append(device.source_digest.__wrapped__())
    assert len(set(digests)) == 3


def test_a_folder_that_cannot_be_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "isomodels").write_text("a file where the folder should be")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    with pytest.raises(CheckpointError, match="cannot be written"):
        store(report())


def test_writers_at_once_leave_a_whole_report(cache: Path) -> None:
    code = (
        "from tests.validate.test_report import report, store\n"
        "for i in range(200):\n"
        "    store(report(fault=None if i % 2 else 'x' * 10000))\n"
    )
    root = Path(__file__).parents[2]
    writers = [subprocess.Popen([sys.executable, "-c", code], cwd=root) for _ in range(2)]
    read = 0
    while any(writer.poll() is None for writer in writers):
        found, reason = load(device.facts(CPU))
        assert found is not None or "not validated yet" in reason, reason
        read += found is not None
    assert [writer.returncode for writer in writers] == [0, 0]
    assert read
    assert len(list(cache.iterdir())) == 1
