"""The checkpoint of any form that `inspect` and `convert` read."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from isomodels.cli.files import check_folder
from isomodels.errors import UnsupportedError

if TYPE_CHECKING:
    from isomodels.stored_weights import Weights

Like = Annotated[
    Path | None,
    typer.Option(
        help="Only for a Megatron folder: the Hugging Face folder of its model, which gives "
        "config.json, tokenizer and the weights that a trainer has not (MTP layers)."
    ),
]


def check_source(path: Path, like: Path | None) -> None:
    """Refuse paths that are no folders of checkpoints, without torch.

    Raises:
        CheckpointError: naming the path.
    """
    check_folder(path)
    if like is not None:
        check_folder(like, "--like", config=True)


def open_source(path: Path, like: Path | None) -> "Weights":
    """Open a checkpoint of any form.

    Args:
        path: a Hugging Face or a Megatron folder.
        like: of `--like`.

    Raises:
        IsoError: as `open_weights`; a path is no folder, or `--like` is not for this form.
    """
    check_source(path, like)
    from isomodels.stored_weights import open_weights

    weights = open_weights(path, like)
    if like is not None and weights.layout == "hf":
        raise UnsupportedError(
            f"--like is for Megatron folders, and {path} is a Hugging Face folder with a config of "
            "its own: leave it out"
        )
    return weights
