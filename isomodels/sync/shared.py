"""Weights in a nameless file of memory, which engines of this host map: nothing can be left over.

The file is Linux's memfd: it has no name in any folder, it is not bounded by the size of /dev/shm,
and the kernel frees it with the last process that holds it, however that one ends.
"""

import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from isomodels.errors import CheckpointError
from isomodels.sync.blocks import Block, Blocks, Held
from isomodels.sync.transport import Alone, Lent, Offer

NAME = "isomodels-weights"  # in /proc/PID/maps
_ALIGN = 64


class SharedMemory(Alone):
    """The trainer's side, for engines on the same host that may read this process's files."""

    name = "shared_memory"

    @contextmanager
    def offer(self, blocks: Sequence[Held]) -> Iterator[Offer]:
        """One file of all blocks, written from any device.

        Raises:
            CheckpointError: the host has too little free memory.
        """
        places, size = [], 0
        for held in blocks:
            places.append((0, size))
            size += -(-held.tensor.nbytes // _ALIGN) * _ALIGN
        _require_memory(size)
        descriptor = os.memfd_create(NAME)
        try:
            path = f"/proc/{os.getpid()}/fd/{descriptor}"
            if size:
                os.posix_fallocate(descriptor, 0, size)
                _write(path, size, blocks, places)
            yield Offer([{"path": path, "bytes": size}], places)
        except OSError as error:
            raise CheckpointError(
                f"{size / 1e9:.1f} GB of shared memory cannot be had: {error.strerror}"
            ) from None
        finally:
            os.close(descriptor)


class SharedMemoryReceiver:
    """A worker's side."""

    lasting = True
    damages = True

    @contextmanager
    def read(
        self, sources: Sequence[dict[str, Any]], blocks: Blocks, device: torch.device
    ) -> Iterator[Lent]:
        """Views of the mapped files; see `Receiver`."""
        mapped = [_mapped(Path(source["path"]), source["bytes"]) for source in sources]
        yield Lent(mapped, blocks)


def _write(path: str, size: int, blocks: Sequence[Held], places: list[tuple[int, int]]) -> None:
    file = torch.from_file(path, shared=True, size=size, dtype=torch.uint8)
    for held, (source, place) in zip(blocks, places, strict=True):
        Block.of(held, source, place).within(file).copy_(held.tensor.detach())


def _mapped(path: Path, size: int) -> Tensor:
    try:
        if path.stat().st_size != size:
            raise CheckpointError(
                f"the trainer's weights at {path} are {path.stat().st_size} bytes instead of {size}"
            )
        if not size:
            return torch.empty(0, dtype=torch.uint8)
        return torch.from_file(str(path), shared=False, size=size, dtype=torch.uint8)
    except (OSError, RuntimeError) as error:
        reason = error.strerror if isinstance(error, OSError) else str(error).splitlines()[0]
        raise CheckpointError(
            f"the trainer's weights at {path} cannot be read ({reason}): the trainer has ended, or "
            "runs on another host, in another container or as another user, for which there is "
            "isomodels.sync.Network"
        ) from None


def _require_memory(size: int) -> None:
    """Refuse what would start the kernel's search for a process to kill."""
    for line in Path("/proc/meminfo").read_text().splitlines():
        key, _, value = line.partition(":")
        if key == "MemAvailable" and size > int(value.split()[0]) * 1024:
            raise CheckpointError(
                f"{size / 1e9:.1f} GB of weights do not fit into the "
                f"{int(value.split()[0]) * 1024 / 1e9:.1f} GB of free memory: free some, or use "
                "isomodels.sync.CudaIpc where the weights lie on a GPU"
            )
