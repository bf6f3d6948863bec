"""Conversions of a checkpoint of 35B parameters, whose weights are holes in sparse files.

Names, shapes, dtypes and the division into files are those of Qwen3.5-35B-A3B; every value is
zero, so that neither side takes room on the disk. What is read and written still lies in memory
as any other value would.
"""

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from isomodels.config import read_config
from isomodels.registry import load_object
from isomodels.weights_conv.rules import Tied, resolve
from tests.weights.support import write_index

CONFIG = Path(__file__).parents[1] / "data" / "configs" / "qwen3.5-35b-a3b" / "config.json"
SHARD = 5_000_000_000
ALLOWED = 3 * 2**29  # beside the largest tensor

PROGRAM = """
import os, pathlib, shutil, sys, time
from types import SimpleNamespace
import numpy as np
from isomodels.conversion import plan_conversion, run_conversion
from isomodels.stored_weights import open_weights

class Sparse:
    '''A file in which zeros are holes.'''

    def __init__(self, path):
        self.handle, self.at = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC), 0

    def write(self, data):
        data = memoryview(data).cast("B")
        for begin in range(0, len(data), 2**20):
            piece = data[begin : begin + 2**20]
            if np.frombuffer(piece, np.uint8).any():
                os.pwrite(self.handle, piece, self.at + begin)
        self.at += len(data)
        return len(data)

    def tell(self):
        return self.at

    def flush(self):
        pass

    def __enter__(self):
        return self

    def __exit__(self, *_):
        os.ftruncate(self.handle, self.at)
        os.close(self.handle)

def opened(path, mode="r", *args, **kwargs):
    sparse = mode == "wb" and path.suffix in (".safetensors", ".distcp")
    return Sparse(path) if sparse else original(path, mode, *args, **kwargs)

original, pathlib.Path.open = pathlib.Path.open, opened
shutil.disk_usage = lambda _: SimpleNamespace(free=10**12)  # holes need none

def own(field):
    with open("/proc/self/status") as status:
        (line,) = (line for line in status if line.startswith(field))
    return int(line.split()[1]) * 1024

source, out, to = sys.argv[1:]
before = own("VmRSS")
with open("/proc/self/clear_refs", "w") as peak:
    peak.write("5")  # the kernel's peak starts anew
plan = plan_conversion(open_weights(source), to=to)
begin = time.monotonic()
run_conversion(plan, out)
print(own("VmHWM") - before, plan.nbytes, time.monotonic() - begin)
"""


def published(raw: dict[str, Any]) -> dict[str, Tensor]:
    """The tensors of a published folder: experts fused, all of them bfloat16."""
    spec, config = read_config(raw)
    table = load_object(spec.weights)(config)
    fused = [rule.fused.hf_name or rule.fused.name for rule in table if hasattr(rule, "fused")]
    return {
        source.name: torch.empty(source.shape, dtype=torch.bfloat16, device="meta")
        for rule in resolve(table, fused)
        for source in rule.sources
        if not isinstance(rule, Tied)
    }


def write_sparse(folder: Path, config: dict[str, Any], tensors: Mapping[str, Tensor]) -> Path:
    """A Hugging Face folder of zeros, in files of 5 GB."""
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(config))
    shards: list[dict[str, Tensor]] = [{}]
    for name, tensor in tensors.items():
        if sum(t.nbytes for t in shards[-1].values()) + tensor.nbytes > SHARD:
            shards.append({})
        shards[-1][name] = tensor
    places = {}
    for number, shard in enumerate(shards, 1):
        file = folder / f"model-{number:05d}-of-{len(shards):05d}.safetensors"
        header, end = {}, 0
        for name, tensor in shard.items():
            places[name] = file.name
            offsets = [end, end := end + tensor.nbytes]
            header[name] = {"dtype": "BF16", "shape": list(tensor.shape), "data_offsets": offsets}
        text = json.dumps(header).encode()
        file.write_bytes(len(text).to_bytes(8, "little") + text)
        os.truncate(file, 8 + len(text) + end)
    write_index(folder, places)
    return folder


def on_disk(folder: Path) -> int:
    return sum(file.stat().st_blocks * 512 for file in folder.iterdir())


@pytest.mark.slow
@pytest.mark.timeout(9000)
@pytest.mark.parametrize(("layers", "size"), [(4, 8e9), (40, 70e9)])
def test_35b_in_both_directions(tmp_path: Path, layers: int, size: float) -> None:
    """With 4 of its 40 layers as well: a tenth of the time, and the same memory."""
    config = json.loads(CONFIG.read_text()) | {"num_hidden_layers": layers}
    tensors = published(config)
    assert sum(t.nbytes for t in tensors.values()) > size
    largest = max(t.nbytes for t in tensors.values())
    source = write_sparse(tmp_path / "hf", config, tensors)
    for path, out, to in ((source, "there", "megatron"), (tmp_path / "there", "back", "hf")):
        done = subprocess.run(
            [sys.executable, "-c", PROGRAM, str(path), str(tmp_path / out), to],
            capture_output=True,
            text=True,
            timeout=7000,
            check=False,
        )
        assert done.returncode == 0, done.stderr
        peak, written, seconds = map(float, done.stdout.split())
        print(
            f"to {to}: {written / 1e9:.1f} GB, peak {peak / 2**30:.2f} GiB, of which the largest "
            f"tensor has {largest / 2**30:.2f}; {seconds:.0f} s with the comparison"
        )
        assert largest < peak < largest + ALLOWED
        assert on_disk(tmp_path / out) < 2**28
        shutil.rmtree(path)
    shutil.rmtree(tmp_path / "back")
