"""Checkpoints of both architectures with random bit patterns, made once."""

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from tests.checkpoints import make_mimo, make_qwen3
from tests.weights.support import copy_checkpoint, fill_with_any_bits

KINDS = ("qwen3", "qwen3-tied", "qwen3-tied-with-head", "mimo")
SIZES = {
    "vocab_size": 1003,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "head_dim": 16,
}
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}


@pytest.fixture(scope="session")
def made(tmp_path_factory: pytest.TempPathFactory):
    """(kind, dtype name, shards) -> a checkpoint folder that no test may change."""
    root = tmp_path_factory.mktemp("made")

    def make(kind: str, dtype: str, shards: int) -> Path:
        path = root / f"{kind}-{dtype}-{shards}"
        if path.exists():
            return path
        if kind == "mimo":
            # Two MTP layers, as no released file has: the names are counted, not written down.
            make_mimo(path, DTYPES[dtype], num_nextn_predict_layers=2, **SIZES)
        else:
            make_qwen3(path, DTYPES[dtype], tied="tied" in kind, **SIZES)
        if kind == "qwen3-tied-with-head":
            file = path / "model.safetensors"
            tensors = load_file(file)
            tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"].clone()
            save_file(tensors, file, metadata={"format": "pt"})
        (path / "generation_config.json").write_text('{"do_sample": true}')
        return fill_with_any_bits(path, shards=shards)

    return make


@pytest.fixture
def changeable(made, tmp_path: Path):
    """The same, but a copy that the test may spoil."""

    def copy(kind: str = "qwen3", dtype: str = "bfloat16", shards: int = 1) -> Path:
        return copy_checkpoint(made(kind, dtype, shards), tmp_path / "checkpoint")

    return copy
