"""Checkpoints of any form, opened as lazy mappings of Hugging Face names: their one reader.

Forms are Hugging Face folders, and Megatron's `dist_checkpointing` folders of any parallel layout,
saved from this package's model or from Megatron's own.
"""

from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor

from isomodels.checkpoint import open_checkpoint
from isomodels.config import read_config
from isomodels.errors import CheckpointError, UnsupportedError
from isomodels.registry import ArchSpec, load_object
from isomodels.weights_conv.bits import LazyTensors, dtype_name, shorten
from isomodels.weights_conv.dist_metadata import find_distributed
from isomodels.weights_conv.dist_read import DistributedFiles, ModuleTensors
from isomodels.weights_conv.files import read_tensors
from isomodels.weights_conv.fp8 import SCALE
from isomodels.weights_conv.rules import Carried, ForeignTable, Resolved, Rule, Tied, resolve
from isomodels.weights_conv.tables import JoinedTensors, SplitTensors, check_module, check_tensors

Layout = Literal["hf", "megatron", "megatron-bridge"]


@dataclass(frozen=True)
class Weights:
    """An open checkpoint of any form, as Hugging Face tensors.

    Attributes:
        path: the folder with the weights.
        layout: "hf"; "megatron", saved from this package's model; "megatron-bridge", saved from
            Megatron's own `GPTModel`.
        spec, config: the architecture and its strict config, of the dtype of the weights.
        rules: the architecture's table for the names in `tensors`.
        tensors: HF name -> tensor, lazy.
        stored: (names in the folder, HF names made of them), of a Megatron folder.
        small_files: the folder of config.json, tokenizer and the like.
        carried_over: HF names that come from `like`, since the folder lacks them.
        module: the tensors that the folder has under the module's own names; None where it has
            others.
    """

    path: Path
    layout: Layout
    spec: ArchSpec
    config: Any
    rules: tuple[Resolved, ...]
    tensors: LazyTensors
    stored: tuple[tuple[str, tuple[str, ...]], ...]
    small_files: Path
    carried_over: tuple[str, ...] = ()
    module: LazyTensors | None = None

    @property
    def files(self) -> list[str]:
        """Names of the files that hold the weights."""
        return sorted(
            entry.name
            for entry in self.path.iterdir()
            if entry.name.endswith((".safetensors", ".distcp"))
        )

    @property
    def table(self) -> tuple[Rule, ...]:
        """The architecture's table before any form of experts is chosen."""
        return load_object(self.spec.weights)(self.config)


def open_weights(path: Path | str, like: Path | str | None = None) -> Weights:
    """Open a checkpoint of any form and check everything that its headers tell.

    Args:
        path: a Hugging Face folder, a `dist_checkpointing` folder, or a training's folder of such.
        like: a Hugging Face folder with the config.json, tokenizer and so on of a Megatron
            checkpoint without; its weights give what a trainer has not: MTP layers, vision tower.

    Raises:
        ConfigError, UnsupportedError: from the config.
        CheckpointError: damaged files, or tensors that do not fit the config.
    """
    path = Path(path)
    folder = find_distributed(path)
    if folder is None:
        opened = open_checkpoint(path)
        spec, config = opened.spec, opened.config
        return Weights(path, "hf", spec, config, opened.rules, opened.tensors, (), path)
    home = _home(path, folder, like)
    spec, config = read_config(home)
    try:
        return _open_distributed(folder, home, spec, config, like)
    except CheckpointError as error:
        text = str(error)
        raise CheckpointError(text if str(folder) in text else f"{folder}: {text}") from None


def _home(path: Path, folder: Path, like: Path | str | None) -> Path:
    """The folder that has a Megatron checkpoint's config.json."""
    homes = [Path(like)] if like is not None else [folder, path]
    home = next((one for one in homes if (one / "config.json").is_file()), None)
    if home is None:
        raise CheckpointError(
            f"{homes[0]} has no config.json, which tells the architecture: give the Hugging Face "
            "folder of the model with --like"
        )
    return home


def compare_names(path: Path | str, like: Path | str | None = None) -> tuple[list[str], list[str]]:
    """(names that the architecture's table wants and a folder lacks, names that it does not know).

    Raises:
        ConfigError, UnsupportedError: from the config.
        CheckpointError: files that cannot be read.
    """
    path = Path(path)
    folder = find_distributed(path)
    if folder is not None:
        spec, config = read_config(_home(path, folder, like))
        _, module = _module_tensors(DistributedFiles(folder), spec, config)
        wanted = [rule.name for rule in module.rules if not isinstance(rule, Tied)]
        return [name for name in wanted if name not in module], sorted(module.left_over)
    found = read_tensors(path)
    spec, config = read_config(path)
    rules = resolve(load_object(spec.weights)(config), found)
    known = {s.name: isinstance(rule, Tied) for rule in rules for s in rule.sources}
    scales = {name + SCALE for name in known} if getattr(config, "fp8_block", None) else set()
    missing = [name for name, tied in known.items() if not tied and name not in found]
    return missing, sorted(found.keys() - known.keys() - scales)


