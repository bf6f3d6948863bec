"""Invariance of rows: what a row becomes must depend on that row alone."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch
from torch import Tensor

from isomodels.kernels.fixed_order import TILE_ROWS
from isomodels.validate.accuracy import Same
from isomodels.validate.bits import Fault, assert_same_bits
from isomodels.validate.inputs import layouts

THREADS = (1, 2, 3, 4, 8)
ROWS = 2 * TILE_ROWS + 5  # two full tiles of the CPU backend and a ragged one

# Around the tiles of each backend.
_CPU_COUNTS = (2, 3, 7, TILE_ROWS - 1, TILE_ROWS, TILE_ROWS + 1, 2 * TILE_ROWS)
_GPU_COUNTS = (2, 7, 16, 17, 32, 33, 64, 65, 128, 129, 256, 257, 512, 513, 1024)

RowFunction = Callable[..., Tensor]


@contextmanager
def threads(count: int) -> Iterator[None]:
    """Run with another number of CPU threads."""
    before = torch.get_num_threads()
    torch.set_num_threads(count)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def assert_row_invariant(
    op: RowFunction,
    *rows: Tensor,
    poison: bool = True,
    counts: tuple[int, ...] | None = None,
    brief: bool = False,
    same: Same = assert_same_bits,
) -> Tensor:
    """Each row of op(*rows) must depend on that row of its arguments alone.

    Batch size, place in the batch, what the other rows hold (NaN and infinity unless `poison` is
    False), a second run, and on the CPU the number of threads.

    Args:
        op: of tensors [T, ...] -> [T, ...].
        rows: its arguments; the first is of floats. Integers move with their rows.
        poison: whether other rows may hold NaN and infinity.
        counts: batch sizes to try.
        brief: a few places instead of all.
        same: how results are compared.

    Returns:
        op(*rows).

    Raises:
        Fault: naming the circumstance, the first difference and both bit patterns.
    """
    whole = op(*rows)
    total, on_gpu = len(whole), rows[0].is_cuda
    same(op(*rows), whole, "second run")
    some = ({0, total - 1} if brief else {0, 1, total // 2, total - 1}) & {*range(total)}
    for row in sorted(some) if brief or on_gpu else range(total):
        alone = [x[row : row + 1] for x in rows]
        same(op(*alone), whole[row : row + 1], f"row {row} alone")
    for count in counts or (_GPU_COUNTS if on_gpu else _CPU_COUNTS):
        if count < total:
            same(op(*(x[:count] for x in rows)), whole[:count], f"the first {count} rows")
            same(op(*(x[-count:] for x in rows)), whole[-count:], f"the last {count} rows")
    shifts: tuple[int, ...] = (1,) if brief else (1, 5) if on_gpu else tuple(range(1, TILE_ROWS))
    for shift in shifts:
        moved = op(*(x.roll(shift, 0) for x in rows)).roll(-shift, 0)
        same(moved, whole, f"rows moved by {shift}")
    if not brief:
        same(op(*(x.flip(0) for x in rows)).flip(0), whole, "rows in reverse")
        copies = op(*(x[:1].expand(70, *x.shape[1:]).contiguous() for x in rows))
        same(copies, whole[:1].expand_as(copies), "70 copies of a row")
    _assert_neighbours_do_not_matter(op, rows, whole, poison, brief, same)
    if not on_gpu:
        for count in (1, 3) if brief else THREADS:
            with threads(count):
                same(op(*rows), whole, f"{count} threads")
    return whole


def _assert_neighbours_do_not_matter(
    op: RowFunction,
    rows: tuple[Tensor, ...],
    whole: Tensor,
    poison: bool,
    brief: bool,
    same: Same,
) -> None:
    fillers = (0.0, -0.0, 1e30, *((torch.nan, torch.inf) if poison else ()))
    size = min(TILE_ROWS if brief else 70, len(whole))
    for filler in fillers[-1:] if brief else fillers:
        for row in sorted({0, TILE_ROWS - 1, TILE_ROWS, size - 1} & {*range(size)}):
            among = [among_rows_of(x[:size], row, filler) for x in rows]
            same(op(*among)[row], whole[row], f"row {row} among rows of {filler}")


def among_rows_of(x: Tensor, row: int, filler: float) -> Tensor:
    """A copy of x whose rows but one hold `filler`; integers keep their values."""
    if not x.is_floating_point():
        return x
    filled = torch.full_like(x, filler)
    filled[row] = x[row]
    return filled


def assert_storage_does_not_matter(
    op: RowFunction, *rows: Tensor, brief: bool = False, same: Same = assert_same_bits
) -> None:
    """The same bits from the same values at odd offsets, with strides, and with no rows at all.

    Raises:
        Fault: naming the argument and how it is stored.
    """
    whole = op(*rows)
    for i, x in enumerate(rows):
        if not x.is_floating_point():
            continue
        for name, other in layouts(x, brief).items():
            arguments = [other if j == i else y for j, y in enumerate(rows)]
            same(op(*arguments), whole, f"argument {i}: {name}")
    assert_no_rows(op, *rows)


def assert_no_rows(op: RowFunction, *rows: Tensor) -> None:
    """No rows in, no rows out.

    Raises:
        Fault: for a result of another shape.
    """
    expected, empty = op(*rows), op(*(x[:0] for x in rows))
    if empty.shape != (0, *expected.shape[1:]):
        raise Fault(f"no rows: {list(empty.shape)} instead of {[0, *expected.shape[1:]]}")


def assert_same_in_a_graph(op: RowFunction, *rows: Tensor) -> None:
    """The same bits when captured in a CUDA graph and replayed on other values.

    Raises:
        Fault: where the replay differs.
    """
    others = [x.flip(0).clone() for x in rows]
    expected, buffers = op(*others), [x.clone() for x in rows]
    op(*buffers)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = op(*buffers)
    for buffer, other in zip(buffers, others, strict=True):
        buffer.copy_(other)
    graph.replay()
    torch.cuda.synchronize()
    assert_same_bits(out, expected, "replayed graph")
