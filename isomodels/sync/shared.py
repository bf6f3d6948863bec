"""A whole set of weights as one file in shared memory: the trainer writes, engines map it."""

import os
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

import safetensors.torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from isomodels.errors import CheckpointError

_SHARED_MEMORY = Path("/dev/shm")
_PREFIX = "isomodels-weights-"


@contextmanager
def published(tensors: Mapping[str, Tensor], folder: Path | None = None) -> Iterator[Path]:
    """Write the tensors to a new file, which goes when the context ends.

    Whoever has the file mapped keeps its content until it lets go.

    Args:
        tensors: by name, on any device.
        folder: where; by default shared memory, which other processes of this host map without a
            copy. For engines on another host: a folder that both see.

    Yields:
        The file.

    Raises:
        CheckpointError: the folder has no room, or cannot be written.
    """
    folder = folder or _SHARED_MEMORY
    try:
        descriptor, name = tempfile.mkstemp(prefix=_PREFIX, dir=folder)
    except OSError as error:
        raise CheckpointError(f"cannot write weights to {folder}: {error.strerror}") from None
    os.close(descriptor)
    path = Path(name)
    try:
        held = {key: tensor.detach().cpu().contiguous() for key, tensor in tensors.items()}
        size = sum(tensor.nbytes for tensor in held.values())
        status = os.statvfs(folder)
        if size > status.f_bavail * status.f_frsize:
            raise CheckpointError(
                f"{size / 1e9:.1f} GB of weights do not fit into {folder}: make it larger, or "
                "name another folder"
            )
        safetensors.torch.save_file(held, path)
        yield path
    except SafetensorError as error:
        raise CheckpointError(f"cannot write weights to {path}: {error}") from None
    finally:
        path.unlink(missing_ok=True)


@contextmanager
def mapped(path: Path) -> Iterator[dict[str, Tensor]]:
    """The tensors of such a file, mapped and not read.

    Raises:
        CheckpointError: no such file, or a damaged one.
    """
    try:
        with safe_open(path, framework="pt") as file:
            yield {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
    except (OSError, SafetensorError) as error:
        raise CheckpointError(f"the trainer's weights at {path} cannot be read: {error}") from None
