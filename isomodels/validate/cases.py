"""Operations of rows: how to call one is stated, every check of it comes from here."""

import functools
from collections.abc import Callable, Iterable
from dataclasses import dataclass

import torch
from torch import Tensor

from isomodels.validate.accuracy import (
    assert_close,
    assert_gradients,
    gradients,
    seed_of,
    unit_error,
)
from isomodels.validate.battery import GRAPH, Operation, Place, named, operation
from isomodels.validate.bits import Fault
from isomodels.validate.inputs import KINDS, hard, layouts, numbers, odd_storage
from isomodels.validate.rows import (
    ROWS,
    among_rows_of,
    assert_no_rows,
    assert_row_invariant,
    assert_same_in_a_graph,
    assert_storage_does_not_matter,
)


@dataclass(frozen=True)
class Case:
    """One operation at one shape and dtype, as a function of rows.

    Attributes:
        run: called as run(*rows, *shared) -> [T, ...].
        exact: the same by its definition in plain torch; is given fp64.
        rows: arguments [T, ...] of which row t belongs to row t of the result; floats first.
        shared: arguments that all rows share, such as weights.
        terms: of the longest sum; sets the bound of the error.
        backward: called as backward(grad, *rows, *shared) -> gradients of the floating ones, from
            the operator that the GPU uses. The interpreter has no other way to it.
    """

    run: Callable[..., Tensor]
    exact: Callable[..., Tensor]
    rows: tuple[Tensor, ...]
    shared: tuple[Tensor, ...] = ()
    terms: int = 1
    backward: Callable[..., Iterable[Tensor]] | None = None

    def of_rows(self, *rows: Tensor) -> Tensor:
        """The operation with the shared arguments bound."""
        return self.run(*rows, *self.shared)

    def right(self) -> Tensor:
        """The reference's result in fp64."""
        arguments = (*self.rows, *self.shared)
        return self.exact(*(x.double() if x.is_floating_point() else x for x in arguments))

    def bound(self, roundings: int = 1) -> float:
        """Of the relative error."""
        return roundings * unit_error(self.rows[0].dtype, self.terms)


@dataclass(frozen=True)
class Inputs:
    """What a maker of cases draws its arguments from."""

    place: Place
    dtype: torch.dtype
    kind: str  # of inputs.KINDS, or "numbers": the fixed values of digests
    num_rows: int

    def floats(self, *shape: int, seed: int = 0, kind: str | None = None) -> Tensor:
        """Floats of the case's kind, or of `kind`; for a digest always the fixed numbers."""
        device = self.place.device
        if self.kind == "numbers":
            return numbers(*shape, seed=seed, dtype=self.dtype, device=device)
        return hard(*shape, kind=kind or self.kind, seed=seed, dtype=self.dtype, device=device)

    def integers(self, below: int) -> Tensor:
        """[T] int64 in [0, below), the ends among them."""
        at = torch.arange(self.num_rows, device=self.place.device) * 7919 % below
        if self.num_rows > 1:
            at[0], at[-1] = below - 1, 0
        return at


Maker = Callable[..., Case]
Shapes = tuple[tuple[int, ...], ...]


def row_operation(
    name: str,
    *gradient_operators: str,
    small: Shapes,
    real: Shapes,
    kinds: tuple[str, ...] = KINDS,
    fp32_only: bool = False,
    trainable: bool = True,
    gradient_roundings: int = 2,
) -> Callable[[Maker], Operation]:
    """Decorator: declare an operation of rows by what makes its cases, and all its checks.

    Args:
        name: under `isomodels::`.
        gradient_operators: the operators of its backward on a GPU.
        small: odd sizes, for the CPU and the full battery of a GPU; the interpreter runs the first.
        real: sizes of models, for a GPU; the quick battery runs the first.
        kinds: of `inputs.KINDS` that it is specified for.
        fp32_only: its arguments are fp32 in every model.
        trainable: whether it has gradients.
        gradient_roundings: bound of the gradients' error, in roundings.

    The function is called as make(inputs, *shape) -> Case.
    """

    def declare(make: Maker) -> Operation:
        made = operation(name, *gradient_operators, trainable=trainable)
        cases = functools.partial(_cases, make, small, real, fp32_only)
        made.checks |= {
            "invariance": lambda place: _invariance(place, cases(place)),
            "degenerate": lambda place: _degenerate(place, cases(place)),
            "hazards": lambda place: _hazards(place, make, (small, real), kinds),
            "accuracy": lambda place: _accuracy(cases(place)),
            GRAPH: lambda place: _graph(place, make, real[0]),
        }
        if trainable:
            made.checks["gradients"] = lambda place: _gradients(
                place, cases(place), gradient_roundings
            )
        made.outputs = lambda place: _outputs(place, make, small[0], real[0])
        return made

    return declare


def _shapes(place: Place, small: Shapes, real: Shapes) -> Shapes:
    if place.on_gpu:
        return real[:1] if place.depth == "quick" else (*real, *small)
    return small[:1] if place.brief else small


