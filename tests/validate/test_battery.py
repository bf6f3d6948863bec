"""The battery is complete, passes on this CPU and in Triton's interpreter, and disturbs nothing."""

import json
import os
import subprocess
import sys
from importlib.util import find_spec

import pytest
import torch

from isomodels.validate.battery import Place, load_operations, missing_checks
from isomodels.validate.run import run_battery, run_in_processes
from tests.validate.conftest import QUICK


def test_no_operator_is_without_checks() -> None:
    assert missing_checks() == []


def test_a_new_operator_without_checks_is_named() -> None:
    with torch.library._scoped_library("isomodels", "FRAGMENT") as library:
        library.define("new_and_unchecked(Tensor x) -> Tensor")
        assert "new_and_unchecked: no operation covers this operator" in missing_checks()


def test_an_operation_without_a_kind_of_check_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    operations = load_operations()
    monkeypatch.delitem(operations["rope"].checks, "hazards")
    monkeypatch.delitem(operations["attention"].checks, "gradients")
    monkeypatch.setattr(operations["swiglu"], "outputs", None)
    assert {
        "rope: no check of hazards",
        "attention: no check of gradients",
        "swiglu: no outputs for the digest",
    } <= set(missing_checks())


INTERPRETS = find_spec("triton") is not None and not torch.cuda.is_available()
# Minutes in the interpreter, which `tests/kernel` runs their kernels in as well.
LONG = {"mla_attention", "paged_mla_attention", "gated_delta_rule", "paged_gated_delta_rule"}


@pytest.fixture(scope="module")
def interpreted_report(tmp_path_factory: pytest.TempPathFactory):
    """Started before the battery on the CPU, which then runs beside it."""
    file = tmp_path_factory.mktemp("interpreted") / "report.json"
    place = Place(torch.device("cpu"), interpreted=True)
    names = [n for n, op in load_operations().items() if op.runs_on(place) and n not in LONG]
    chosen = [word for name in names for word in ("--operation", name)]
    process = start_interpreted(["--json", str(file), *chosen]) if INTERPRETS else None
    yield process, file
    if process is not None and process.poll() is None:
        process.kill()


def start_interpreted(arguments: list[str]) -> subprocess.Popen:
    code = "from isomodels.cli.main import app; app()"
    command = [sys.executable, "-c", code, "validate", "--interpret", *arguments]
    return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)


@pytest.mark.timeout(900)  # a machine with other work to do
def test_the_full_battery_on_this_cpu(interpreted_report) -> None:
    outcomes = run_battery(Place(torch.device("cpu"), "full"))
    assert {n: o.checks for n, o in outcomes.items() if not o.passed} == {}
    assert all(outcome.digest for outcome in outcomes.values())
    for one, paged in (
        ("mla_attention", "paged_mla_attention"),
        ("causal_conv", "paged_causal_conv"),
    ):
        assert outcomes[one].digest == outcomes[paged].digest
    quick = run_battery(QUICK, ["rms_norm", "attention", "embedding"])
    for name, outcome in quick.items():
        assert outcome.digest == outcomes[name].digest, "the depth must not show in a digest"


@pytest.mark.skipif(not INTERPRETS, reason="no Triton, or the kernels run on the GPU itself")
@pytest.mark.timeout(900)
def test_the_triton_kernels_in_the_interpreter(interpreted_report) -> None:
    process, file = interpreted_report
    output, _ = process.communicate()
    assert process.returncode == 0, output[-3000:]
    report = json.loads(file.read_text())
    assert report["kind"] == "interpreted"
    assert report["facts"]["backend"] == "triton, interpreted"
    assert {"linear", "attention", "paged_attention", "rope_qkv"} <= set(report["operations"])
    assert "Not kept" in output


@pytest.mark.slow
@pytest.mark.skipif(not INTERPRETS, reason="no Triton, or the kernels run on the GPU itself")
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("name", sorted(LONG))
def test_the_long_ones_in_the_interpreter(name: str) -> None:
    process = start_interpreted(["--operation", name])
    output, _ = process.communicate()
    assert process.returncode == 0, output[-3000:]


@pytest.mark.skipif(not INTERPRETS, reason="no Triton, or the kernels run on the GPU itself")
def test_a_wrong_index_or_mask_shows_in_the_interpreter() -> None:
    run = subprocess.run(
        [sys.executable, "-c", MUTANTS],
        env={**os.environ, "TRITON_INTERPRET": "1"},
        capture_output=True,
        text=True,
    )
    assert run.returncode == 0, run.stderr[-3000:]
    index, mask, backward, none = (set(line.split()) for line in run.stdout.splitlines())
    assert "accuracy" in index
    assert "accuracy" in mask
    assert backward == {"gradients"}
    assert none == set()


# Prints the checks of swiglu that fail, a line for each wrong kernel, then for the right one.
MUTANTS = """
import importlib.util, sys, tempfile
from pathlib import Path
import isomodels.kernels, isomodels.kernels.swiglu_triton as module
from isomodels.validate.start import interpreted
text = Path(module.__file__).read_text()
for right, wrong in (
    ("row * stride + width + columns", "row * stride + columns"),
    ("(columns < width)", "(columns < width - 1)"),
    ("dup = grad * gate * sigmoid", "dup = grad * gate"),
    ("", ""),
):
    assert right in text
    path = Path(tempfile.mkdtemp()) / "swiglu_triton.py"
    path.write_text(text.replace(right, wrong) if right else text)
    spec = importlib.util.spec_from_file_location(module.__name__, path)
    mutant = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(mutant)
    sys.modules[module.__name__] = isomodels.kernels.swiglu_triton = mutant
    checks = interpreted(["swiglu"]).outcomes["swiglu"].checks
    print(*(name for name, fault in checks.items() if fault))
"""


def test_the_battery_disturbs_nothing(few_operations: None) -> None:
    torch.manual_seed(5)
    before, threads = torch.get_rng_state(), torch.get_num_threads()
    torch.set_default_dtype(torch.bfloat16)
    try:
        with torch.device("meta"), torch.inference_mode():
            outcomes = run_battery(QUICK)
            assert torch.is_inference_mode_enabled()
        assert torch.get_default_dtype() == torch.bfloat16
    finally:
        torch.set_default_dtype(torch.float32)
    assert all(outcome.passed for outcome in outcomes.values())
    assert torch.equal(torch.get_rng_state(), before)
    assert torch.get_num_threads() == threads


def test_in_several_processes() -> None:
    told, names = [], ["swiglu", "embedding"]
    outcomes = run_in_processes(QUICK, names, lambda *what: told.append(what))
    here = run_battery(QUICK, names)
    assert [*outcomes] == [*here]
    for name in names:
        assert outcomes[name].checks == here[name].checks
        assert outcomes[name].digest == here[name].digest
    assert sorted(told) in (
        [("embedding", 1, 2), ("swiglu", 2, 2)],
        [("embedding", 2, 2), ("swiglu", 1, 2)],
    )


def test_progress_is_told(few_operations: None) -> None:
    told = []
    run_battery(QUICK, tell=lambda what, done, total: told.append((what, done, total)))
    assert [done for _, done, _ in told] == [*range(1, len(told) + 1)]
    assert {total for _, _, total in told} == {len(told)}
    assert ("rms_norm: accuracy") in {what for what, _, _ in told}


@pytest.mark.gpu
def test_the_full_battery_on_this_gpu() -> None:
    before = torch.cuda.memory_allocated()
    outcomes = run_battery(Place(torch.device("cuda"), "full"))
    assert {n: o.checks for n, o in outcomes.items() if not o.passed} == {}
    assert torch.cuda.memory_allocated() == before
