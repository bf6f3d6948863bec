"""Checkpoints from one form into another: Hugging Face folders and Megatron's distributed ones.

Every form is read as a lazy mapping of Hugging Face names (`stored_weights`), and written from one,
so that memory holds little more than the largest tensor.
"""

import json
import os
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor

from isomodels.checkpoint import config_file
from isomodels.config import read_config
from isomodels.errors import CheckpointError, UnsupportedError
from isomodels.registry import ArchSpec
from isomodels.stored_weights import Weights, open_weights
from isomodels.weights_conv.bits import CastTensors, LazyTensors, same_bits, shorten
from isomodels.weights_conv.dist_write import write_distributed
from isomodels.weights_conv.files import CONTRACT, TensorFiles
from isomodels.weights_conv.rules import Either, Resolved, Tied, Widened, resolve
from isomodels.weights_conv.tables import JoinedTensors, SplitTensors
from isomodels.weights_conv.write import check_place, copy_small_files, place, write_checkpoint

Form = Literal["hf", "megatron"]
Experts = Literal["apart", "fused"]
Progress = Callable[[int], None]
PREFIX = "core."  # of the module's names in the state dict of `IsoLanguageModel`


class _Prefixed(LazyTensors):
    """The tensors of a mapping under longer names."""

    def __init__(self, tensors: LazyTensors, prefix: str):
        super().__init__({prefix + name: tensor for name, tensor in tensors.meta().items()})
        self._tensors, self._length = tensors, len(prefix)

    def __getitem__(self, name: str) -> Tensor:
        return self._tensors[name[self._length :]]


@dataclass(frozen=True)
class Plan:
    """A conversion that has passed every check which needs no tensor.

    Attributes:
        source: what is read.
        to: the form that is written.
        dtype: of the tensors without a dtype of their own.
        rules: the table for the Hugging Face names that are written.
        hf: what is read, cast.
        tensors: what is written, under the names in the folder.
    """

    source: Weights
    to: Form
    dtype: torch.dtype
    rules: tuple[Resolved, ...]
    hf: LazyTensors
    tensors: LazyTensors

    @property
    def nbytes(self) -> int:
        """Bytes of the tensors that are written."""
        return sum(tensor.nbytes for tensor in self.tensors.meta().values())

    @property
    def exact(self) -> bool:
        """Whether no tensor is rounded or widened."""
        return self.dtype == self.source.config.torch_dtype

    def written_config(self) -> tuple[ArchSpec, Any]:
        """The architecture and config of what is written."""
        files = config_file(self.source.small_files, self.dtype)
        if not files:
            return self.source.spec, self.source.config
        return read_config(json.loads(files["config.json"]))

    def mappings(self) -> list[tuple[tuple[str, ...], tuple[str, ...]]]:
        """(names that are read, names that are written), each tensor that is written once."""
        if self.to == "megatron":
            stored = [rule for rule in self.rules if not isinstance(rule, Tied)]
            return [
                (self._read([source.name for source in rule.sources]), (PREFIX + rule.name,))
                for rule in stored
            ]
        if isinstance(self.tensors, SplitTensors):
            rules = {r.name: r for r in self.source.rules if not isinstance(r, Tied)}
            return [
                (
                    self._read([source.name for source in rules[rule.name].sources]),
                    tuple(source.name for source in rule.sources),
                )
                for rule in self.rules
                if not isinstance(rule, Tied)
            ]
        if self.source.layout == "hf":
            return [((name,), (name,)) for name in self.tensors]
        carried = [(name, (name,)) for name in self.source.carried_over]
        return [((name,), names) for name, names in (*self.source.stored, *carried)]

    def _read(self, names: list[str]) -> tuple[str, ...]:
        of = {name: one for one, made in self.source.stored for name in made}
        return tuple(dict.fromkeys(of.get(name, name) for name in names))


def plan_conversion(
    source: Weights,
    *,
    to: Form,
    dtype: torch.dtype | None = None,
    experts: Experts | None = None,
) -> Plan:
    """What a conversion will read and write.

    Args:
        source: an open checkpoint.
        to: "hf", or "megatron" for a `dist_checkpointing` folder of `IsoLanguageModel`.
        dtype: round to this dtype; None: keep the source's.
        experts: of "hf": each expert's matrices apart, or all in one tensor; None: as in a
            Hugging Face source, else apart.

    Raises:
        CheckpointError: fused experts whose layout nothing in config.json would tell.
        UnsupportedError: a form of experts is asked of a model that has none.
    """
    target = dtype or source.config.torch_dtype
    kept = {s.name for rule in source.rules for s in rule.sources if s.dtype}
    hf = CastTensors(source.tensors, target, kept)
    if to == "megatron":
        tensors: LazyTensors = _Prefixed(JoinedTensors(source.rules, hf), PREFIX)
        return Plan(source, to, target, source.rules, hf, tensors)
    if experts is None:
        return Plan(source, to, target, source.rules, hf, hf)
    table = source.table
    fused = [rule.fused.hf_name or rule.fused.name for rule in table if isinstance(rule, Either)]
    if not fused:
        raise UnsupportedError(
            f"--experts {experts}: {source.spec.architecture} has no experts: leave it out"
        )
    rules = resolve(table, fused if experts == "fused" else ())
    if rules == source.rules:
        return Plan(source, to, target, rules, hf, hf)
    return Plan(source, to, target, rules, hf, SplitTensors(rules, JoinedTensors(source.rules, hf)))