def _cases(
    make: Maker, small: Shapes, real: Shapes, fp32_only: bool, place: Place
) -> Iterable[tuple[str, Case]]:
    for shape in _shapes(place, small, real):
        for dtype in (torch.float32,) if fp32_only else place.dtypes:
            if place.on_gpu and dtype == torch.float32 and shape not in small and not fp32_only:
                continue  # fp32 has one choice of tiles, and is slow
            label = f"{str(dtype).removeprefix('torch.')} {list(shape)}"
            yield label, make(Inputs(place, dtype, "normal", place.num_rows), *shape)


def _invariance(place: Place, cases: Iterable[tuple[str, Case]]) -> None:
    counts = (16,) if place.on_gpu and place.brief else None
    for label, case in cases:
        with named(label):
            if place.interpreted:
                _rows_in_the_interpreter(place, case)
            else:
                assert_row_invariant(case.of_rows, *case.rows, counts=counts, brief=place.brief)


def _rows_in_the_interpreter(place: Place, case: Case) -> None:
    """What a wrong index or mask would show, in few calls."""
    whole = case.of_rows(*case.rows)
    for row in (0, place.num_rows - 1):
        alone = case.of_rows(*(x[row : row + 1] for x in case.rows))
        place.same(alone, whole[row : row + 1], f"row {row} alone")
        among = case.of_rows(*(among_rows_of(x, row, torch.nan) for x in case.rows))
        place.same(among[row], whole[row], f"row {row} among rows of NaN")


def _degenerate(place: Place, cases: Iterable[tuple[str, Case]]) -> None:
    for label, case in cases:
        with named(label):
            rows = tuple(x[: place.few_rows] for x in case.rows)
            if place.on_gpu and place.brief:  # each alignment of a pointer is compiled anew
                assert_no_rows(case.of_rows, *rows)
                continue
            how = {"brief": place.brief, "same": place.same}
            assert_storage_does_not_matter(case.of_rows, *rows, **how)  # type: ignore[arg-type]
            _check_storage_of_shared(place, case, rows)


def _check_storage_of_shared(place: Place, case: Case, rows: tuple[Tensor, ...]) -> None:
    whole = case.of_rows(*rows)
    for i, x in enumerate(case.shared):
        if x.numel() > 10**7:
            continue  # six copies of a large weight
        stored = {"odd offset": odd_storage(x)} if place.brief else layouts(x)
        for name, other in stored.items():
            shared = [other if j == i else y for j, y in enumerate(case.shared)]
            place.same(case.run(*rows, *shared), whole, f"shared argument {i}: {name}")


def _hazards(
    place: Place, make: Maker, shapes: tuple[Shapes, Shapes], kinds: tuple[str, ...]
) -> None:
    shape = _shapes(place, *shapes)[0]
    for kind in kinds:
        for dtype in (place.sharp,) if place.brief else place.dtypes:
            case = make(Inputs(place, dtype, kind, place.few_rows), *shape)
            with named(f"{kind} {dtype}"):
                _check_hazard(place, case)


def _check_hazard(place: Place, case: Case) -> None:
    out = assert_row_invariant(case.of_rows, *case.rows, counts=(2,), brief=True, same=place.same)
    wrong = out.isnan() & ~case.right().isnan()
    if wrong.any():
        raise Fault(f"NaN at {wrong.nonzero()[0].tolist()} from finite values")


def _accuracy(cases: Iterable[tuple[str, Case]]) -> None:
    for label, case in cases:
        assert_close(case.of_rows(*case.rows), case.right(), case.bound(), label)


def _gradients(place: Place, cases: Iterable[tuple[str, Case]], roundings: int) -> None:
    for label, case in cases:
        with named(label):
            if place.interpreted:
                _interpreted_gradients(case, case.bound(roundings))
            else:
                arguments = (*case.rows, *case.shared)
                assert_gradients(case.run, case.exact, *arguments, bound=case.bound(roundings))


def _interpreted_gradients(case: Case, bound: float) -> None:
    if case.backward is None:
        return
    arguments = (*case.rows, *case.shared)
    right = gradients(case.exact, arguments, torch.float64)
    seed = seed_of(case.of_rows(*case.rows), arguments)
    actual = list(case.backward(seed, *arguments))
    for i, (one, exactly) in enumerate(zip(actual, right, strict=True)):
        assert_close(one, exactly, bound, f"gradient {i}")


def _graph(place: Place, make: Maker, shape: tuple[int, ...]) -> None:
    for rows in (8,) if place.brief else (8, 64, 300):
        case = make(Inputs(place, torch.bfloat16, "normal", rows), *shape)
        with named(f"{rows} rows"):
            assert_same_in_a_graph(case.of_rows, *case.rows)


def _outputs(
    place: Place, make: Maker, small: tuple[int, ...], real: tuple[int, ...]
) -> Iterable[Tensor]:
    if place.on_gpu:
        case = make(Inputs(place, torch.bfloat16, "numbers", 16), *real)
        yield case.of_rows(*case.rows)
        return
    for dtype in (torch.float32, torch.bfloat16):
        case = make(Inputs(place, dtype, "numbers", ROWS), *small)
        yield case.of_rows(*case.rows)
