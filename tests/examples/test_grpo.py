"""The GRPO example: its task and objective here, whole runs in the slow tests."""

import json
import os
import subprocess
import sys
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path
from types import ModuleType

import numpy as np
import pytest

ROOT = Path(__file__).parents[2]
SCRIPT = ROOT / "examples" / "grpo" / "grpo.py"


@pytest.fixture(scope="module")
def grpo() -> ModuleType:
    spec = spec_from_file_location("grpo_example", SCRIPT)
    assert spec is not None
    assert spec.loader is not None
    module = module_from_spec(spec)
    sys.modules[spec.name] = module  # dataclasses look their module up
    spec.loader.exec_module(module)
    return module


def sample(grpo: ModuleType, prompt: list[int], answer: list[int]):
    return grpo.Sample(prompt, answer, np.zeros(len(answer), np.float32), "step 0")


def test_the_reward_is_exact(grpo: ModuleType):
    prompt = [1, 2, 3, 3, 4]  # begin ( [ [ {
    right = [7, 6, 6, 5, 0]
    assert grpo.solve(prompt) == right
    assert sample(grpo, prompt, right).reward == 1.0
    for wrong in (right[:-1], [*right, 0], [7, 6, 5, 6, 0], []):
        assert sample(grpo, prompt, wrong).reward == 0.0


def test_advantages_are_of_the_group(grpo: ModuleType):
    prompt, right = [1, 2], [5, 0]
    samples = [sample(grpo, prompt, a) for a in (right, [6, 0], right, right, [0], [0], [0], [0])]
    grpo.advantages(samples, 4)
    first = np.array([s.advantage for s in samples[:4]])
    assert abs(first.mean()) < 1e-12
    assert (first > 0).tolist() == [True, False, True, True]
    assert [s.advantage for s in samples[4:]] == [0.0] * 4  # nothing to learn from


def test_a_ratio_that_is_not_one_stops(grpo: ModuleType):
    differences = np.zeros(5)
    grpo.assert_ratio_one(grpo.Update(0.0, 0.0, differences, np.exp(differences)), 3)
    differences[2] = 2.0**-24
    with pytest.raises(grpo.RatioError, match=r"step 3: 1 of 5 logprobs differ .* 6\.0e-08"):
        grpo.assert_ratio_one(grpo.Update(0.0, 0.0, differences, np.exp(differences)), 3)


def run(out: Path, *arguments: str) -> subprocess.CompletedProcess:
    small = ["--warm-up", "8", "--prompts", "4", "--group", "4", "--device", "cpu"]
    command = [sys.executable, str(SCRIPT), str(out), *small, *arguments]
    return subprocess.run(
        command,
        capture_output=True,
        text=True,
        timeout=900,
        env={**os.environ, "VLLM_LOGGING_LEVEL": "ERROR"},
        check=False,
    )


def lines(out: Path) -> list[dict]:
    log = [json.loads(line) for line in (out / "log.jsonl").read_text().splitlines()]
    return [{k: v for k, v in line.items() if k != "seconds"} for line in log]


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_a_resumed_run_has_the_bits_of_the_whole_one(tmp_path: Path):
    whole = run(tmp_path / "whole", "--steps", "4")
    assert whole.returncode == 0, whole.stderr[-3000:]
    assert [line["differ"] for line in lines(tmp_path / "whole")] == [0, 0, 0, 0]
    for arguments in (["--steps", "2"], ["--steps", "4", "--resume"]):
        part = run(tmp_path / "parts", *arguments)
        assert part.returncode == 0, part.stderr[-3000:]
    assert lines(tmp_path / "parts") == lines(tmp_path / "whole")


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_another_engine_is_seen_at_the_first_step(tmp_path: Path):
    stock = run(tmp_path / "stock", "--steps", "2", "--engine", "vllm")
    assert stock.returncode != 0
    assert "RatioError: step 0:" in stock.stderr
