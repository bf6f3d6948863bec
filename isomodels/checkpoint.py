"""Hugging Face checkpoints and the modules of this package: load, check, save.

Loading is strict and saving is its inverse: every tensor of the file is used once, and a model
that is loaded and saved again has the same tensors, bit for bit.
"""

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from isomodels.config import load_config_dict, read_config
from isomodels.errors import CheckpointError
from isomodels.registry import ArchSpec, load_object
from isomodels.weights_conv.bits import dtype_name, shorten
from isomodels.weights_conv.files import CONTRACT, TensorFiles, read_tensors
from isomodels.weights_conv.fp8 import Dequantised
from isomodels.weights_conv.rules import Carried, Resolved, resolve
from isomodels.weights_conv.tables import check_tensors, check_tied, iter_module, pinned, to_hf
from isomodels.weights_conv.write import write_checkpoint


@dataclass(frozen=True)
class Checkpoint:
    """A checkpoint folder whose config and tensor headers have passed every check.

    Attributes:
        path: the folder.
        spec, config: the architecture and its strict config.
        rules: the architecture's conversion table for this config and these names.
        tensors: HF name -> tensor, lazy; float8 weights multiplied by their scales.
    """

    path: Path
    spec: ArchSpec
    config: Any
    rules: tuple[Resolved, ...]
    tensors: TensorFiles

    @property
    def dtype(self) -> torch.dtype:
        """Dtype of the tensors."""
        return self.config.torch_dtype

    def build(
        self, *, dtype: torch.dtype | None = None, device: Any = None, carry_mtp: bool = False
    ) -> nn.Module:
        """The architecture's module for this config, uninitialised."""
        model = load_object(self.spec.model)
        return model(self.config, dtype=dtype or self.dtype, device=device, carry_mtp=carry_mtp)


def open_checkpoint(path: Path | str) -> Checkpoint:
    """Open a checkpoint folder and check everything that its headers tell.

    Raises:
        ConfigError, UnsupportedError: from the config.
        CheckpointError: damaged files, or tensors that do not fit the config.
    """
    path = Path(path)
    tensors = read_tensors(path)
    spec, config = read_config(path)
    block = getattr(config, "fp8_block", None)
    try:
        if block is not None:
            tensors = Dequantised(tensors, block, config.torch_dtype)
        rules = resolve(load_object(spec.weights)(config), tensors)
        check_tensors(rules, tensors.meta(), dtype=config.torch_dtype)
        check_tied(rules, tensors)
    except CheckpointError as error:
        raise CheckpointError(f"{path}: {error}") from None
    return Checkpoint(path, spec, config, rules, tensors)


def load_checkpoint(
    path: Path | str,
    *,
    dtype: torch.dtype | None = None,
    device: torch.device | str | None = None,
    carry_mtp: bool = False,
    cast: bool = False,
) -> nn.Module:
    """Build a checkpoint's module and fill it.

    Args:
        path: checkpoint folder.
        dtype: dtype of the module; None: that of the file.
        device: where to place it.
        carry_mtp: keep the tensors that are only carried, so that the module can be saved.
        cast: allow a `dtype` that the file does not have, and round to it.

    Raises:
        ConfigError, UnsupportedError, CheckpointError: as `open_checkpoint`, or dtypes differ.
    """
    checkpoint = open_checkpoint(path)
    module = checkpoint.build(dtype=dtype, device=device, carry_mtp=carry_mtp)
    _fill(module, checkpoint, cast)
    return module


def load_into(module: nn.Module, path: Path | str, *, cast: bool = False) -> None:
    """Fill an existing module from a checkpoint; on an error the module keeps its values.

    Args:
        module: a module of this package.
        path: checkpoint folder.
        cast: allow a module of another dtype than the file, and round to it.

    Raises:
        ConfigError, UnsupportedError, CheckpointError: as `open_checkpoint`, or the module has
            another config or dtype than the file.
    """
    checkpoint = open_checkpoint(path)
    _same_config(module, checkpoint)
    _fill(module, checkpoint, cast)


