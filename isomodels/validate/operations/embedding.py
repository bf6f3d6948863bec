"""`isomodels::embedding`: copies of rows, so every check is of bits."""

from collections.abc import Iterable

import torch
import torch.nn.functional as F
from torch import Tensor

from isomodels.kernels.embedding import embedding, embedding_backward
from isomodels.validate.accuracy import assert_close, assert_gradients, unit_error
from isomodels.validate.battery import GRAPH, Place, operation
from isomodels.validate.bits import Fault, assert_same_bits
from isomodels.validate.inputs import KINDS, layouts, numbers
from isomodels.validate.rows import assert_row_invariant, assert_same_in_a_graph

checks = operation("embedding", "embedding_backward")


def _ids(place: Place, count: int, vocab: int) -> Tensor:
    at = torch.arange(count, device=place.device) ** 2 * 31 % vocab
    at[:1], at[-1:] = vocab - 1, 0
    return at


def _sizes(place: Place) -> tuple[int, int, int]:
    """(tokens, vocabulary, width)."""
    return (3000, 20000, 4096) if place.on_gpu else (40, 300, 65)


def _assert_copied(out: Tensor, ids: Tensor, weight: Tensor, what: str) -> None:
    assert_same_bits(out, torch.stack([weight[i] for i in ids.tolist()]), what)


@checks.check("invariance")
def rows_stand_alone(place: Place) -> None:
    """A token's row is the same in every batch."""
    _, vocab, width = _sizes(place)
    for dtype in place.dtypes:
        weight = place.hard(vocab, width, dtype=dtype)
        ids = _ids(place, place.num_rows, vocab)

        # the battery's first argument is of floats: whole numbers stand for the ids
        def of_floats(x: Tensor, weight: Tensor = weight) -> Tensor:
            return embedding(x.clamp(0, vocab - 1).long(), weight)

        assert_row_invariant(
            of_floats,
            ids.float(),
            poison=False,
            brief=True,
        )


@checks.check("degenerate")
def no_tokens_and_strides(place: Place) -> None:
    """No tokens, and tables at odd offsets and strides."""
    weight = place.hard(300, 65)
    ids = _ids(place, 40, 300)
    whole = embedding(ids, weight)
    for name, stored in layouts(weight).items():
        assert_same_bits(embedding(ids, stored), whole, name)
    if embedding(ids[:0], weight).shape != (0, 65):
        raise Fault("no tokens: the result is not empty")


@checks.check("hazards")
def bits_are_copied(place: Place) -> None:
    """NaN payloads, infinities, subnormals and signed zeros arrive as they are."""
    for dtype in place.dtypes:
        for kind in KINDS:
            weight = place.hard(300, 65, kind=kind, dtype=dtype)
            weight[7], weight[8] = torch.nan, -torch.inf
            ids = _ids(place, 20, 300)
            ids[3], ids[4] = 7, 8
            _assert_copied(embedding(ids, weight), ids, weight, f"{kind} {dtype}")


@checks.check("accuracy")
def rows_are_those_of_the_table(place: Place) -> None:
    """Against single rows, at the size of a model's table."""
    tokens, vocab, width = _sizes(place)
    for dtype in place.dtypes:
        weight, ids = place.hard(vocab, width, dtype=dtype), _ids(place, tokens, vocab)
        _assert_copied(embedding(ids, weight), ids, weight, str(dtype))


@checks.check("gradients")
def frequent_tokens(place: Place) -> None:
    """Sums over tokens, one of them frequent: against fp64, and equal from run to run."""
    tokens, vocab, width = (30, 100, 70) if place.interpreted else _sizes(place)
    for dtype in place.dtypes:
        ids = _ids(place, tokens, vocab)
        ids[::3] = 7
        bound = unit_error(dtype, tokens)
        if place.interpreted:
            grad = place.hard(tokens, width, kind="normal")
            right = torch.zeros(vocab, width, dtype=torch.float64).index_add_(0, ids, grad.double())
            assert_close(embedding_backward(grad, ids, vocab), right, bound, "gradient")
            continue
        assert_gradients(
            lambda w, ids=ids: embedding(ids, w),
            lambda w, ids=ids: F.embedding(ids, w),
            place.hard(vocab, width, kind="normal", dtype=dtype),
            bound=bound,
        )


@checks.check(GRAPH)
def same_in_a_graph(place: Place) -> None:
    """Replayed with other ids."""
    weight, ids = place.hard(300, 64), _ids(place, 64, 300)
    assert_same_in_a_graph(lambda ids: embedding(ids, weight), ids)


def outputs(place: Place) -> Iterable[Tensor]:
    """Of fixed ids and tables."""
    for dtype in (torch.float32, torch.bfloat16):
        weight = numbers(300, 65, seed=1, dtype=dtype, device=place.device)
        yield embedding(_ids(place, 40, 300), weight)


checks.outputs = outputs
