"""Operations whose rows see the rows before them in their sequence, and keep a state in an engine.

One declaration serves two operators: that of whole sequences, which a trainer runs, and that of the
newest tokens after a kept state, which must give the same bits however a sequence is cut.
"""

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from isomodels.validate.accuracy import assert_close, assert_gradients, unit_error
from isomodels.validate.battery import Operation, Place, named, operation
from isomodels.validate.bits import Fault
from isomodels.validate.cases import Inputs
from isomodels.validate.inputs import KINDS, layouts

# Around one row, a tile of 16 rows, a block or chunk of 64, and several.
_BRIEF, _LENGTHS = [1, 17, 0, 70], [1, 17, 64, 0, 129, 5, 65]

Tokens = tuple[Tensor, ...]
# Called as engine(sequences, their new tokens, how many of each, their lengths then) -> [T, ...].
Engine = Callable[[list[int], Tokens, list[int], list[int]], Tensor]


@dataclass(frozen=True)
class Stream:
    """An operation on packed sequences.

    Attributes:
        run: called as run(*tokens, *shared, bounds) -> [T, ...].
        exact: of one sequence by its definition, exact(*tokens, *shared); is given fp64.
        tokens: arguments [T, ...].
        shared: arguments of all tokens, such as weights.
        engine: makes the empty state of sequences that will have these lengths.
    """

    run: Callable[..., Tensor]
    exact: Callable[..., Tensor]
    tokens: Tokens
    shared: Tokens
    engine: Callable[[list[int]], Engine]

    def packed(self, tokens: Tokens, lengths: list[int]) -> Tensor:
        """As a trainer runs it: [T, ...]."""
        return self.run(*tokens, *self.shared, _bounds(lengths, tokens[0]))

    def right(self, lengths: list[int], *arguments: Tensor) -> Tensor:
        """By its definition, sequence by sequence, in the dtype of the arguments."""
        count = len(self.tokens)
        parts = zip(*(x.split(lengths) for x in arguments[:count]), strict=True)
        return torch.cat([self.exact(*part, *arguments[count:]) for part in parts if len(part[0])])

    def in_steps(self, lengths: list[int], steps: list[int]) -> Tensor:
        """As an engine runs it, all at once: sequence i in steps[i % len(steps)] tokens a step."""
        engine, done = self.engine(lengths), [0] * len(lengths)
        out: list[list[Tensor]] = [[] for _ in lengths]
        starts = [sum(lengths[:i]) for i in range(len(lengths))]
        while any(d < n for d, n in zip(done, lengths, strict=True)):
            counts = [
                min(steps[i % len(steps)], n - d)
                for i, (d, n) in enumerate(zip(done, lengths, strict=True))
            ]
            edges = zip(starts, done, counts, strict=True)
            at = [torch.arange(start + d, start + d + c) for start, d, c in edges]
            new = tuple(x[torch.cat(at).to(x.device)] for x in self.tokens)
            done = [d + c for d, c in zip(done, counts, strict=True)]
            rows = engine([*range(len(lengths))], new, counts, done)
            for sequence, part in zip(out, rows.split(counts), strict=True):
                sequence.append(part)
        return torch.cat([part for sequence in out for part in sequence])


Maker = Callable[..., Stream]


