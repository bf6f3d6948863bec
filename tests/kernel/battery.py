"""What every operation's tests share: bit comparison, hard inputs, and the row battery.

Bits are compared as integers (`torch.equal(+0., -0.)` is True). A failure names the first
coordinate that differs and both patterns.
"""

import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from isomodels.kernels.fixed_order import TILE_ROWS

_INTEGERS = {torch.float32: torch.int32, torch.bfloat16: torch.int16, torch.float64: torch.int64}
DTYPES = [torch.float32, torch.bfloat16]
THREADS = (1, 2, 3, 4, 8)
ROWS = 2 * TILE_ROWS + 5  # two full tiles and a ragged one

# How each kind is hard: sums that cancel over 40 binades, subnormal terms and results, zeros of
# both signs, exact ties of the last rounding, exponents near both ends of the range.
KINDS = ("normal", "wide", "subnormal", "zeros", "ties", "huge", "tiny")


def bits(x: Tensor) -> Tensor:
    """The bit patterns of floats, as integers."""
    return x.detach().contiguous().view(_INTEGERS[x.dtype])


def assert_same_bits(actual: Tensor, expected: Tensor, what: str = "result") -> None:
    assert actual.dtype == expected.dtype, f"{what}: {actual.dtype} against {expected.dtype}"
    assert actual.shape == expected.shape, f"{what}: {actual.shape} against {expected.shape}"
    differ = bits(actual) != bits(expected)
    if not differ.any():
        return
    at = tuple(differ.nonzero()[0].tolist())
    width = 2 * actual.element_size()
    patterns = [
        f"{bits(x)[at].item() & (1 << 4 * width) - 1:0{width}x}" for x in (actual, expected)
    ]
    raise AssertionError(
        f"{what}: {int(differ.sum())} of {differ.numel()} differ, first at {list(at)}: "
        f"{patterns[0]} ({actual[at].item():.9g}) against {patterns[1]} ({expected[at].item():.9g})"
    )


def hard(
    *shape: int, kind: str = "wide", seed: int = 0, dtype: torch.dtype = torch.float32
) -> Tensor:
    """Random values of one of `KINDS`."""
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(*shape, generator=generator)
    if kind == "wide":
        x = x * torch.exp2(torch.randint(-20, 21, shape, generator=generator).float())
    elif kind == "subnormal":
        small = torch.rand(*shape, generator=generator) < 0.7
        x = torch.where(small, x * 2.0**-130, x)
    elif kind == "zeros":
        chance = torch.rand(*shape, generator=generator)
        x = torch.where(chance < 0.4, 0.0, torch.where(chance < 0.8, -0.0, x))
    elif kind == "ties":
        x = torch.randint(-8, 9, shape, generator=generator) / 8 + 256.0 * (x > 0)
    elif kind == "huge":
        x = x * 2.0**55
    elif kind == "tiny":
        x = x * 2.0**-62
    return x.to(dtype)


@contextmanager
def threads(count: int) -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(count)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def odd_storage(x: Tensor, offset: int = 1) -> Tensor:
    """The same values at an odd offset of a flat buffer, as in a DDP bucket or a mapped file."""
    flat = torch.full((x.numel() + offset + 3,), torch.nan, dtype=x.dtype)
    view = flat[offset : offset + x.numel()].view(x.shape)
    view.copy_(x)
    return view


def layouts(x: Tensor) -> dict[str, Tensor]:
    """The same values of a matrix in storages that BLAS would treat differently."""
    rows, columns = x.shape
    wide = torch.full((rows, columns + 5), torch.nan, dtype=x.dtype)
    wide[:, 2 : 2 + columns] = x
    sparse = torch.full((2 * rows, columns), torch.nan, dtype=x.dtype)
    sparse[::2] = x
    spread = torch.full((rows, 2 * columns), torch.nan, dtype=x.dtype)
    spread[:, 1::2] = x
    return {
        "odd offset": odd_storage(x),
        "offset of 3": odd_storage(x, 3),
        "columns of a wider matrix": wide[:, 2 : 2 + columns],
        "every second row": sparse[::2],
        "every second column": spread[:, 1::2],
        "transposed storage": x.t().contiguous().t(),
    }


