"""The trainer's blocks against the pieces that a worker holds: check, gather, copy, check again."""

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor, nn

from isomodels.errors import CheckpointError
from isomodels.layers.pieces import Piece, copy_overlap, missing, pieces
from isomodels.sync.blocks import Block, Box, from_text
from isomodels.sync.digest import Source, copy_and_digest, digest
from isomodels.sync.transport import Lent, Receiver
from isomodels.weights_conv.bits import dtype_name, shorten

_KEPT = "the engine keeps its old ones"


@dataclass(frozen=True)
class Plan:
    """What a trainer's blocks are to this worker's tensors; the same from sync to sync, mostly.

    Attributes:
        text: that describes the blocks (`isomodels.sync.blocks.to_text`).
        lying: names and places of the worker's tensors (`_lying`).
        blocks: the trainer's.
        mine: the worker's pieces.
        direct: of each piece the block that is just it, if there is one; by number.
        named: the blocks of each tensor, by number.
    """

    text: str
    lying: list[Any]
    blocks: list[Block]
    mine: list[Piece]
    direct: list[int | None]
    named: dict[str, list[int]]

    @classmethod
    def of(cls, text: str, core: Any, parameters: Mapping[str, Sequence[int]]) -> "Plan":
        """Check that the blocks are those of this worker.

        Args:
            text: describes the blocks.
            core: the worker's module.
            parameters: names and shapes of the whole model's tensors.

        Raises:
            CheckpointError: naming all that differs.
        """
        blocks, mine = from_text(text), pieces(core)
        check_blocks(blocks, parameters, mine)
        _require_disjoint([piece.tensor for piece in mine])
        named: dict[str, list[int]] = {}
        for number, block in enumerate(blocks):
            named.setdefault(block.name, []).append(number)
        boxes = {block.box: number for number, block in enumerate(blocks)}
        direct = [boxes.get(_box(piece)) for piece in mine]
        return cls(text, _lying(core), blocks, mine, direct, named)

    def fits(self, text: str, core: Any) -> bool:
        """Whether it is still that of these blocks and this module."""
        return text == self.text and _lying(core) == self.lying


def _lying(module: nn.Module) -> list[Any]:
    """All names of a module in their order, with the place and kind of each tensor."""
    found: list[Any] = []
    for tensors in (module._parameters, module._buffers):
        for name, x in tensors.items():
            if x is not None:
                found.append((name, x.data_ptr(), x.dtype, x.device, x.shape, x.stride()))
    for name, child in module._modules.items():
        if child is not None:
            found += (name, _lying(child))
    return found


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


@dataclass(frozen=True)
class Come:
    """One piece as it came.

    Attributes:
        source: of its bits.
        expected: the trainer's digest, if it has one of just this piece.
    """

    source: Source
    expected: str | None = None


def arrive(
    receiver: Receiver,
    plan: Plan,
    expected: Sequence[str],
    come: Lent | Iterator[Tensor],
    device: torch.device,
) -> list[Come]:
    """Read the blocks and compare their digests, without changing a weight.

    Args:
        receiver: what gives them.
        plan: names them.
        expected: the trainer's digest of each.
        come: the blocks.
        device: of the worker, where host memory is digested too.

    Returns:
        Where the bits of each of the plan's pieces are.

    Raises:
        CheckpointError: bits were damaged on the way.
    """
    if len(expected) != len(plan.blocks):
        raise CheckpointError(
            f"the trainer sent {len(expected)} digests of {len(plan.blocks)} blocks ({_KEPT})"
        )
    rooms = {} if isinstance(come, Lent) else _rooms(plan.mine)
    # Without copies on the way, a whole piece is compared as it is copied (copy_in_place).
    later = set() if receiver.damages else set(plan.direct)
    now = [number for number in range(len(plan.blocks)) if number not in later]
    tensors = (come[number] for number in now) if isinstance(come, Lent) else come
    wrong = []
    for number, tensor in zip(now, tensors, strict=True):
        block = plan.blocks[number]
        if str(digest(tensor.to(device))) != expected[number]:
            wrong.append(block.name)
        for room in rooms.get(block.name, ()):
            copy_overlap(_piece(block, tensor), room)
    if wrong:
        raise CheckpointError(f"damaged on the way ({_KEPT}): {shorten(wrong)}")
    if isinstance(come, Lent):
        return list(_lent(come, plan, expected))
    kept = {_box(room): room.tensor for some in rooms.values() for room in some}
    return [Come(Source.of(kept[_box(piece)])) for piece in plan.mine]


def copy_in_place(come: Sequence[Come], mine: Sequence[Piece]) -> None:
    """Copy, then compare the digests of what lies on the device.

    Raises:
        CheckpointError: it differs from the trainer's.
    """
    pairs = list(zip(come, mine, strict=True))
    known = [(one, piece) for one, piece in pairs if one.expected is not None]
    values = copy_and_digest([one.source for one, _ in known], [piece.tensor for _, piece in known])
    wrong = [
        piece.name
        for (one, piece), value in zip(known, values, strict=True)
        if str(value) != one.expected
    ]
    for one, piece in pairs:
        if one.expected is None:  # one by one: what is put together takes memory
            tensor = one.source.tensor()
            if copy_and_digest([Source.of(tensor)], [piece.tensor]) != [digest(tensor)]:
                wrong.append(piece.name)
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


def _lent(lent: Lent, plan: Plan, expected: Sequence[str]) -> Iterator[Come]:
    for piece, number in zip(plan.mine, plan.direct, strict=True):
        if number is not None:
            yield Come(lent.source(number), expected[number])
        else:
            yield Come(Source(None, partial(_put_together, piece, lent, plan)))


def _put_together(target: Piece, lent: Lent, plan: Plan) -> Tensor:
    """A piece of the blocks that fill it, where they lie."""
    parts = [_piece(plan.blocks[number], lent[number]) for number in plan.named[target.name]]
    room = torch.empty_like(target.tensor, device=parts[0].tensor.device)
    for part in parts:
        copy_overlap(part, replace(target, tensor=room))
    return room


def _rooms(mine: Sequence[Piece]) -> dict[str, list[Piece]]:
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
