"""`isomodels check`: what a checkpoint is, and whether isomodels can run it."""

import json as json_module
from pathlib import Path
from typing import Annotated

import typer

from isomodels.cli.files import check_folder
from isomodels.errors import CheckpointError, IsoError
from isomodels.weights_conv.dist_names import LATEST, METADATA


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
        from isomodels.cli.inspect import print_summary, summary
        from isomodels.registry import load_object
        from isomodels.stored_weights import open_weights

        weights = open_weights(checkpoint)
        # An operation may refuse a size that the config allows.
        model, config = load_object(weights.spec.model), weights.config
        model(config, dtype=config.torch_dtype, device="meta", carry_mtp=True)
    except IsoError as error:
        if json:
            typer.echo(json_module.dumps({"supported": False, "reason": str(error)}))
        raise
    facts = summary(weights)
    if json:
        typer.echo(json_module.dumps(facts))
    else:
        print_summary(facts)


def _refuse_megatron(checkpoint: Path) -> None:
    """Only Hugging Face folders are checked here."""
    if any((checkpoint / name).is_file() for name in (METADATA, LATEST)):
        raise CheckpointError(
            f"{checkpoint} is a Megatron folder: see it with `isomodels inspect {checkpoint}`"
        )
