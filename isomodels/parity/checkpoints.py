"""Random checkpoints, made from an architecture's own conversion table."""

import hashlib
import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from isomodels.config import read_config
from isomodels.layers.hybrid_config import HybridConfig
from isomodels.registry import get_spec, load_object
from isomodels.weights_conv.rules import Tied, resolve
from isomodels.weights_conv.write import write_checkpoint

_LOGIT_SPREAD = 3.0  # standard deviation of the logits: flat ones would hide a last bit


def tiny_config(architecture: str) -> dict[str, Any]:
    """Content of a small config.json without its dtype.

    Raises:
        UnsupportedError: for an architecture that isomodels does not have.
    """
    return dict(load_object(get_spec(architecture).tiny))


def random_checkpoint(
    path: Path, raw: Mapping[str, Any], dtype: str, seed: int, device: str = "cpu"
) -> Path:
    """Write a checkpoint with random weights, whose logits spread like a trained model's.

    Args:
        path: folder to write.
        raw: content of config.json; its dtype is replaced.
        dtype: "float32" or "bfloat16".
        seed: of the weights.
        device: where they are drawn; each kind of device draws other weights.

    Returns:
        `path`.

    Raises:
        ConfigError, UnsupportedError: for a config that isomodels cannot run.
        CheckpointError: the folder cannot be written.
    """
    generator = torch.Generator(device).manual_seed(seed)
    raw = {k: v for k, v in raw.items() if k != "torch_dtype"} | {"dtype": dtype}
    try:
        return draw_checkpoint(path, raw, drawing(read_config(raw)[1], generator))
    finally:
        torch.cuda.empty_cache()  # the hosts need the room


def drawing(config: Any, generator: torch.Generator) -> Callable[[str, tuple[int, ...]], Tensor]:
    """The function that draws a tensor of a model, by its name and shape, in fp32.

    Args:
        config: of the model.
        generator: on the device where it shall be.
    """
    # their norms multiply with 1 + weight, but for the gated one
    centred = isinstance(config, HybridConfig)

    def draw(name: str, shape: tuple[int, ...]) -> Tensor:
        x = _draw(name, shape, generator)
        shifted = centred and "norm" in name and not name.endswith("linear_attn.norm.weight")
        return x - 1.0 if shifted else x

    return draw


@torch.no_grad()
def draw_weights(core: nn.Module, seed: int) -> None:
    """Fill a module where it lies: the same values on every device of a kind.

    Each tensor has a generator of its own, of seed and name, so that no order matters. Stacked
    experts are drawn one by one: all of them in fp32 might not fit.
    """
    for name, tensor in core.state_dict().items():
        digest = hashlib.sha256(f"{seed} {name}".encode()).digest()
        generator = torch.Generator(tensor.device)
        generator.manual_seed(int.from_bytes(digest[:7], "little"))
        draw = drawing(core.config, generator)
        for part in tensor if tensor.dim() == 3 else [tensor]:
            part.copy_(draw(name, tuple(part.shape)))
    torch.cuda.empty_cache()  # of the largest tensors, in fp32


def draw_checkpoint(
    path: Path, raw: Mapping[str, Any], draw: Callable[[str, tuple[int, ...]], Tensor]
) -> Path:
    """Write a checkpoint of a config, its tensors drawn one by one in the order of the rules.

    Args:
        path: folder to write.
        raw: content of config.json.
        draw: HF name and shape -> values, which are rounded to the config's dtype, or to the
            tensor's own where it has one.

    Returns:
        `path`.
    """
    spec, config = read_config(raw)
    tensors = {
        source.name: draw(source.name, source.shape).to(source.dtype or config.torch_dtype).cpu()
        for rule in resolve(load_object(spec.weights)(config), ())
        if not isinstance(rule, Tied)
        for source in rule.sources
    }
    write_checkpoint(path, tensors, files={"config.json": json.dumps(raw, indent=2)})
    return path


def _draw(name: str, shape: tuple[int, ...], generator: torch.Generator) -> Tensor:
    normal = torch.randn(shape, generator=generator, device=generator.device)
    if name.endswith("A_log"):
        return 1.5 * normal - 1.0  # from heads that forget within a token to such that do not
    if len(shape) == 1:
        if name.endswith("e_score_correction_bias"):
            return 0.1 * normal  # beside scores of the same spread
        return 0.3 * normal if name.endswith(".bias") else 1.0 + 0.2 * normal
    gain = _LOGIT_SPREAD if "embed_tokens" in name or "lm_head" in name else 1.0
    return normal * (gain / shape[-1] ** 0.5)
