"""A conversion holds little more than the largest tensor, however large the checkpoint."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from isomodels.conversion import convert_checkpoint
from tests.checkpoints import make_qwen3_moe

# Of a 35B model: its largest tensor, 256 experts' gates, has 1.07 GB, and 1.5 GiB are allowed.
RATIO = 1 + 1.5 * 2**30 / (256 * 1024 * 2048 * 2)
SIZES = {"hidden_size": 512, "moe_intermediate_size": 256, "num_experts": 96, "vocab_size": 1024}
LAYERS = 6
LARGEST = 96 * 2 * 256 * 512 * 2
# glibc keeps freed blocks below 32 MiB for itself: as much smaller here as the tensors are.
HELD = 32 * 2**20 * LARGEST // (256 * 1024 * 2048 * 2)

PROGRAM = """
import sys, threading, time
import torch
from isomodels.conversion import plan_conversion, run_conversion
from isomodels.stored_weights import open_weights
from isomodels.weights_conv import dist_write

def own():
    with open("/proc/self/status") as status:
        (line,) = (line for line in status if line.startswith("RssAnon"))
    return int(line.split()[1]) * 1024

def watch():
    global most
    while True:
        most = max(most, own())
        time.sleep(0.001)

source, out, to, experts, small, chunk = sys.argv[1:]
dist_write._CHUNK_SIZE = int(chunk)
# Small ones first, in either form: they bring in what is imported late.
run_conversion(plan_conversion(open_weights(small), to="hf", experts="fused"), f"{out}-fused")
for name, first in (("apart", small), ("both", f"{out}-fused")):
    plan = plan_conversion(open_weights(first), to=to, experts=experts or None)
    run_conversion(plan, f"{out}-{name}")
before = most = own()
threading.Thread(target=watch, daemon=True).start()
run_conversion(plan_conversion(open_weights(source), to=to, experts=experts or None), out)
print(most - before)
"""


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """A checkpoint of many layers of one layer's weights, and a small one of the same kind."""
    root = tmp_path_factory.mktemp("memory")
    one = make_qwen3_moe(
        root / "hf", torch.bfloat16, num_hidden_layers=1, mlp_only_layers=[], **SIZES
    )
    small = make_qwen3_moe(root / "small", torch.bfloat16)
    found = load_file(one / "model.safetensors")
    for layer in range(1, LAYERS):
        for name in [n for n in found if ".layers.0." in n]:
            found[name.replace(".layers.0.", f".layers.{layer}.")] = found[name].clone()
    save_file(found, one / "model.safetensors", metadata={"format": "pt"})
    for path in (one, small):
        raw = json.loads((path / "config.json").read_text())
        raw |= {"num_hidden_layers": LAYERS} if path == one else {}
        (path / "config.json").write_text(json.dumps(raw | {"transformers_version": "5.0.0"}))
    convert_checkpoint(one, root / "megatron", to="megatron")
    convert_checkpoint(one, root / "fused", experts="fused")
    return {"hf": one, "megatron": root / "megatron", "fused": root / "fused", "small": small}


CASES = [
    ("hf", "megatron", ""),
    ("megatron", "hf", ""),
    ("hf", "hf", "fused"),
    ("fused", "hf", "apart"),
    ("fused", "megatron", ""),
    ("megatron", "hf", "fused"),
]


@pytest.mark.slow
@pytest.mark.parametrize(("form", "to", "experts"), CASES)
def test_peak_memory(folders, tmp_path, form, to, experts) -> None:
    source = folders[form]
    total = sum(file.stat().st_size for file in source.iterdir())
    assert total > 8 * LARGEST
    chunk = LARGEST // 16  # 64 MiB of a tensor of 1.07 GB
    arguments = [source, tmp_path / "out", to, experts, folders["small"], chunk]
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM, *map(str, arguments)],
        capture_output=True,
        text=True,
        timeout=280,
        check=False,
        env={**os.environ, "MALLOC_MMAP_THRESHOLD_": str(HELD)},
    )
    assert done.returncode == 0, done.stderr
    peak = int(done.stdout)
    print(f"{form} -> {to} {experts}: peak {peak / 1e6:.0f} MB, largest {LARGEST / 1e6:.0f} MB")
    assert LARGEST / 2 < peak < RATIO * LARGEST
