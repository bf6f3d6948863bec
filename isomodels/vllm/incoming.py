"""The trainer's blocks against the pieces that a worker holds: check, gather, copy, check again."""

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import pairwise

import torch
from torch import Tensor

from isomodels.errors import CheckpointError
from isomodels.layers.pieces import Piece, copy_overlap, missing
from isomodels.sync.blocks import Block, Box
from isomodels.sync.digest import copy_and_digest, digest, digests
from isomodels.sync.transport import Receiver
from isomodels.weights_conv.bits import dtype_name, shorten

_KEPT = "the engine keeps its old ones"


def check_blocks(
    blocks: Sequence[Block], parameters: Mapping[str, Sequence[int]], mine: Sequence[Piece]
) -> None:
    """Compare the set of names, shapes and dtypes, and that nothing comes twice or not at all.

    Args:
        blocks: the trainer's.
        parameters: names and shapes of the whole model's tensors.
        mine: this worker's pieces.

    Raises:
        CheckpointError: naming all that differs.
    """
    sent = {block.name for block in blocks}
    problems = []
    if lacking := parameters.keys() - sent:
        problems.append(f"missing: {shorten(lacking)}")
    if left_over := sent - parameters.keys():
        problems.append(f"left over: {shorten(left_over)}")
    dtypes = {piece.name: piece.tensor.dtype for piece in mine}
    for block in blocks:
        if block.name not in parameters:
            continue
        shape = list(parameters[block.name])
        dtype = dtypes.get(block.name, block.torch_dtype)
        if list(block.whole) != shape or block.torch_dtype != dtype:
            problems.append(
                f"{block.name} is {dtype_name(block.torch_dtype)} {list(block.whole)} instead of "
                f"{dtype_name(dtype)} {shape}"
            )
    if not problems and (unfilled := _unfilled(blocks, mine)):
        problems.append(f"not filled exactly once: {shorten(unfilled)}")
    if problems:
        raise CheckpointError(
            f"the trainer's weights are not those of this engine ({_KEPT}): " + "; ".join(problems)
        )


def arrive(
    receiver: Receiver,
    blocks: Sequence[Block],
    tensors: Iterator[Tensor],
    mine: Sequence[Piece],
    device: torch.device,
) -> "list[Source]":
    """Read the blocks and compare their digests, without changing a weight.

    Args:
        receiver: what gives them.
        blocks: what comes.
        tensors: in the blocks' order.
        mine: this worker's pieces.
        device: of the worker, where host memory is digested too.

    Returns:
        Where the bits of each of `mine` are.

    Raises:
        CheckpointError: bits were damaged on the way.
    """
    named: dict[str, list[tuple[Block, Tensor]]] = {}
    wanted = {_box(piece) for piece in mine}
    wrong = []
    staged = None if receiver.lasting else _staged(mine)
    for block, tensor in zip(blocks, tensors, strict=True):
        # Without copies on the way, a whole piece is compared as it is copied (copy_in_place).
        later = not receiver.damages and block.box in wanted
        if not later and str(digest(tensor.to(device))) != block.digest:
            wrong.append(block.name)
        if staged is None:
            named.setdefault(block.name, []).append((block, tensor))
        else:
            for target in staged.get(block.name, ()):
                copy_overlap(_piece(block, tensor), target)
    if wrong:
        raise CheckpointError(f"damaged on the way ({_KEPT}): {shorten(wrong)}")
    if staged is not None:
        kept = {_box(piece): piece.tensor for some in staged.values() for piece in some}
        return [Source(piece.name, whole=kept[_box(piece)]) for piece in mine]
    return [_source(piece, named[piece.name]) for piece in mine]


class Source:
    """Where the bits of one piece are.

    Args:
        name: of the tensor.
        whole: the piece itself, if one block is it.
        parts: else the blocks that fill it.
        expected: the trainer's digest, if it has one of just this piece.
    """

    def __init__(
        self,
        name: str,
        whole: Tensor | None = None,
        parts: Iterable[Piece] = (),
        expected: str | None = None,
    ):
        self.name, self.whole, self.parts, self.expected = name, whole, list(parts), expected

    def tensor(self, target: Piece) -> Tensor:
        """The piece, put together if need be."""
        if self.whole is not None:
            return self.whole
        device = self.parts[0].tensor.device
        piece = replace(target, tensor=torch.empty_like(target.tensor, device=device))
        for part in self.parts:
            copy_overlap(part, piece)
        return piece.tensor


def copy_in_place(sources: "Sequence[Source]", mine: Sequence[Piece]) -> None:
    """Copy, then compare the digests of what lies on the device.

    Raises:
        CheckpointError: it differs from the trainer's, or two pieces share memory.
    """
    _require_disjoint([piece.tensor for piece in mine])
    at_once = [i for i, one in enumerate(sources) if one.whole is not None]
    # Pieces that are put together come one by one: their copies take memory.
    wrong = []
    for some in (at_once, *([i] for i, one in enumerate(sources) if one.whole is None)):
        tensors = [sources[i].tensor(mine[i]) for i in some]
        lying = copy_and_digest(tensors, [mine[i].tensor for i in some])
        unknown = [i for i in some if sources[i].expected is None]
        own = iter(digests([tensors[some.index(i)] for i in unknown]))
        for i, value in zip(some, lying, strict=True):
            expected = sources[i].expected
            if str(value) != (str(next(own)) if expected is None else expected):
                wrong.append(mine[i].name)
    if wrong:
        raise CheckpointError(
            f"after the sync {shorten(wrong)} differ from the trainer's: the engine serves nothing "
            "until weights are sent again"
        )


def _unfilled(blocks: Sequence[Block], mine: Sequence[Piece]) -> list[str]:
    """Names of the pieces that the blocks do not fill exactly once."""
    count = Counter(block.name for block in blocks)
    alone = {block.box for block in blocks if count[block.name] == 1}
    rest = [piece for piece in mine if _box(piece) not in alone]  # not a block of its own
    names = {piece.name for piece in rest}
    return missing([_piece(b, _empty(b)) for b in blocks if b.name in names], rest)


def _source(piece: Piece, blocks: Sequence[tuple[Block, Tensor]]) -> Source:
    box = _box(piece)
    for block, tensor in blocks:
        if block.box == box:
            return Source(piece.name, whole=tensor, expected=block.digest)
    return Source(piece.name, parts=[_piece(block, tensor) for block, tensor in blocks])


def _staged(mine: Sequence[Piece]) -> dict[str, list[Piece]]:
    """Room in host memory for every piece, by name."""
    rooms: dict[str, list[Piece]] = {}
    for piece in mine:
        room = torch.empty_like(piece.tensor, device="cpu", memory_format=torch.contiguous_format)
        rooms.setdefault(piece.name, []).append(replace(piece, tensor=room))
    return rooms


def _piece(block: Block, tensor: Tensor) -> Piece:
    return Piece(block.name, block.offset, block.whole, tensor)


def _empty(block: Block) -> Tensor:
    return torch.empty(block.shape, dtype=block.torch_dtype, device="meta")


def _box(piece: Piece) -> Box:
    """As `Block.box`."""
    return piece.name, tuple(piece.offset), tuple(piece.tensor.shape)


def _require_disjoint(tensors: Iterable[Tensor]) -> None:
    spans = sorted((t.data_ptr(), t.data_ptr() + t.nbytes) for t in tensors if t.is_contiguous())
    for (_, end), (start, _) in pairwise(spans):
        if start < end:
            raise CheckpointError("two of the engine's tensors share memory: nothing can be sent")
