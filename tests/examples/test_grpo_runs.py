"""Whole runs of the GRPO example, with the real engine."""

import json
import os
import random
import re
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path

import psutil
import pytest

from isomodels.parity.checkpoints import random_checkpoint, tiny_config
from tests.examples.conftest import SCRIPT

pytestmark = [pytest.mark.slow, pytest.mark.timeout(1800)]

SMALL = ["--prompts", "4", "--group", "8", "--device", "cpu"]
ENVIRONMENT = {**os.environ, "VLLM_LOGGING_LEVEL": "ERROR"}


@pytest.fixture(scope="module")
def base(grpo, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model that is right now and then."""
    return grpo.make_base(tmp_path_factory.mktemp("base"), "bfloat16", 60)


def command(base: Path, out: Path, *arguments: str, script: Sequence[str] = ()) -> list[str]:
    given = ["--checkpoint", str(base), *SMALL, *arguments]
    return [sys.executable, *(script or [str(SCRIPT)]), str(out), *given]


def run(
    base: Path, out: Path, *arguments: str, script: Sequence[str] = ()
) -> subprocess.CompletedProcess:
    return subprocess.run(
        command(base, out, *arguments, script=script),
        capture_output=True,
        text=True,
        timeout=900,
        env=ENVIRONMENT,
        check=False,
    )


def lines(out: Path) -> list[dict]:
    log = out / "log.jsonl"
    read = [json.loads(line) for line in log.read_text().splitlines()] if log.exists() else []
    return [{k: v for k, v in line.items() if k != "seconds"} for line in read]


@pytest.fixture(scope="module")
def whole(base: Path, tmp_path_factory: pytest.TempPathFactory) -> list[dict]:
    """The log of an uninterrupted run that learns."""
    out = tmp_path_factory.mktemp("whole")
    done = run(base, out, "--steps", "5")
    assert done.returncode == 0, done.stderr[-3000:]
    log = lines(out)
    assert [line["differ"] for line in log] == [0] * 5
    assert sum(line["grad_norm"] > 0 for line in log) >= 3
    return log


@pytest.mark.parametrize("seed", [0, 1])
def test_a_killed_run_goes_on_with_the_bits_of_the_whole_one(
    base: Path, whole: list[dict], tmp_path: Path, seed: int
):
    source = random.Random(seed)
    steps, moment = source.randint(1, 3), source.uniform(0.0, 0.4)
    with subprocess.Popen(
        command(base, tmp_path, "--steps", "5"),
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        env=ENVIRONMENT,
    ) as process:
        deadline = time.monotonic() + 600
        while len(lines(tmp_path)) < steps:
            assert process.poll() is None
            assert time.monotonic() < deadline
            time.sleep(0.01)
        time.sleep(moment)  # at any moment of the step that follows
        engine = psutil.Process(process.pid).children(recursive=True)
        process.kill()
    assert engine
    _, alive = psutil.wait_procs(engine, timeout=30)
    assert not alive
    assert len(lines(tmp_path)) < 5
    rest = run(base, tmp_path, "--steps", "5", "--resume")
    assert rest.returncode == 0, rest.stderr[-3000:]
    assert lines(tmp_path) == whole


# Calls of a run, of which the number given is in its second or third step, or before its first.
MOMENTS = {
    "before the first step": ("grpo:Rollouts.sample", 1),
    "in the first sync": ("isomodels.vllm:LLMSyncClient.update_weights", 1),
    "before the line of the log": ("grpo:describe", 2),
    "between the log and the save": ("grpo:Policy.save", 2),
    "in the first save": ("isomodels.weights_conv.write:_sync_tree", 1),
    "in a save": ("isomodels.weights_conv.write:_replace", 2),
    "in a sync, before the engine changes": ("isomodels.vllm:LLMSyncClient.update_weights", 3),
    "in a sync, after it": ("isomodels.vllm:LLMSyncClient.finish_weight_update", 3),
}


@pytest.mark.parametrize("moment", MOMENTS)
def test_a_run_killed_at_an_odd_moment_goes_on(
    base: Path, whole: list[dict], tmp_path: Path, moment: str
):
    where, number = MOMENTS[moment]
    runner = [str(Path(__file__).with_name("killed_at.py")), where, str(number)]
    killed = run(base, tmp_path, "--steps", "5", script=runner)  # waits for its engine, too
    assert killed.returncode == -signal.SIGKILL, killed.stderr[-3000:]
    assert len(lines(tmp_path)) < 5
    rest = run(base, tmp_path, "--steps", "5", "--resume")
    assert rest.returncode == 0, rest.stderr[-3000:]
    assert lines(tmp_path) == whole
    assert {entry.name for entry in tmp_path.iterdir()} == {"log.jsonl", "options.json", "state"}


@pytest.mark.parametrize("architecture", ["MiMoForCausalLM", "Qwen3_5MoeForCausalLM"])
def test_a_model_of_another_architecture(tmp_path: Path, architecture: str):
    raw = tiny_config(architecture)
    checkpoint = random_checkpoint(tmp_path / "checkpoint", raw, "bfloat16", seed=0)
    done = run(checkpoint, tmp_path / "out", "--steps", "2")
    assert done.returncode == 0, done.stderr[-3000:]
    assert [line["differ"] for line in lines(tmp_path / "out")] == [0, 0]


def test_one_step_behind(base: Path, tmp_path: Path):
    done = run(base, tmp_path, "--steps", "4", "--behind", "1")
    assert done.returncode == 0, done.stderr[-3000:]  # every recomputed ratio was 1
    log = lines(tmp_path)
    assert [line["weights"] for line in log] == ["step 0", "step 0", "step 1"]
    assert log[0]["differ"] == 0
    assert all(line["mean_difference"] > 0 for line in log[1:])


def test_another_engine_is_seen_at_the_first_step(base: Path, tmp_path: Path):
    stock = run(base, tmp_path, "--steps", "2", "--engine", "vllm")
    assert stock.returncode != 0
    found = re.search(
        r"RatioError: step 0: (\d+) of (\d+) logprobs differ between engine and trainer, "
        r"on average by (\S+), at most by (\S+)\n",
        stock.stderr,
    )
    assert found is not None, stock.stderr[-3000:]
    differ, compared, mean, largest = map(float, found.groups())
    assert compared / 2 < differ <= compared
    assert 1e-5 < mean < largest < 1.0
    assert lines(tmp_path) == []


def test_another_schedule_stops_before_the_first_sync(base: Path, tmp_path: Path):
    runner = [str(Path(__file__).with_name("other_schedule.py")), "attention", "kv_block"]
    done = run(base, tmp_path, "--steps", "2", script=runner)
    assert done.returncode != 0
    assert "weights were sent" not in done.stderr
    named = (
        r"ContractError: trainer and engine differ in numerical_policy \(trainer against engine\): "
        r"numerical_policy\.schedules\.attention\.constants\.kv_block: (\d+) against (\d+)"
    )
    found = re.search(named, done.stderr)
    assert found is not None, done.stderr[-3000:]
    assert int(found[1]) == int(found[2]) + 1
    assert lines(tmp_path) == []


def test_the_stock_pair(base: Path, tmp_path: Path):
    done = run(base, tmp_path, "--steps", "2", script=[str(SCRIPT.with_name("stock.py"))])
    assert done.returncode == 0, done.stderr[-3000:]
    log = lines(tmp_path)
    assert [line["weights"] for line in log] == ["step 0", "step 1"]
    assert all(line["differ"] > line["tokens"] / 2 for line in log)
    picture = tmp_path / "picture.svg"
    plot = [sys.executable, str(SCRIPT.with_name("plot.py")), str(picture), f"stock={tmp_path}"]
    subprocess.run(plot, check=True, timeout=120)
    assert "stock" in picture.read_text()