def run_conversion(
    plan: Plan,
    out_dir: Path | str,
    *,
    max_shard_size: int | None = None,
    verify: bool = True,
    contract: str | None = None,
    progress: Progress | None = None,
    verified: Progress | None = None,
) -> Weights:
    """Write what was planned; the folder takes its place only when it is whole and checked.

    Args:
        plan: from `plan_conversion`.
        out_dir: folder to write; not the source. A checkpoint of the same form is replaced.
        max_shard_size: bytes a file may have; None: the source's division into files, or 5 GB.
        verify: read the written tensors back and compare every bit with the source.
        contract: what the new folder states of its weights, as JSON; None: what the source does,
            unless they are rounded.
        progress, verified: called with the number of bytes after each tensor that is written, and
            after each that is compared.

    Returns:
        The written checkpoint.

    Raises:
        CheckpointError: the folder cannot be written, or does not hold what the source does.
    """
    source = plan.source
    check_destination(plan, out_dir)
    files = config_file(source.small_files, plan.dtype)
    contract = contract or _carried_contract(plan)
    if contract is not None:
        files[CONTRACT] = contract

    def check(folder: Path) -> None:
        _check_written(plan, open_weights(folder), out_dir, verify, verified or (lambda _: None))

    if plan.to == "megatron":

        def fill(folder: Path) -> None:
            write_distributed(
                folder,
                plan.tensors,
                max_shard_size=max_shard_size,
                progress=progress or (lambda _: None),
            )
            copy_small_files(source.small_files, folder, files)

        place(out_dir, fill, size=plan.nbytes, beside=source.path, check=check, distributed=True)
    else:
        like = source.tensors if isinstance(source.tensors, TensorFiles) else None
        if like is not None and like.keys() != plan.tensors.keys():
            like = None
        write_checkpoint(
            out_dir,
            plan.tensors,
            like=like,
            small_files=source.small_files,
            max_shard_size=max_shard_size,
            files=files,
            progress=progress,
            check=check,
        )
    return open_weights(out_dir)


def check_destination(plan: Plan, out_dir: Path | str) -> None:
    """Refuse a folder that cannot be written, as far as can be told without writing.

    Raises:
        CheckpointError: naming the folder and the reason.
    """
    source = plan.source
    if os.path.realpath(out_dir) == os.path.realpath(source.path):
        raise CheckpointError(f"{out_dir} is the source itself: give another folder")
    check_place(out_dir, source.path, distributed=plan.to == "megatron")


def _carried_contract(plan: Plan) -> str | None:
    file = plan.source.path / CONTRACT
    return file.read_text() if plan.exact and file.is_file() else None


def _check_written(
    plan: Plan, written: Weights, out_dir: Path | str, verify: bool, verified: Progress
) -> None:
    """Compare what was written with the source, in the names and the form of the source."""
    if plan.tensors.keys() != _names(written, plan).keys():
        raise CheckpointError(f"{out_dir} read back has other tensors")
    if not verify:
        return
    back: LazyTensors = written.tensors
    rules = plan.source.rules
    if written.rules != rules:  # experts in another form
        # of the module itself where there is one: to part and join it again takes its size twice
        module = written.module or JoinedTensors(written.rules, written.tensors)
        back = SplitTensors(rules, module)
    if isinstance(plan.tensors, SplitTensors):
        plan.tensors.let_go()  # what was written last would lie in memory beside what is compared
    different = []
    for rule in rules:
        for name in (source.name for source in rule.sources):
            if name not in plan.hf or (isinstance(rule, Tied) and name not in back):
                continue
            expected, found = plan.hf[name], back[name]
            if plan.to == "megatron" and isinstance(rule, Widened):
                expected = expected.to(rule.dtype)
            if not same_bits(expected, found):
                different.append(name)
            verified(found.nbytes)
            del expected, found  # parts of a large tensor: let go of it before the next is read
    if different:
        raise CheckpointError(f"{out_dir} read back differs in {shorten(different)}")


def _names(written: Weights, plan: Plan) -> dict[str, None]:
    if plan.to == "megatron":
        return {PREFIX + name: None for name, _ in written.stored}
    return dict.fromkeys(written.tensors)


def convert_checkpoint(
    source: Weights | Path | str,
    out_dir: Path | str,
    *,
    to: Form = "hf",
    dtype: torch.dtype | None = None,
    experts: Experts | None = None,
    like: Path | str | None = None,
    max_shard_size: int | None = None,
) -> Weights:
    """Convert a checkpoint and compare what was written with the source, bit by bit.

    Args:
        source: a checkpoint's folder, or one that is open.
        out_dir: folder to write; not `source`.
        to, dtype, experts: as `plan_conversion`.
        like: as `open_weights`.
        max_shard_size: as `run_conversion`.

    Returns:
        The written checkpoint.

    Raises:
        ConfigError, UnsupportedError, CheckpointError: the source is not sound, or the folder
            cannot be written.
    """
    weights = source if isinstance(source, Weights) else open_weights(source, like)
    plan = plan_conversion(weights, to=to, dtype=dtype, experts=experts)
    return run_conversion(plan, out_dir, max_shard_size=max_shard_size)
