"""What a process holds of a model, as blocks of the whole tensors: how layouts meet bit for bit.

Two layouts of one model need not know of each other: whatever one sends and the other keeps are
blocks of the same whole tensors, and what both hold is copied.
"""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from math import prod
from typing import Any

from torch import Tensor

from isomodels.layers.parallel import Shard, shards


@dataclass(frozen=True)
class Piece:
    """A block of a whole tensor.

    Attributes:
        name: of the tensor in the module of the whole model.
        offset: where the block begins, one index an axis.
        whole: shape of the whole tensor.
        tensor: the block. Of `pieces`, a view: to write into it is to write into the module.
        copy: whether another rank of the same tensor parallelism holds it too, and is to send it.
    """

    name: str
    offset: tuple[int, ...]
    whole: tuple[int, ...]
    tensor: Tensor
    copy: bool = False


def pieces(core: Any) -> list[Piece]:
    """All tensors of a module, in blocks.

    Args:
        core: a `CausalLM`, whole or the part of one process.
    """
    parts, layout = shards(core), core.layout
    tied = core.config.tie_word_embeddings
    found: list[Piece] = []
    for own, tensor in core.state_dict().items():
        name, copy = own, layout.tensor.rank > 0 and own not in parts
        if own == "lm_head.weight" and tied:  # a last stage's copy of the embedding
            name, copy = "model.embed_tokens.weight", True
        found += _cut(name, tensor, parts.get(own), copy)
    return found


def _cut(name: str, tensor: Tensor, shard: Shard | None, copy: bool) -> Iterator[Piece]:
    if shard is None:
        yield Piece(name, (0,) * tensor.dim(), tuple(tensor.shape), tensor, copy)
        return
    whole = shard.whole_shape(tensor.shape)
    for block in shard.blocks(tensor):
        if block.tensor.numel():
            yield Piece(name, block.offset, whole, block.tensor, copy or block.copy > 0)


def copy_overlap(source: Piece, target: Piece) -> int:
    """Write what both blocks hold into the target's; other bits of it stay.

    Args:
        source, target: blocks of tensors of equal dtype; of different names they share nothing.

    Returns:
        The number of elements written.

    Raises:
        ValueError: the whole tensors have different shapes or dtypes.
    """
    if source.name != target.name:
        return 0
    a, b = source.tensor, target.tensor
    if source.whole != target.whole or a.dtype != b.dtype:
        raise ValueError(
            f"{source.name} is {a.dtype} {list(source.whole)} on one side and "
            f"{b.dtype} {list(target.whole)} on the other"
        )
    for axis, (ours, theirs) in enumerate(zip(source.offset, target.offset, strict=True)):
        start = max(ours, theirs)
        length = min(ours + a.shape[axis], theirs + b.shape[axis]) - start
        if length <= 0:
            return 0
        a, b = a.narrow(axis, start - ours, length), b.narrow(axis, start - theirs, length)
    b.copy_(a)
    return b.numel()


def missing(held: Iterable[Piece], wanted: Iterable[Piece]) -> list[str]:
    """Names of the tensors that blocks of other ranks do not fill exactly once.

    Args:
        held: what the senders have; blocks that are copies are not counted.
        wanted: what a receiver holds.
    """
    by_name: dict[str, list[Piece]] = {}
    for one in held:
        if not one.copy:
            by_name.setdefault(one.name, []).append(one)
    return sorted({one.name for one in wanted if not _filled(one, by_name.get(one.name, []))})


def _filled(target: Piece, sources: list[Piece]) -> bool:
    """Whether the sources are disjoint within the target and fill it."""
    boxes = [box for box in (_common(one, target) for one in sources) if box is not None]
    disjoint = all(
        any(e <= r or f <= s for (s, e), (r, f) in zip(one, other, strict=True))
        for i, one in enumerate(boxes)
        for other in boxes[:i]
    )
    return disjoint and sum(prod(e - s for s, e in box) for box in boxes) == target.tensor.numel()


def _common(a: Piece, b: Piece) -> list[tuple[int, int]] | None:
    """The bounds along each axis of what two blocks share, or None."""
    box = [
        (max(i, j), min(i + n, j + m))
        for i, n, j, m in zip(a.offset, a.tensor.shape, b.offset, b.tensor.shape, strict=True)
    ]
    return box if all(start < end for start, end in box) else None
