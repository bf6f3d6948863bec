"""The models of the engine rows: configs at any depth, and checkpoints of random weights."""

import json
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from benchmarks import qwen3_8b
from isomodels.parity.checkpoints import random_checkpoint

# On Hopper vLLM takes FlashInfer's delta rule, whether FlashInfer is installed or not.
STOCK_HYBRID = {} if find_spec("flashinfer") else {"gdn_prefill_backend": "triton"}
CONFIGS = Path(__file__).parent.parent / "tests" / "data" / "configs"


@dataclass(frozen=True)
class Served:
    """A model that both contestants serve.

    Attributes:
        row: of the table.
        name: in the table.
        layers: depth in the table.
        config: content of config.json at a depth.
        write: writes a checkpoint of that config at a path that does not exist yet.
        requests: how many are served at a time.
        stock: arguments of vLLM that its own class alone gets.
    """

    row: str
    name: str
    layers: int
    config: Callable[[int], dict[str, Any]]
    write: Callable[[Path, dict[str, Any]], object]
    requests: int = 256
    stock: dict[str, Any] = field(default_factory=dict)

    def shape(self, layers: int) -> str:
        """Name and depth."""
        return f"{self.name}, {layers} layers"


def _at_depth(name: str, mtp: str, layers: int) -> dict[str, Any]:
    """A released config at a depth, without the MTP layers: neither contestant computes with them.

    `mtp`: the field that counts those.
    """
    raw = json.loads((CONFIGS / name / "config.json").read_text())
    return {**raw, "num_hidden_layers": layers, mtp: 0}


def _draw(folder: Path, raw: dict[str, Any]) -> None:
    random_checkpoint(folder, raw, "bfloat16", 0, "cuda")


MODELS = {
    "qwen3-8b": Served(
        "engine",
        "Qwen3-8B",
        36,
        qwen3_8b.config,
        lambda folder, raw: qwen3_8b.write_checkpoint(folder, raw, "cuda"),
    ),
    # 12 of 47 layers: the weights of all would take minutes to write and to read
    "glm-4.7-flash": Served(
        "engine moe",
        "GLM-4.7-Flash",
        12,
        partial(_at_depth, "glm-4.7-flash", "num_nextn_predict_layers"),
        _draw,
    ),
    # 8 of 40 layers, for the same reason: two of full attention among six recurrent ones
    "qwen3.5-35b-a3b": Served(
        "engine hybrid",
        "Qwen3.5-35B-A3B",
        8,
        partial(_at_depth, "qwen3.5-35b-a3b", "mtp_num_hidden_layers"),
        _draw,
        requests=128,
        stock=STOCK_HYBRID,
    ),
}
