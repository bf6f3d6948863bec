"""`isomodels check`: what a checkpoint is, and whether isomodels can run it."""

import json as json_module
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from isomodels.cli.files import check_folder
from isomodels.errors import CheckpointError, IsoError
from isomodels.weights_conv.dist_names import LATEST, METADATA

if TYPE_CHECKING:
    from isomodels.checkpoint import Checkpoint


def check(
    checkpoint: Annotated[
        Path, typer.Argument(help="Hugging Face folder (config.json, *.safetensors).")
    ],
    json: Annotated[
        bool, typer.Option("--json", help="Print JSON, also of what is not supported.")
    ] = False,
) -> None:
    """Say what a checkpoint is and whether it is supported.

    Reads the config and the tensors' headers strictly. Of Megatron folders, and for the memory that
    a model needs: isomodels inspect.

    Exit code: 0 supported; 2 not.

    Example: isomodels check Qwen3-0.6B
    """
    try:
        check_folder(checkpoint)
        _refuse_megatron(checkpoint)
        from isomodels.checkpoint import open_checkpoint

        opened = open_checkpoint(checkpoint)
        # An operation may refuse a size that the config allows.
        opened.build(device="meta", carry_mtp=True)
    except IsoError as error:
        if json:
            typer.echo(json_module.dumps({"supported": False, "reason": str(error)}))
        raise
    facts = describe(opened)
    if json:
        typer.echo(json_module.dumps(facts))
    else:
        print_facts(facts)


def _refuse_megatron(checkpoint: Path) -> None:
    """Only Hugging Face folders are checked here."""
    if any((checkpoint / name).is_file() for name in (METADATA, LATEST)):
        raise CheckpointError(
            f"{checkpoint} is a Megatron folder: see it with `isomodels inspect {checkpoint}`"
        )


def describe(checkpoint: "Checkpoint") -> dict[str, Any]:
    """The facts about a sound checkpoint, ready for JSON."""
    from isomodels.weights_conv.rules import Carried

    config, tensors = checkpoint.config, checkpoint.tensors.meta()
    carried = {r.name for r in checkpoint.rules if isinstance(r, Carried)}
    return {
        "supported": True,
        "path": str(checkpoint.path),
        "architecture": checkpoint.spec.architecture,
        "family": checkpoint.spec.family,
        "dtype": config.dtype,
        "layers": config.num_hidden_layers,
        "hidden_size": config.hidden_size,
        "vocab_size": config.vocab_size,
        "tied": config.tie_word_embeddings,
        "parameters": sum(t.numel() for t in tensors.values()),
        "carried_parameters": sum(tensors[name].numel() for name in carried),
        "tensors": len(tensors),
        "files": len(set(checkpoint.tensors.weight_map.values())),
    }


def print_facts(facts: dict[str, Any]) -> None:
    """`describe` for people."""
    from rich.console import Console
    from rich.table import Table

    table = Table(show_header=False, box=None)
    table.add_row("architecture", f"{facts['architecture']} ({facts['family']}), supported")
    table.add_row("dtype", facts["dtype"])
    carried = facts["carried_parameters"]
    more = f", of which {carried:,} are carried and not run" if carried else ""
    table.add_row("parameters", f"{facts['parameters']:,}{more}")
    head = "tied to the embedding" if facts["tied"] else "its own tensor"
    sizes = f"{facts['layers']} layers of {facts['hidden_size']}, vocabulary {facts['vocab_size']}"
    table.add_row("size", sizes)
    table.add_row("head", head)
    table.add_row("files", f"{facts['tensors']} tensors in {facts['files']} file(s)")
    Console(soft_wrap=True).print(table)
