"""Checkpoints that parity makes for itself: random ones, and casts of a given one."""

import json
from pathlib import Path

import torch
from safetensors.torch import save_file
from torch import Tensor

from isomodels.config import DTYPES, read_config
from isomodels.registry import get_spec, load_object
from isomodels.weights_conv.rules import Tied

_LOGIT_SPREAD = 3.0  # standard deviation of the logits: flat ones would hide a last bit


def random_checkpoint(path: Path, architecture: str, dtype: str, seed: int) -> Path:
    """Write a tiny checkpoint with random weights.

    Args:
        path: folder to write, made if absent.
        architecture: HF class name.
        dtype: "float32" or "bfloat16".
        seed: of the weights.

    Returns:
        `path`.

    Raises:
        UnsupportedError: for an architecture that isomodels does not have.
    """
    raw = {**load_object(get_spec(architecture).tiny), "dtype": dtype}
    spec, config = read_config(raw)
    generator = torch.Generator().manual_seed(seed)
    tensors = {
        source.name: _draw(source.name, source.shape, generator).to(DTYPES[dtype])
        for rule in load_object(spec.weights)(config)
        if not isinstance(rule, Tied)
        for source in rule.sources
    }
    path.mkdir(parents=True, exist_ok=True)
    (path / "config.json").write_text(json.dumps(raw, indent=2))
    save_file(tensors, path / "model.safetensors", metadata={"format": "pt"})
    return path


def _draw(name: str, shape: tuple[int, ...], generator: torch.Generator) -> Tensor:
    normal = torch.randn(shape, generator=generator)
    if len(shape) == 1:
        return 0.3 * normal if name.endswith(".bias") else 1.0 + 0.2 * normal
    gain = _LOGIT_SPREAD if "embed_tokens" in name or "lm_head" in name else 1.0
    return normal * (gain / shape[1] ** 0.5)


def cast_checkpoint(source: Path, path: Path, dtype: str) -> Path:
    """Write a copy of a checkpoint in another dtype; tokenizer files come along."""
    from isomodels.checkpoint import convert_checkpoint

    convert_checkpoint(source, path, dtype=DTYPES[dtype])
    return path
