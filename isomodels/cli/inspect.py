"""`isomodels inspect`: what a checkpoint of any form holds, lacks and needs."""

import json as json_module
from collections import Counter
from collections.abc import Mapping
from itertools import product
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from isomodels.cli.source import Like, check_source, open_source
from isomodels.errors import CheckpointError, IsoError

if TYPE_CHECKING:
    from rich.table import Table

    from isomodels.stored_weights import Weights

_DEGREES = (1, 2, 4, 8)
_RANKS = 8  # of data parallelism, over which an optimizer's state is divided


def inspect(
    checkpoint: Annotated[
        Path, typer.Argument(help="Hugging Face folder, or Megatron dist_checkpointing folder.")
    ],
    like: Like = None,
    json: Annotated[
        bool, typer.Option("--json", help="Print JSON, also of what is not sound.")
    ] = False,
) -> None:
    """Say what a checkpoint of any form holds, lacks and needs.

    Architecture, layout, dtypes, parameters, memory. Reads headers only. Of one that does not fit
    its config, says all that is missing and all that is unknown.

    Exit code: 0 sound; 2 not.

    Example: isomodels inspect Qwen3-8B
    """
    refused: IsoError | None = None
    try:
        facts = describe(open_source(checkpoint, like))
    except IsoError as error:
        refused = error
        missing, unknown = _names(checkpoint, like, error)
        facts = {
            "supported": False,
            "path": str(checkpoint),
            "reason": str(error),
            "missing": missing,
            "unknown": unknown,
        }
    if json:
        typer.echo(json_module.dumps(facts))
    elif refused is None:
        _print_facts(facts)
    elif facts["missing"] or facts["unknown"]:
        from isomodels.weights_conv.bits import printable

        for what in ("missing", "unknown"):
            for name in facts[what]:
                typer.echo(f"{what}: {printable(name)}")
    if refused is not None:
        raise refused


def _names(checkpoint: Path, like: Path | None, error: IsoError) -> tuple[list[str], list[str]]:
    """What a checkpoint lacks and what it should not have, where that is what is wrong with it."""
    if not isinstance(error, CheckpointError):
        return [], []
    try:
        check_source(checkpoint, like)
        from isomodels.stored_weights import compare_names

        return compare_names(checkpoint, like)
    except IsoError:  # what kept the checkpoint from being opened keeps its names from it too
        return [], []


def summary(weights: "Weights") -> dict[str, Any]:
    """What a sound checkpoint is, ready for JSON."""
    from isomodels.weights_conv.rules import Carried

    config, tensors = weights.config, weights.tensors.meta()
    carried = {s.name for r in weights.rules if isinstance(r, Carried) for s in r.sources}
    return {
        "supported": True,
        "path": str(weights.path),
        "architecture": weights.spec.architecture,
        "family": weights.spec.family,
        "dtype": config.dtype,
        "layers": config.num_hidden_layers,
        "hidden_size": config.hidden_size,
        "vocab_size": config.vocab_size,
        "tied": config.tie_word_embeddings,
        "parameters": sum(t.numel() for t in tensors.values()),
        "carried_parameters": sum(tensors[name].numel() for name in carried if name in tensors),
        "tensors": len(tensors),
        "files": len(weights.files),
    }


def describe(weights: "Weights") -> dict[str, Any]:
    """`summary`, and what else is known of a sound checkpoint; sizes in bytes."""
    from isomodels.contract.stored import read_stored
    from isomodels.weights_conv.bits import dtype_name

    contract = read_stored(weights.path)
    dtypes: Counter[str] = Counter()
    for tensor in weights.tensors.meta().values():
        dtypes[dtype_name(tensor.dtype)] += tensor.numel()
    return summary(weights) | {
        "layout": weights.layout,
        "dtypes": dtypes,
        "missing": [],
        "unknown": [],
        "memory": _memory(weights),
        "iteration": _iteration(weights),
        "contract": contract.stated if contract is not None else {},
    }


def _iteration(weights: "Weights") -> int | str | None:
    """Steps of the training that saved a Megatron checkpoint, or why they are not told."""
    from isomodels.weights_conv.dist_metadata import read_common

    if weights.layout == "hf":
        return None
    try:
        common = read_common(weights.path)
    except CheckpointError as error:  # it may hold any object of a trainer, and none is loaded
        return str(error)
    found = common.get("iteration", common.get("steps")) if isinstance(common, dict) else None
    return found if isinstance(found, int) else None


