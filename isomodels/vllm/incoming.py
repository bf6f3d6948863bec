"""The trainer's blocks against the pieces that a worker holds: check, gather, copy, check again."""

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import pairwise
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from isomodels.errors import CheckpointError
from isomodels.layers.pieces import Piece, copy_overlap, missing, pieces
from isomodels.sync.blocks import Block, Blocks, Box
from isomodels.sync.digest import Spans, copy_and_digest, copy_spans, digest
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
        whole: (piece, block) of each piece that is just one block, by their numbers.
        targets: where these pieces lie.
    """

    text: str
    lying: list[Any]
    blocks: Blocks
    mine: list[Piece]
    whole: list[tuple[int, int]]
    targets: Spans

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
        blocks, mine = Blocks.from_text(text), pieces(core)
        check_blocks(blocks, parameters, mine)
        _require_disjoint([piece.tensor for piece in mine])
        boxes = {block.box: number for number, block in enumerate(blocks)}
        found = enumerate(boxes.get(_box(piece)) for piece in mine)
        whole = [(piece, block) for piece, block in found if block is not None]
        targets = Spans.of([mine[piece].tensor for piece, _ in whole])
        return cls(text, _lying(core), blocks, mine, whole, targets)

    def fits(self, text: str, core: Any) -> bool:
        """Whether it is still that of these blocks and this module."""
        return text == self.text and _lying(core) == self.lying

    @cached_property
    def others(self) -> dict[int, list[int]]:
        """Of each other piece the blocks of its tensor."""
        named: dict[str, list[int]] = {}
        for number, block in enumerate(self.blocks):
            named.setdefault(block.name, []).append(number)
        alone = {piece for piece, _ in self.whole}
        return {i: named[x.name] for i, x in enumerate(self.mine) if i not in alone}


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


def arrive(
    receiver: Receiver,
    plan: Plan,
    expected: Sequence[str],
    come: Lent | Iterator[Tensor],
    device: torch.device,
) -> Lent | list[Tensor]:
    """Read the blocks and compare their digests, without changing a weight.

    Args:
        receiver: what gives them.
        plan: names them.
        expected: the trainer's digest of each.
        come: the blocks.
        device: of the worker, where host memory is digested too.

    Returns:
        What stays readable; else each of the plan's pieces, in host memory.

    Raises:
        CheckpointError: bits were damaged on the way.
    """
    if len(expected) != len(plan.blocks):
        raise CheckpointError(
            f"the trainer sent {len(expected)} digests of {len(plan.blocks)} blocks ({_KEPT})"
        )
    rooms = {} if isinstance(come, Lent) else _rooms(plan.mine)
    # Without copies on the way, a whole piece is compared as it is copied (copy_in_place).
    later = set() if receiver.damages else {block for _, block in plan.whole}
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
        return come
    kept = {_box(room): room.tensor for some in rooms.values() for room in some}
    return [kept[_box(piece)] for piece in plan.mine]


def copy_in_place(plan: Plan, come: Lent | list[Tensor], expected: Sequence[str]) -> None:
    """Copy, then compare the digests of what lies on the device.

    Args:
        plan: names the pieces.
        come: of `arrive`.
        expected: the trainer's digest of each block.

    Raises:
        CheckpointError: it differs from the trainer's.
    """
    wrong = _copy_whole(plan, come, expected) if isinstance(come, Lent) else []
    # The others one by one: what is put together takes memory.
    for i in plan.others if isinstance(come, Lent) else range(len(plan.mine)):
        piece = plan.mine[i]
        source = _put_together(i, plan, come) if isinstance(come, Lent) else come[i]
        if copy_and_digest([source], [piece.tensor]) != [digest(source)]:
            wrong.append(piece.name)
    if wrong:
        raise CheckpointError(
            f"after the sync {shorten(wrong)} differ from the trainer's: the engine serves nothing "
            "until weights are sent again"
        )


def _copy_whole(plan: Plan, lent: Lent, expected: Sequence[str]) -> list[str]:
    """Names of the pieces that then have another digest than the trainer's."""

    def tensors(entry: int) -> tuple[Tensor, Tensor]:
        piece, block = plan.whole[entry]
        return lent[block], plan.mine[piece].tensor

    sources = lent.spans(np.array([block for _, block in plan.whole], np.int64))
    values = copy_spans(sources, plan.targets, tensors)
    return [
        plan.mine[piece].name
        for (piece, block), value in zip(plan.whole, values, strict=True)
        if str(value) != expected[block]
    ]


def _unfilled(blocks: Sequence[Block], mine: Sequence[Piece]) -> list[str]:
    """Names of the pieces that the blocks do not fill exactly once."""
    count = Counter(block.name for block in blocks)
    alone = {block.box for block in blocks if count[block.name] == 1}
    rest = [piece for piece in mine if _box(piece) not in alone]  # not a block of its own
    names = {piece.name for piece in rest}
    return missing([_piece(b, _empty(b)) for b in blocks if b.name in names], rest)


def _put_together(i: int, plan: Plan, lent: Lent) -> Tensor:
    """A piece of the blocks that fill it, where they lie."""
    parts = [_piece(plan.blocks[number], lent[number]) for number in plan.others[i]]
    target = plan.mine[i]
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