def save_checkpoint(
    module: nn.Module,
    out_dir: Path | str,
    *,
    like: Path | str,
    max_shard_size: int | None = None,
    contract: str | None = None,
    progress: Callable[[int], None] | None = None,
) -> None:
    """Write a module as a Hugging Face checkpoint.

    The names, the division into files (unless `max_shard_size` is given), config, tokenizer and
    generation files are those of `like`; config.json gets the module's dtype. A save that is
    killed leaves what was at `out_dir` whole.

    Args:
        module: a module of this package, on any device.
        out_dir: folder to write; may be `like` itself.
        like: checkpoint folder the module was loaded from.
        max_shard_size: bytes a file may have.
        contract: what the folder states of these weights, as JSON; that of `like` is another's.
        progress: called with the number of bytes after each file.

    Raises:
        CheckpointError: the module does not fit `like` or the folder cannot be written.
    """
    checkpoint = open_checkpoint(like)
    _same_config(module, checkpoint)
    state = module.state_dict()
    lost = {r.name for r in checkpoint.rules if isinstance(r, Carried)} - state.keys()
    if lost:
        raise CheckpointError(
            f"the module was loaded without {shorten(lost)}, which a save must keep: "
            "load it with carry_mtp=True"
        )
    hf = to_hf(checkpoint.rules, state, optional=checkpoint.tensors.keys())
    check_tensors(checkpoint.rules, hf)
    dtype = _module_dtype(checkpoint, state)
    stated = {} if contract is None else {CONTRACT: contract}
    write_checkpoint(
        out_dir,
        hf,
        like=checkpoint.tensors,
        max_shard_size=max_shard_size,
        files=config_file(checkpoint.path, dtype) | stated,
        progress=progress,
    )


def _same_config(module: nn.Module, checkpoint: Checkpoint) -> None:
    config: Any = module.config
    ours, theirs = config.model_dump(), checkpoint.config.model_dump()
    # The dtype may differ: a cast was asked for, or is refused by name later.
    different = [
        f"{field} ({ours.get(field)} and {theirs.get(field)})"
        for field in ours.keys() | theirs.keys()
        if field != "dtype" and ours.get(field) != theirs.get(field)
    ]
    if different:
        raise CheckpointError(
            f"the module and {checkpoint.path} have different configs: {shorten(different)}"
        )


@torch.no_grad()
def _fill(module: Any, checkpoint: Checkpoint, cast: bool) -> None:
    state = module.state_dict()
    if any(tensor.is_meta for tensor in state.values()):
        raise ValueError("the module is on the meta device: a copy to it does nothing")
    dtype = _module_dtype(checkpoint, state)
    if dtype != checkpoint.dtype and not cast:
        asked = dtype_name(dtype)
        raise CheckpointError(
            f"{checkpoint.path} is {dtype_name(checkpoint.dtype)}, {asked} was asked for: "
            "ask for a cast, or convert the checkpoint first"
        )
    carried = any(isinstance(rule, Carried) and rule.name in state for rule in checkpoint.rules)
    filled = set()
    device = next(iter(state.values())).device  # where putting experts together is fast
    tensors = iter_module(checkpoint.rules, checkpoint.tensors, carried=carried, device=device)
    for own, part in module.own_tensors(tensors):
        state[own].copy_(part)
        filled.add(own)
    if filled != state.keys():
        raise ValueError(f"no rule fills {shorten(state.keys() - filled)}")


def _module_dtype(checkpoint: Checkpoint, state: Mapping[str, Tensor]) -> torch.dtype:
    """The one dtype of a module's tensors, beside those whose dtype the rules pin.

    Raises:
        CheckpointError: naming the tensors of another dtype.
    """
    own = pinned(checkpoint.rules)
    dtypes = {tensor.dtype for name, tensor in state.items() if name not in own}
    wrong = [
        f"{name} is {dtype_name(state[name].dtype)} instead of {dtype_name(dtype)}"
        for name, dtype in own.items()
        if name in state and state[name].dtype != dtype
    ]
    if len(dtypes) != 1:
        wrong.append(f"parameters are {', '.join(sorted(map(dtype_name, dtypes)))}")
    if wrong:
        raise CheckpointError(
            f"the module was cast in part or beyond what {checkpoint.path} allows: {shorten(wrong)}"
        )
    return dtypes.pop()


def config_file(folder: Path, dtype: torch.dtype) -> dict[str, str]:
    """config.json of plain weights in a dtype; nothing where a folder's own says so already.

    Raises:
        ConfigError: the folder has no config.json.
    """
    raw = load_config_dict(folder)
    before = json.dumps(raw)
    for section in (raw, raw.get("text_config"), raw.get("vision_config")):
        for key in ("dtype", "torch_dtype"):
            if isinstance(section, dict) and section.get(key) is not None:
                section[key] = dtype_name(dtype)
    raw.pop("quantization_config", None)
    return {} if json.dumps(raw) == before else {"config.json": json.dumps(raw, indent=2) + "\n"}