def _open_distributed(
    folder: Path, home: Path, spec: ArchSpec, config: Any, like: Path | str | None
) -> Weights:
    files = DistributedFiles(folder)
    layout, module = _module_tensors(files, spec, config)
    if module.left_over:
        raise CheckpointError(
            f"{folder} holds tensors that {spec.architecture} does not have: "
            f"{shorten(module.left_over)}"
        )
    stored = check_module(module.rules, _without_absent(module, spec, config, like))
    present = [rule for rule in stored if rule.name in module]
    hf: LazyTensors = SplitTensors(present, module)
    table = resolve(load_object(spec.weights)(config), ())
    lacking = {
        source.name
        for rule in table
        if isinstance(rule, Carried)
        for source in rule.sources
        if source.name not in hf
    }
    if lacking and like is not None:
        given = open_checkpoint(like)  # which may have its experts fused
        apart = SplitTensors(table, JoinedTensors(given.rules, given.tensors))
        hf = _Completed(hf, apart, lacking)
    own = {source.name for rule in table for source in rule.sources if source.dtype}
    dtypes = {tensor.dtype for name, tensor in hf.meta().items() if name not in own}
    if len(dtypes) != 1:
        raise CheckpointError(f"the weights are {', '.join(sorted(map(dtype_name, dtypes)))}")
    (dtype,) = dtypes
    check_tensors(table, hf.meta(), dtype=dtype)
    if dtype not in (torch.float32, torch.bfloat16):
        raise UnsupportedError(f"{folder} is {dtype_name(dtype)}: float32 and bfloat16 are read")
    rows = tuple((r.name, tuple(source.name for source in r.sources)) for r in present)
    config = config.model_copy(update={"dtype": dtype_name(dtype)})
    return Weights(
        folder,
        layout,
        spec,
        config,
        table,
        hf,
        rows,
        home,
        tuple(sorted(lacking & hf.keys())),
        module if layout == "megatron" else None,
    )


def _module_tensors(
    files: DistributedFiles, spec: ArchSpec, config: Any
) -> tuple[Layout, ModuleTensors]:
    """The folder's tensors under the names of this package's model, or of Megatron's own."""
    own = resolve(load_object(spec.weights)(config), ())
    first = own[0].name
    prefixes = [n.removesuffix(first) for n in files.tensors if n.endswith(f".{first}")]
    layout: Layout
    if prefixes:
        layout, module = "megatron", ModuleTensors(files, own, min(prefixes, key=len))
    else:
        make = getattr(import_module(spec.weights.split(":")[0]), "megatron_table", None)
        if make is None:
            raise UnsupportedError(
                f"{files.path} holds none of the names of isomodels' {spec.architecture}, and "
                "Megatron's own names are not known for it"
            )
        foreign: ForeignTable = make(config)
        layout = "megatron-bridge"
        module = ModuleTensors(files, foreign.rules, aliases=foreign.aliases)
    return layout, module


def _without_absent(
    module: ModuleTensors, spec: ArchSpec, config: Any, like: Path | str | None
) -> dict[str, Tensor]:
    """Shapes of the module's tensors; of carried ones that `like` gives, those of the rules."""
    meta = dict(module.meta())
    table = resolve(load_object(spec.weights)(config), ())
    carried = {s.name for rule in table if isinstance(rule, Carried) for s in rule.sources}
    for rule in module.rules:
        if isinstance(rule, Tied) or rule.name in meta:
            continue
        if carried.issuperset(source.name for source in rule.sources):
            if like is None:
                raise CheckpointError(
                    f"{rule.name} is missing: a trainer that ran without such layers has no "
                    "weights of them: give the Hugging Face folder that has them with --like"
                )
            meta[rule.name] = torch.empty(rule.shape, device="meta")
    return meta


class _Completed(LazyTensors):
    """The tensors of one mapping, and some of another."""

    def __init__(self, tensors: LazyTensors, other: LazyTensors, names: set[str]):
        known = other.meta()
        self._tensors, self._other = tensors, other
        super().__init__(tensors.meta() | {name: known[name] for name in names & known.keys()})

    def __getitem__(self, name: str) -> Tensor:
        return self._tensors[name] if name in self._tensors else self._other[name]
