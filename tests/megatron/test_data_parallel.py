"""Two ranks over gloo, each with half the batch, against one rank with two microbatches.

Both add two gradients in fp32, so the weights must agree bit for bit.
"""

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("megatron.core", reason="megatron-core is not installed")

from safetensors.torch import load_file

from tests.megatron.dp_worker import work
from tests.megatron.test_training import BATCH, assert_same

WORKER = Path(__file__).with_name("dp_worker.py")
LAUNCH = (
    *("-m", "torch.distributed.run", "--nproc-per-node=2"),
    *("--rdzv-backend=c10d", "--rdzv-endpoint=127.0.0.1:0"),
)


def run(*arguments: str) -> None:
    # a session of its own: a rank that hangs must not outlive the test
    process = subprocess.Popen(
        [sys.executable, *arguments],
        cwd=WORKER.parents[2],
        start_new_session=True,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    try:
        output, _ = process.communicate(timeout=100)
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)
        output, _ = process.communicate()
    assert process.returncode == 0, output


def test_two_ranks_train_like_one(checkpoint, tmp_path):
    path = str(checkpoint("qwen3_tied", "bf16"))
    job = {"checkpoint": path, "out": str(tmp_path), "batch": BATCH}
    for overlap in ("False", "True"):
        (tmp_path / overlap).mkdir()
    run(*LAUNCH, str(WORKER), json.dumps(job))
    for overlap in (False, True):
        work(job, overlap, 0, 1)
        out = tmp_path / str(overlap)
        scores = {file.stem: json.loads(file.read_text()) for file in out.glob("*.json")}
        assert scores.keys() == {"1_ranks_0", "2_ranks_0", "2_ranks_1"}
        assert scores["2_ranks_0"] == scores["2_ranks_1"] == scores["1_ranks_0"]
        trained = [load_file(out / f"{n}_ranks" / "model.safetensors") for n in (1, 2)]
        assert_same(*trained)
