"""How weights travel: what a transport does on the trainer's side and in each engine worker."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor

from isomodels.errors import CheckpointError
from isomodels.sync.blocks import Block, Held
from isomodels.sync.digest import Source, Span

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
        self, sources: Sequence[dict[str, Any]], blocks: Sequence[Block], device: torch.device
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
    """

    def __init__(self, sources: Sequence[Tensor], blocks: Sequence[Block]):
        self._sources, self._blocks = sources, blocks

    def __getitem__(self, index: int) -> Tensor:
        """A block's tensor: a view.

        Raises:
            CheckpointError: it lies outside of its source.
        """
        block, source, _ = self._held(index)
        return block.within(source)

    def source(self, index: int) -> Source:
        """A block, to be copied; as above."""
        block, source, size = self._held(index)
        span = Span.at(source.device, source.data_ptr() + block.place, size)
        return Source(span, lambda: block.within(source))

    def _held(self, index: int) -> tuple[Block, Tensor, int]:
        block = self._blocks[index]
        size = block.nbytes
        if 0 <= block.source < len(self._sources):
            source = self._sources[block.source]
            if 0 <= block.place <= source.numel() - size:
                return block, source, size
        raise CheckpointError(f"the trainer's {block.name} lies outside of what it sent")


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