def stream_operation(
    name: str,
    paged: str,
    *gradient_operators: str,
    sizes: tuple[tuple[int, ...], ...],
    kinds: tuple[str, ...] = KINDS,
    gradient_roundings: int = 2,
) -> Callable[[Maker], tuple[Operation, Operation]]:
    """Decorator: declare both operations by what makes their streams, and all their checks.

    Args:
        name: of the operator on whole sequences.
        paged: of the operator on an engine's state.
        gradient_operators: of the backward.
        sizes: arguments of the maker; the brief battery runs the first.
        kinds: of `inputs.KINDS` that it is specified for.
        gradient_roundings: bound of the gradients' error, in roundings.

    The function is called as make(inputs, *size) -> Stream.
    """

    def declare(make: Maker) -> tuple[Operation, Operation]:
        whole = operation(name, *gradient_operators)
        steps = operation(paged, trainable=False)

        def streams(place: Place) -> Iterator[tuple[str, Stream, list[int]]]:
            lengths = _BRIEF if place.brief else _LENGTHS
            for size in sizes[:1] if place.brief else sizes:
                for dtype in place.dtypes:
                    label = f"{str(dtype).removeprefix('torch.')} {list(size)}"
                    yield label, make(Inputs(place, dtype, "normal", sum(lengths)), *size), lengths

        def hard_streams(place: Place) -> Iterator[tuple[str, Stream, int]]:
            count = 70 if place.brief else 130
            for kind in kinds[1::2] if place.brief else kinds:
                yield kind, make(Inputs(place, place.sharp, kind, count), *sizes[0]), count

        def outputs(place: Place, engine: bool) -> Iterable[Tensor]:
            lengths = [1, 17, 70]
            for dtype in (torch.float32, torch.bfloat16):
                stream = make(Inputs(place, dtype, "numbers", sum(lengths)), *sizes[0])
                yield (
                    stream.in_steps(lengths, [7, 1, 40])
                    if engine
                    else stream.packed(stream.tokens, lengths)
                )

        whole.checks |= {
            "invariance": lambda place: _compositions(place, streams(place)),
            "degenerate": lambda place: _degenerate(place, streams(place)),
            "hazards": lambda place: _prefixes(place, hard_streams(place)),
            "accuracy": lambda place: _accuracy(streams(place)),
            "gradients": lambda place: _gradients(streams(place), gradient_roundings),
        }
        steps.checks |= {
            "invariance": lambda place: _cuts(place, streams(place)),
            "degenerate": lambda place: _no_new_tokens(place, streams(place)),
            "hazards": lambda place: _hard_cuts(place, hard_streams(place)),
            "accuracy": lambda place: _accuracy_in_steps(streams(place)),
        }
        whole.outputs = lambda place: outputs(place, False)
        steps.outputs = lambda place: outputs(place, True)
        return whole, steps

    return declare


Streams = Iterable[tuple[str, Stream, list[int]]]
HardStreams = Iterable[tuple[str, Stream, int]]


def _compositions(place: Place, streams: Streams) -> None:
    for label, stream, lengths in streams:
        with named(label):
            whole = stream.packed(stream.tokens, lengths)
            place.same(stream.packed(stream.tokens, lengths), whole, "second run")
            parts = [*zip(*(x.split(lengths) for x in stream.tokens), strict=True)]
            alone = [stream.packed(part, [n]) for part, n in zip(parts, lengths, strict=True)]
            place.same(torch.cat(alone), whole, "packed together against alone")
            turned = tuple(torch.cat(x[::-1]) for x in zip(*parts, strict=True))
            again = stream.packed(turned, lengths[::-1])
            place.same(again, torch.cat(whole.split(lengths)[::-1]), "in reverse")
            at = lengths.index(max(lengths))
            rows = slice(sum(lengths[:at]), sum(lengths[: at + 1]))
            among = tuple(x.clone() for x in stream.tokens)
            for x in among:
                x[: rows.start], x[rows.stop :] = torch.nan, torch.inf
            place.same(stream.packed(among, lengths)[rows], whole[rows], "among NaN")
            later = tuple(x.clone() for x in stream.tokens)
            for x in later:
                x[rows.start + 40 : rows.stop] = x[rows.start + 40 : rows.stop].flip(0)
            seen = slice(rows.start, rows.start + 40)
            place.same(stream.packed(later, lengths)[seen], whole[seen], "before other tokens")


