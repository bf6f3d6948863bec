"""Paths that a command reads or writes, checked before the work. Imports no torch."""

import os
import re
from pathlib import Path

from isomodels.errors import CheckpointError

_HUB_NAME = re.compile(r"[\w-][\w.-]*/[\w-][\w.-]*")


def check_writable(file: Path | None, name: str = "--json") -> None:
    """Refuse a file that cannot be written before minutes of work, not after.

    An old one stays until there is a new one.

    Args:
        file: to be written; None: none is.
        name: of the option or argument.

    Raises:
        CheckpointError: naming the file and the reason.
    """
    if file is None:
        return
    try:
        existed = file.exists()
        with file.open("a"):
            pass
        if not existed:
            file.unlink()
    except IsADirectoryError:
        raise CheckpointError(f"{name} {file} is a folder: give the name of a file") from None
    except FileNotFoundError:
        raise CheckpointError(
            f"{name} {file}: there is no folder {file.parent}: make it first"
        ) from None
    except OSError as error:
        raise CheckpointError(
            f"{name} {file} cannot be written ({error.strerror}): give another place"
        ) from None


def check_folder(path: Path, name: str = "", *, config: bool = False) -> None:
    """Refuse a path that is no folder of a checkpoint, as far as names tell.

    Args:
        path: of a checkpoint.
        name: of the option, if it is one.
        config: a config.json must lie there, as in every Hugging Face folder.

    Raises:
        CheckpointError: naming the path and what is expected.
    """
    start = f"{name}: " if name else ""
    try:
        names = set(os.listdir(path))
        (path / "config.json").exists()  # asks for the right to enter
    except FileNotFoundError:
        if _cut_off(path):
            return  # the reader of checkpoints tells what a save left
        raise CheckpointError(f"{start}there is no folder {path}{_hub_hint(path)}") from None
    except NotADirectoryError:
        raise CheckpointError(
            f"{start}{path} is a file: give the checkpoint's folder"
            if path.is_file()
            else f"{start}there is no folder {path}: a part of the path is a file"
        ) from None
    except OSError as error:
        raise CheckpointError(f"{start}cannot read {path}: {error.strerror}") from None
    if config and "config.json" not in names:
        raise CheckpointError(
            f"{start}{path} has no config.json: give the Hugging Face folder of a model"
        )


def check_there(path: Path, what: str) -> None:
    """Refuse a path where there is nothing.

    Args:
        path: a file's or a folder's.
        what: should be there.

    Raises:
        CheckpointError: naming the path.
    """
    try:
        path.stat()
    except FileNotFoundError:
        raise CheckpointError(f"there is no {path}: give {what}{_hub_hint(path)}") from None
    except NotADirectoryError:
        raise CheckpointError(f"there is no {path}: a part of the path is a file") from None
    except OSError as error:
        raise CheckpointError(f"cannot read {path}: {error.strerror}") from None


def _cut_off(path: Path) -> bool:
    place = path.absolute()
    try:
        return any(name.startswith(f".{place.name}.") for name in os.listdir(place.parent))
    except OSError:
        return False


def _hub_hint(path: Path) -> str:
    if not _HUB_NAME.fullmatch(str(path)):
        return ""
    return (
        f": a model of the Hugging Face Hub is downloaded first, as by `hf download {path} "
        f"--local-dir {path.name}`"
    )


def check_written(file: Path, what: str, command: str) -> None:
    """Refuse a path where there is no file to read.

    Args:
        file: the path.
        what: should be there.
        command: writes it.

    Raises:
        CheckpointError: naming the path.
    """
    if file.is_dir():
        raise CheckpointError(f"{file} is a folder: give the file that `{command}` wrote")
    if not file.exists():
        raise CheckpointError(f"there is no {what} {file}: write it with `{command}`")


def check_recording(file: Path) -> None:
    """Refuse a place for a recording where none can be written, or where something else lies.

    Raises:
        CheckpointError: naming the file and the reason.
    """
    check_writable(file, "out")
    if file.exists() and not _is_recording(file):
        raise CheckpointError(
            f"out {file} exists and is no recording: give another name, or remove it first"
        )


def _is_recording(file: Path) -> bool:
    from safetensors import SafetensorError, safe_open

    try:
        with safe_open(file, "numpy") as opened:
            return "isomodels_trace" in (opened.metadata() or {})
    except (OSError, SafetensorError):
        return False
