"""How weights travel: what a transport does on the trainer's side and in each engine worker."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
import torch
from torch import Tensor

from isomodels.errors import CheckpointError
from isomodels.sync.blocks import Blocks, Held
from isomodels.sync.digest import Array, Spans

Places = list[tuple[int, int]]


@dataclass(frozen=True)
class Offer:
    """Weights that a rank of the trainer holds ready.

    Attributes:
        sources: how a worker reaches each run of bytes; JSON.
        places: of each block: the source that holds it, and from which byte on.
    """

    sources: list[dict[str, Any]]
    places: Places


class Transport(Protocol):
    """The trainer's side."""

    @property
    def name(self) -> str:
        """By which a worker finds its side."""

    def connect(self, call: Callable[[dict[str, Any]], None]) -> None:
        """Shake hands: `call` takes what the workers need into the engine, and waits for it."""

    def offer(self, blocks: Sequence[Held]) -> AbstractContextManager[Offer]:
        """Hold the blocks ready while the context is open; nothing of it outlives the process."""

    def deliver(self, blocks: Sequence[Held], call: Callable[[], None]) -> None:
        """Make the engine's call, and send during it what must be sent."""

    def close(self) -> None:
        """Let go of what `connect` made."""


class Receiver(Protocol):
    """A worker's side of one sync.

    Attributes:
        lasting: whether all blocks stay readable until the context ends (`Lent`), or each until the
            next comes.
        damages: whether bytes may change on the way: their digests are then compared before a
            weight is changed. Else the worker reads the trainer's own memory.
    """

    lasting: bool
    damages: bool

    def read(
        self, sources: Sequence[dict[str, Any]], blocks: Blocks, device: torch.device
    ) -> "AbstractContextManager[Lent | Iterator[Tensor]]":
        """The tensors of all blocks, in their order.

        Raises:
            CheckpointError: the trainer cannot be reached, or broke off.
        """


class Lent:
    """Blocks in sources that stay readable.

    Args:
        sources: flat tensors of bytes.
        blocks: what is said to lie in them.

    Raises:
        CheckpointError: a block lies outside of its source.
    """

    def __init__(self, sources: Sequence[Tensor], blocks: Blocks):
        self._sources, self._blocks = sources, blocks
        lengths = np.array([*(source.numel() for source in sources), -1])  # and of none
        known = (blocks.source >= 0) & (blocks.source < len(sources))
        room = lengths[np.where(known, blocks.source, -1)] - blocks.nbytes
        if (outside := (blocks.place < 0) | (blocks.place > room)).any():
            name = blocks[int(outside.argmax())].name
            raise CheckpointError(f"the trainer's {name} lies outside of what it sent")

    def __getitem__(self, number: int) -> Tensor:
        """A block's tensor: a view."""
        block = self._blocks[number]
        return block.within(self._sources[block.source])

    def spans(self, numbers: Array) -> Spans:
        """Where these blocks lie."""
        device = np.array([source.get_device() for source in self._sources])
        base = np.array([source.data_ptr() for source in self._sources])
        blocks, source = self._blocks, self._blocks.source[numbers]
        return Spans.at(
            device[source], base[source] + blocks.place[numbers], blocks.nbytes[numbers]
        )


class Alone:
    """What a transport without a connection does when it connects and delivers: nothing more."""

    def connect(self, call: Callable[[dict[str, Any]], None]) -> None:
        """Nothing but the call."""
        call({})

    def deliver(self, blocks: Sequence[Held], call: Callable[[], None]) -> None:
        """Nothing but the call: the workers fetch the weights during it."""
        call()

    def close(self) -> None:
        """Nothing is held."""
