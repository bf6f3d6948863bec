"""Real widths over NCCL: every layout of trainer and engine gives the bits of one process.

As many GPUs as there are decide the layouts. Each layout runs once and dumps its bits, which are
compared as integers; engines dump steps with and without CUDA graphs.
"""

import os
import time
from pathlib import Path

import pytest
import torch

pytest.importorskip("vllm", reason="vllm is not installed")
pytest.importorskip("megatron.core", reason="megatron-core is not installed")

from tests.multi_gpu.layouts import Line, Model, run, write_report

# Folder for reports as JSON and the order of events; none by default.
REPORTS = os.environ.get("ISOMODELS_MULTI_GPU_REPORTS")

MODELS = {
    "dense": Model("qwen3-8b", {"num_hidden_layers": 2}),
    "experts": Model("qwen3-30b-a3b", {"num_hidden_layers": 2}),
    "latent": Model("glm-4.7-flash", {"num_hidden_layers": 2, "num_nextn_predict_layers": 0}),
    "hybrid": Model(
        "qwen3.5-35b-a3b",
        {"num_hidden_layers": 2, "full_attention_interval": 2, "mtp_num_hidden_layers": 0},
    ),
}
TINY = {
    "dense": Model("Qwen3ForCausalLM", {"num_hidden_layers": 2}),
    "experts": Model("Qwen3MoeForCausalLM", {"num_hidden_layers": 2}),
    "latent": Model("Glm4MoeLiteForCausalLM", {"num_hidden_layers": 2}),
    "hybrid": Model(
        "Qwen3_5MoeForCausalLM",
        {
            "num_hidden_layers": 2,
            "full_attention_interval": 2,
            "linear_num_key_heads": 2,
            "linear_num_value_heads": 4,
        },
    ),
}


def check(model: Model, folder: Path, device: str, gpus: int) -> list[Line]:
    begin, log = time.monotonic(), None
    if REPORTS:
        log = Path(REPORTS) / f"{model.name}.log"

    def say(what: str) -> None:
        text = f"{time.monotonic() - begin:6.1f} {what}\n"
        print(text, end="")
        if log:
            with log.open("a") as file:
                file.write(text)

    limit_s = float(os.environ.get("ISOMODELS_MULTI_GPU_SECONDS", "240"))

    def report(lines: list[Line]) -> None:
        if REPORTS:
            write_report(Path(REPORTS) / f"{model.name}.json", model, lines)

    lines = run(model, folder, device, gpus, limit_s=limit_s, say=say, report=report)
    for line in lines:
        assert not line.error, line
        assert line.compared > 500, line
        assert line.differ == line.routes_differ == 0, line
    return lines


@pytest.mark.multi_gpu
@pytest.mark.timeout(600)
@pytest.mark.parametrize("family", MODELS)
def test_every_layout_gives_the_bits_of_one_process(family, tmp_path):
    if torch.cuda.device_count() < 2:
        pytest.skip(f"needs two GPUs, there are {torch.cuda.device_count()}")
    lines = check(MODELS[family], tmp_path / "checkpoint", "cuda", torch.cuda.device_count())
    for line in lines:
        if line.side == "engine":
            assert line.replays > 10, line
            assert line.from_graphs > 50, line


@pytest.mark.slow
@pytest.mark.timeout(1200)
@pytest.mark.parametrize("family", TINY)
def test_the_same_over_gloo(family, tmp_path, monkeypatch):
    """The suite itself, on tiny models."""
    if torch.cuda.is_available():
        pytest.skip("the hosts of this machine run on its GPUs")
    check(TINY[family], tmp_path / "checkpoint", "cpu", 2)
