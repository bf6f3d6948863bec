"""Random checkpoints, made from an architecture's own conversion table."""

import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor

from isomodels.config import read_config
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
    generator = torch.Generator().manual_seed(seed)
    return draw_checkpoint(path, raw, lambda name, shape: _draw(name, shape, generator))


def draw_checkpoint(
    path: Path, raw: Mapping[str, Any], draw: Callable[[str, tuple[int, ...]], Tensor]
) -> Path:
    """Write a checkpoint of a config, its tensors drawn one by one in the order of the rules.

    Args:
        path: folder to write, made if absent.
        raw: content of config.json.
        draw: HF name and shape -> values, which are rounded to the config's dtype.

    Returns:
        `path`.
    """
    spec, config = read_config(raw)
    tensors = {
        source.name: draw(source.name, source.shape).to(config.torch_dtype)
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