RowOp = Callable[[Tensor], Tensor]


def assert_row_invariant(op: RowOp, x: Tensor, *, poison: bool = True) -> None:
    """Each row of op(x) must depend on that row of x alone: [T, K] -> [T, ...].

    Batch size, every slot of the tile, padding, the content of other rows (NaN and infinity
    unless `poison` is False), threads, storage, no rows at all.
    """
    whole = op(x)
    rows = len(x)
    assert_same_bits(op(x), whole, "second run")
    for row in range(rows):
        assert_same_bits(op(x[row : row + 1]), whole[row : row + 1], f"row {row} alone")
    for count in (2, 3, 7, TILE_ROWS - 1, TILE_ROWS, TILE_ROWS + 1, 2 * TILE_ROWS):
        if count < rows:
            assert_same_bits(op(x[:count]), whole[:count], f"the first {count} rows")
    for shift in range(1, TILE_ROWS):
        rolled = op(x.roll(shift, 0)).roll(-shift, 0)
        assert_same_bits(rolled, whole, f"rows moved by {shift}")
    assert_same_bits(op(x.flip(0)).flip(0), whole, "rows in reverse")
    assert_same_bits(op(x[:1].repeat(70, 1)), whole[:1].expand(70, *whole.shape[1:]), "70 copies")
    for filler in (0.0, -0.0, 1e30, *((torch.nan, torch.inf) if poison else ())):
        for row in (0, TILE_ROWS - 1, TILE_ROWS, rows - 1):
            alone = torch.full_like(x, filler)
            alone[row] = x[row]
            assert_same_bits(op(alone)[row], whole[row], f"row {row} among rows of {filler}")
    for count in THREADS:
        with threads(count):
            assert_same_bits(op(x), whole, f"{count} threads")
    for name, same in layouts(x).items():
        assert_same_bits(op(same), whole, name)
    assert op(x[:0]).shape == (0, *whole.shape[1:])


def relative_rms(actual: Tensor, reference: Tensor) -> float:
    """RMS of the error over RMS of the reference, in fp64."""
    reference = reference.detach().double()
    error = (actual.detach().double() - reference).square().mean().sqrt()
    return float(error / reference.square().mean().sqrt())


def unit_error(dtype: torch.dtype, length: int = 1) -> float:
    """A generous bound on the relative RMS error of one rounding and a sum of `length` terms."""
    return torch.finfo(dtype).eps + torch.finfo(torch.float32).eps * 4 * math.sqrt(length)


Op = Callable[..., Tensor]


def assert_gradients(op: Op, reference: Op, *inputs: Tensor, bound: float) -> None:
    """Gradients of all floating inputs against fp64 autograd of `reference`; equal run to run."""

    def gradients(function: Op, dtype: torch.dtype | None) -> list[Tensor]:
        leaves = [
            x.detach().to(dtype or x.dtype).requires_grad_() if x.is_floating_point() else x
            for x in inputs
        ]
        out = function(*leaves)
        generator = torch.Generator().manual_seed(7)
        seed = torch.randn(out.shape, generator=generator).to(inputs[0].dtype).to(out.dtype)
        wanted = [x for x in leaves if x.requires_grad]
        return list(torch.autograd.grad(out, wanted, seed))

    exact = gradients(reference, torch.float64)
    first, second = gradients(op, None), gradients(op, None)
    for i, (one, two, right) in enumerate(zip(first, second, exact, strict=True)):
        assert_same_bits(one, two, f"gradient {i}, second run")
        error = relative_rms(one, right)
        assert error <= bound, f"gradient {i}: relative error {error:.3g} above {bound:.3g}"


def assert_registered(op: Any, args: tuple, *, trainable: bool = True) -> None:
    """torch's own checks of an operator: schema, aliasing, fake against real, autograd.

    Not the check under ahead-of-time dispatch, which takes seconds (see the tests marked slow).
    """
    tests = ["test_schema", "test_faketensor"] + ["test_autograd_registration"] * trainable
    torch.library.opcheck(op, args, test_utils=tests)
