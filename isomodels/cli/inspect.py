"""`isomodels inspect`: what a checkpoint of any form holds, lacks and needs."""

import json as json_module
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from isomodels.errors import CheckpointError, IsoError

if TYPE_CHECKING:
    from isomodels.stored_weights import Weights

_RANKS = (1, 8, 64)  # of data parallelism, over which the optimizer's state is divided


def inspect(
    checkpoint: Annotated[
        Path, typer.Argument(help="Hugging Face folder, or Megatron dist_checkpointing folder.")
    ],
    like: Annotated[
        Path | None,
        typer.Option(help="Hugging Face folder with the config of a Megatron checkpoint."),
    ] = None,
    json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> None:
    """Say what a checkpoint holds: architecture, layout, dtypes, parameters, memory.

    Reads headers only. Of one that does not fit its config, says all that is missing and all that
    is unknown. Exit code: 0 sound; 2 not.

    Example: isomodels inspect Qwen3-8B
    """
    from isomodels.stored_weights import compare_names, open_weights

    try:
        facts = describe(open_weights(checkpoint, like))
    except CheckpointError as error:
        facts = {"supported": False, "path": str(checkpoint), "reason": str(error)}
        try:
            facts["missing"], facts["unknown"] = compare_names(checkpoint, like)
        except IsoError:  # what kept the checkpoint from being opened keeps its names from it too
            facts["missing"] = facts["unknown"] = []
    if json:
        typer.echo(json_module.dumps(facts))
    elif facts["supported"]:
        _print_facts(facts)
    else:
        for what in ("missing", "unknown"):
            for name in facts[what]:
                typer.echo(f"{what}: {name}")
    if not facts["supported"]:
        raise CheckpointError(facts["reason"])


def describe(weights: "Weights") -> dict[str, Any]:
    """The facts about a sound checkpoint, ready for JSON; sizes in bytes."""
    from isomodels.weights_conv.bits import dtype_name
    from isomodels.weights_conv.rules import Carried

    config, tensors = weights.config, weights.tensors.meta()
    carried = {s.name for r in weights.rules if isinstance(r, Carried) for s in r.sources}
    dtypes: dict[str, int] = {}
    for tensor in tensors.values():
        name = dtype_name(tensor.dtype)
        dtypes[name] = dtypes.get(name, 0) + tensor.numel()
    return {
        "supported": True,
        "path": str(weights.path),
        "layout": weights.layout,
        "architecture": weights.spec.architecture,
        "family": weights.spec.family,
        "dtype": config.dtype,
        "dtypes": dtypes,
        "layers": config.num_hidden_layers,
        "hidden_size": config.hidden_size,
        "vocab_size": config.vocab_size,
        "tied": config.tie_word_embeddings,
        "parameters": sum(t.numel() for t in tensors.values()),
        "carried_parameters": sum(tensors[name].numel() for name in carried if name in tensors),
        "tensors": len(tensors),
        "files": len(weights.files),
        "missing": [],
        "unknown": [],
        "memory": _memory(weights, carried),
    }


def _memory(weights: "Weights", carried: set[str]) -> dict[str, int]:
    """Bytes on one GPU without activations and caches, by what runs there.

    A trainer holds the weights, fp32 gradients and Adam's two fp32 moments, of bfloat16 weights an
    fp32 copy too; the moments and the copy are divided over data parallel ranks.
    """
    tensors = weights.tensors.meta()
    held = {name: tensor for name, tensor in tensors.items() if name not in carried}
    run = sum(tensor.nbytes for tensor in held.values())
    count = sum(tensor.numel() for tensor in held.values())
    copies = sum(t.numel() for t in held.values() if t.itemsize < 4)
    found = {"engine": run}
    for ranks in _RANKS:
        state = (8 * count + 4 * copies) // ranks
        found[f"trainer, {ranks} data parallel"] = (
            sum(tensor.nbytes for tensor in tensors.values()) + 4 * count + state
        )
    return found


def _print_facts(facts: dict[str, Any]) -> None:
    from rich.console import Console
    from rich.filesize import decimal
    from rich.table import Table

    table = Table(show_header=False, box=None)
    table.add_row("architecture", f"{facts['architecture']} ({facts['family']})")
    table.add_row("layout", facts["layout"])
    for dtype, count in facts["dtypes"].items():
        table.add_row("parameters", f"{count:,} in {dtype}")
    if facts["carried_parameters"]:
        table.add_row("", f"of which {facts['carried_parameters']:,} are carried and not run")
    sizes = f"{facts['layers']} layers of {facts['hidden_size']}, vocabulary {facts['vocab_size']}"
    table.add_row("size", sizes)
    table.add_row("head", "tied to the embedding" if facts["tied"] else "its own tensor")
    table.add_row("files", f"{facts['tensors']} tensors in {facts['files']} file(s)")
    for what, size in facts["memory"].items():
        table.add_row("memory", f"{decimal(size)}: {what}")
    table.add_row("missing", "nothing")
    table.add_row("unknown", "nothing")
    Console(soft_wrap=True).print(table)