def _memory(weights: "Weights") -> list[dict[str, int | None]]:
    """Bytes on one GPU in each parallel layout, without activations and caches.

    "engine" are the weights that run; None with pipeline stages, which engines refuse. A trainer
    also holds what is carried, fp32 gradients and Adam's two fp32 moments, of bfloat16 weights an
    fp32 copy too; of "trainer_sharded", eight data parallel ranks divide the moments and the
    copies. Of pipeline stages, the fullest.
    """
    from isomodels.layers.parallel import expert_degrees, tensor_degrees

    config, layers = weights.config, weights.config.num_hidden_layers
    found: list[dict[str, int | None]] = []
    for tensor, experts, stages in product(
        [n for n in _DEGREES if n in tensor_degrees(config)],
        [n for n in _DEGREES if n in expert_degrees(config)],
        [n for n in _DEGREES if layers % n == 0],
    ):
        parts = [_held(weights, tensor, experts, n, stages) for n in range(stages)]
        engine, trainer, sharded = (max(held) for held in zip(*parts, strict=True))
        found.append(
            {
                "tensor_parallel": tensor,
                "expert_parallel": experts,
                "pipeline_parallel": stages,
                "engine": engine if stages == 1 else None,
                "trainer": trainer,
                "trainer_sharded": sharded,
            }
        )
    return found


def _held(
    weights: "Weights", tensor: int, experts: int, number: int, stages: int
) -> tuple[int, int, int]:
    """Bytes of the first rank of stage `number`: of an engine, a trainer, a sharded trainer."""
    import torch

    from isomodels.layers.parallel import ExpertParallel, Layout, Stage, TensorParallel
    from isomodels.registry import load_object

    config = weights.config
    each = config.num_hidden_layers // stages
    stage = Stage(number * each, (number + 1) * each, number == 0, number == stages - 1)
    layout = Layout(
        TensorParallel(0, tensor), ExpertParallel(0, experts), stage if stages > 1 else Stage()
    )
    with torch.device("meta"):
        core = load_object(weights.spec.model)(
            config, dtype=config.torch_dtype, carry_mtp=True, layout=layout
        )
    run = list(core.parameters())
    count = sum(p.numel() for p in run)
    states = 8 * count + 4 * sum(p.numel() for p in run if p.itemsize < 4)
    engine = sum(p.nbytes for p in run)
    held = engine + sum(b.nbytes for b in core.buffers()) + 4 * count
    return engine, held + states, held + states // _RANKS


def print_summary(facts: Mapping[str, Any]) -> None:
    """`summary` for people."""
    from rich.console import Console

    Console(soft_wrap=True, markup=False).print(_summary_table(facts))


def _summary_table(facts: Mapping[str, Any]) -> "Table":
    from rich.table import Table

    table = Table(show_header=False, box=None)
    table.add_row("architecture", f"{facts['architecture']} ({facts['family']}), supported")
    for dtype, count in facts.get("dtypes", {facts["dtype"]: facts["parameters"]}).items():
        table.add_row("parameters", f"{count:,} in {dtype}")
    if facts["carried_parameters"]:
        table.add_row("", f"of which {facts['carried_parameters']:,} are carried and not run")
    sizes = f"{facts['layers']} layers of {facts['hidden_size']}, vocabulary {facts['vocab_size']}"
    table.add_row("size", sizes)
    table.add_row("head", "tied to the embedding" if facts["tied"] else "its own tensor")
    table.add_row("files", f"{facts['tensors']} tensors in {facts['files']} file(s)")
    return table


def _print_facts(facts: dict[str, Any]) -> None:
    from rich.console import Console
    from rich.filesize import decimal
    from rich.table import Table

    table = _summary_table(facts)
    table.add_row("layout", facts["layout"])
    if facts["iteration"] is not None:
        table.add_row("iteration", str(facts["iteration"]))
    for section, digest in facts["contract"].items():
        table.add_row(f"contract, {section}", f"{digest[:16]}…")
    table.add_row("missing", "nothing")
    table.add_row("unknown", "nothing")
    memory = Table(title="bytes on one GPU, without activations and caches", title_justify="left")
    heads = ("TP", "EP", "PP", "engine", "trainer", f"trainer, {_RANKS} data parallel")
    for head in heads:
        memory.add_column(head, justify="right")
    for row in facts["memory"]:
        degrees = (str(row[f"{kind}_parallel"]) for kind in ("tensor", "expert", "pipeline"))
        bytes_of = [row[kind] for kind in ("engine", "trainer", "trainer_sharded")]
        held = ("" if count is None else decimal(count) for count in bytes_of)
        memory.add_row(*degrees, *held)
    console = Console(soft_wrap=True, markup=False)  # brackets may come from the files
    console.print(table)
    console.print(memory)