def _degenerate(place: Place, streams: Streams) -> None:
    for label, stream, lengths in streams:
        with named(label):
            whole = stream.packed(stream.tokens, lengths)
            for none in ([0], [0, 0]):
                shape = stream.packed(tuple(x[:0] for x in stream.tokens), none).shape
                if shape != (0, *whole.shape[1:]):
                    raise Fault(f"no tokens: shape {list(shape)}")
            for i, x in enumerate(stream.tokens):
                for name, stored in layouts(x, place.brief).items():
                    tokens = tuple(stored if j == i else y for j, y in enumerate(stream.tokens))
                    place.same(stream.packed(tokens, lengths), whole, f"argument {i}: {name}")


def _prefixes(place: Place, streams: HardStreams) -> None:
    for kind, stream, count in streams:
        with named(kind):
            whole = stream.packed(stream.tokens, [count])
            if not torch.isfinite(whole).all():
                at = (~torch.isfinite(whole)).nonzero()[0].tolist()
                raise Fault(f"not finite at {at} from finite values")
            for n in (1, 63, 64, 65):
                head = stream.packed(tuple(x[:n] for x in stream.tokens), [n])
                place.same(head, whole[:n], f"the first {n}")


def _double(tensors: Tokens) -> Tokens:
    return tuple(x.double() if x.is_floating_point() else x for x in tensors)


def _accuracy(streams: Streams) -> None:
    for label, stream, lengths in streams:
        right = stream.right(lengths, *_double((*stream.tokens, *stream.shared)))
        whole = stream.packed(stream.tokens, lengths)
        assert_close(whole, right, 2 * unit_error(whole.dtype, max(lengths)), label)


def _gradients(streams: Streams, roundings: int) -> None:
    for label, stream, lengths in streams:

        def run(*x: Tensor, stream: Stream = stream, lengths: list[int] = lengths) -> Tensor:
            return stream.run(*x, _bounds(lengths, x[0]))

        def exact(*x: Tensor, stream: Stream = stream, lengths: list[int] = lengths) -> Tensor:
            return stream.right(lengths, *x)

        bound = roundings * unit_error(stream.tokens[0].dtype, sum(lengths))
        with named(label):
            assert_gradients(run, exact, *stream.tokens, *stream.shared, bound=bound)


def _bounds(lengths: list[int], like: Tensor) -> Tensor:
    return torch.tensor([0, *lengths], dtype=torch.int32).cumsum(0).int().to(like.device)


def _cuts(place: Place, streams: Streams) -> None:
    for label, stream, lengths in streams:
        whole = stream.packed(stream.tokens, lengths)
        cuts = ([1000], [1], [50], [1, 30, 7], [64, 1])
        for steps in cuts[2:4] if place.brief else cuts:
            what = f"{label}: in steps of {steps}"
            place.same(stream.in_steps(lengths, steps), whole, what)


def _no_new_tokens(place: Place, streams: Streams) -> None:
    for label, stream, _ in streams:
        part = tuple(x[:5] for x in stream.tokens)
        engine = stream.engine([0, 5, 0])
        out = engine([0, 1, 2], part, [0, 5, 0], [0, 5, 0])
        place.same(out, stream.packed(part, [5]), f"{label}: beside sequences of no tokens")
        none = engine([0, 1, 2], tuple(x[:0] for x in part), [0, 0, 0], [0, 5, 0])
        if len(none):
            raise Fault(f"{label}: {len(none)} rows from no new tokens")


def _hard_cuts(place: Place, streams: HardStreams) -> None:
    for kind, stream, count in streams:
        whole = stream.packed(stream.tokens, [count])
        for steps in ([33],) if place.brief else ([1], [33], [64]):
            what = f"{kind}: in steps of {steps}"
            place.same(stream.in_steps([count], steps), whole, what)


def _accuracy_in_steps(streams: Streams) -> None:
    for label, stream, lengths in streams:
        right = stream.right(lengths, *_double((*stream.tokens, *stream.shared)))
        out = stream.in_steps(lengths, [40, 7, 64])
        assert_close(out, right, 2 * unit_error(out.dtype, max(lengths)), label)
