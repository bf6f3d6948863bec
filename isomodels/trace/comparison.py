"""The first operation at which two recordings part."""

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from isomodels.errors import TraceError
from isomodels.trace.recorder import Form, Operation
from isomodels.trace.recording import Entries, Recording

# One operation has a form for packed sequences and one for an engine's pages.
_FORMS = (("paged_", ""), ("_to_cache", ""), ("_kept", ""))
_SECTIONS = ("decoder", "head")
# What one kind of host runs beside what both do, and why: no difference of two sides.
HOSTS_OWN = {
    "write_kv_cache": "an engine keeps keys and values in pages",
    "write_latent_cache": "an engine keeps latents in pages",
    "token_logprobs": "a trainer takes its targets' logprobs",
}

Key = tuple[str, str, int]  # module, operation, which call of it there


@dataclass(frozen=True)
class Input:
    """An input of the operation at fault.

    Attributes:
        name: of the argument.
        source: the operation or the weight that it comes from.
        left, right: digests; None for what is not digested.
    """

    name: str
    source: str
    left: int | None
    right: int | None

    @property
    def differs(self) -> bool | None:
        """None: not known."""
        if self.left is None or self.right is None:
            return None
        return self.left != self.right


@dataclass(frozen=True)
class Fault:
    """The first difference: at the earliest token that has any, the first operation.

    Attributes:
        sequence, position, token_id: the token, by the left recording's name of its sequence.
        module, left_operator, right_operator: the operation on either side.
        output: index of the tensor.
        left, right: its digests.
        inputs: of the operation.
        earlier: tokens before it in its sequence that both sides recorded: all agree.
    """

    sequence: str
    position: int
    token_id: int
    module: str
    left_operator: str
    right_operator: str
    output: int
    left: int
    right: int
    inputs: tuple[Input, ...]
    earlier: int


@dataclass(frozen=True)
class Comparison:
    """Of two recordings.

    Attributes:
        tokens: that both recorded with one history.
        operations: that both ran, of those tokens.
        differing: tokens with any difference.
        only_left, only_right: operations that the other side did not run there.
        own_left, own_right: of `HOSTS_OWN`, those that one side's host runs and the other's does
            not, and how often in the model.
        weights: names of tensors that both sides have and whose digests differ; what a trainer
            alone carries (MTP layers) is in no operation.
        first: None if nothing differs.
        places: how many tokens part first at each operation.
    """

    tokens: int
    operations: int
    differing: int
    only_left: tuple[str, ...]
    only_right: tuple[str, ...]
    own_left: dict[str, int]
    own_right: dict[str, int]
    weights: tuple[str, ...]
    first: Fault | None
    places: dict[str, int]


@dataclass(frozen=True)
class _Pair:
    """Tokens and operations that two forms share.

    Attributes:
        tokens: [n] of the left recording.
        columns: of each tensor: operations on both sides, index of the output, columns.
        left, right: [n, len(columns)].
    """

    left_entry: Entries
    right_entry: Entries
    tokens: Tensor
    rows: tuple[Tensor, Tensor]
    columns: list[tuple[Operation, Operation, int]]
    left: Tensor
    right: Tensor


def compare(left: Recording, right: Recording) -> Comparison:
    """Find where two sides part, by tokens that have the same history on both.

    Args:
        left, right: recordings of the same model; what they differ in is found, not expected.

    Raises:
        TraceError: the two have no token, or no operation, in common.
    """
    partners = _partners(left, right)
    if not any(value >= 0 for value in partners):
        raise TraceError(
            "the recordings have no token with one history in common: record the same sequences "
            "on both sides (the same ids from the first token on)"
        )
    pairs = list(_pairs(left, right, torch.tensor(partners)))
    if not pairs:
        raise TraceError("the recordings have no operation in common: are they of one model?")
    places = _first_places(pairs)
    only, own = _unmatched(left, right)
    names = left.weights.keys() & right.weights.keys()
    by_order = sorted(places, key=lambda t: (int(left.position[t]), int(left.sequence[t])))
    return Comparison(
        tokens=sum(value >= 0 for value in partners),
        operations=len({_label(a) for pair in pairs for a, _, _ in pair.columns}),
        differing=len(places),
        only_left=only[0],
        only_right=only[1],
        own_left=own[0],
        own_right=own[1],
        weights=tuple(sorted(n for n in names if left.weights[n] != right.weights[n])),
        first=_fault(left, right, by_order[0], *places[by_order[0]]) if by_order else None,
        places=dict(Counter(_label(p.columns[c][0]) for p, _, c in places.values())),
    )


def _partners(left: Recording, right: Recording) -> list[int]:
    """For each token of the left, that of the right with its history, or -1."""
    known = {tuple(value): i for i, value in enumerate(right.history.tolist())}
    return [known.get(tuple(value), -1) for value in left.history.tolist()]


def keyed(form: Form) -> dict[Key, Operation]:
    """The operations of a form, under names that both hosts share."""
    seen: Counter[tuple[str, str]] = Counter()
    found: dict[Key, Operation] = {}
    for operation in form.operations:
        name = operation.operator
        for part, other in _FORMS:
            name = name.replace(part, other)
        found[operation.module, name, seen[operation.module, name]] = operation
        seen[operation.module, name] += 1
    return found


def _pairs(left: Recording, right: Recording, partners: Tensor) -> Iterator[_Pair]:
    for ours in left.entries:
        for theirs in right.entries:
            if ours.form.section != theirs.form.section:
                continue
            columns = list(_shared(ours.form, theirs.form))
            # a token that ran several times on the right is compared by its first run
            row_of: dict[int, int] = {}
            for row, token in enumerate(theirs.tokens.tolist()):
                row_of.setdefault(token, row)
            rows = [
                (i, row_of[partner])
                for i, partner in enumerate(partners[ours.tokens].tolist())
                if partner in row_of
            ]
            if not columns or not rows:
                continue
            at = torch.tensor(rows)
            ends = [(a.outputs[i], b.outputs[i]) for a, b, i in columns]
            mine, other = torch.tensor(ends).unbind(1)
            yield _Pair(
                ours,
                theirs,
                ours.tokens[at[:, 0]],
                (at[:, 0], at[:, 1]),
                columns,
                ours.digests[at[:, 0]][:, mine],
                theirs.digests[at[:, 1]][:, other],
            )


def _shared(left: Form, right: Form) -> Iterator[tuple[Operation, Operation, int]]:
    """Outputs of the same operation, of the same row shape and dtype, in the left's order."""
    others = keyed(right)
    for key, ours in keyed(left).items():
        theirs = others.get(key)
        for index, column in ours.outputs.items() if theirs is not None else ():
            assert theirs is not None
            partner = theirs.outputs.get(index)
            if partner is not None and left.columns[column] == right.columns[partner]:
                yield ours, theirs, index


def _first_places(pairs: list[_Pair]) -> dict[int, tuple[_Pair, int, int]]:
    """Of each token of the left that differs: pair, row and column of its first difference."""
    order = {name: i for i, name in enumerate(_SECTIONS)}
    found: dict[int, tuple[_Pair, int, int]] = {}
    for pair in sorted(pairs, key=lambda p: order[p.left_entry.form.section]):
        differs = pair.left != pair.right
        for row in differs.any(1).nonzero().flatten().tolist():
            token = int(pair.tokens[row])
            found.setdefault(token, (pair, row, int(differs[row].int().argmax())))
    return found


def _fault(
    left: Recording, right: Recording, token: int, pair: _Pair, row: int, column: int
) -> Fault:
    ours, theirs, index = pair.columns[column]
    sequence = int(left.sequence[token])
    compared = torch.isin(left.history[:, 0], right.history[:, 0])
    same = compared & (left.sequence == sequence) & (left.position < left.position[token])
    rows = int(pair.rows[0][row]), int(pair.rows[1][row])
    return Fault(
        left.sequences[sequence],
        int(left.position[token]),
        int(left.ids[token]),
        ours.module,
        ours.operator,
        theirs.operator,
        index,
        int(pair.left[row, column]),
        int(pair.right[row, column]),
        tuple(_inputs(left, right, pair, rows, ours, theirs)),
        int(same.sum()),
    )


def _inputs(
    left: Recording,
    right: Recording,
    pair: _Pair,
    rows: tuple[int, int],
    ours: Operation,
    theirs: Operation,
) -> Iterator[Input]:
    def value(
        recording: Recording, entry: Entries, row: int, source: int | str | None
    ) -> int | None:
        if isinstance(source, int):
            return int(entry.digests[row, source])
        if source is not None and source.startswith("weight "):
            return recording.weights.get(source.removeprefix("weight "))
        return None

    for name in {**ours.inputs, **theirs.inputs}:
        mine, other = ours.inputs.get(name), theirs.inputs.get(name)
        yield Input(
            name,
            _source(pair.left_entry.form, mine) if mine is not None else "(the other side's alone)",
            value(left, pair.left_entry, rows[0], mine),
            value(right, pair.right_entry, rows[1], other),
        )


def _source(form: Form, source: int | str) -> str:
    """Whose output an input is, in words."""
    if isinstance(source, str):
        return source
    for operation in form.operations:
        for index, column in operation.outputs.items():
            if column == source:
                return f"output {index} of {_label(operation)}"
    return "given by the host, or a copy"


def _label(operation: Operation) -> str:
    return f"{operation.module} {operation.operator}"


def _unmatched(
    left: Recording, right: Recording
) -> tuple[list[tuple[str, ...]], list[dict[str, int]]]:
    """Operations that one side alone ran, and of those apart, what is its host's own.

    A host's own is one that the other side ran nowhere: of two engines, or two trainers, each must
    run it wherever the other does.
    """
    sides = [
        {(e.form.section, key): op for e in side.entries for key, op in keyed(e.form).items()}
        for side in (left, right)
    ]
    only, own = [], []
    for ours, theirs in (sides, sides[::-1]):
        elsewhere = {name for _, (_, name, _) in theirs}
        alone = {key: op for key, op in ours.items() if key not in theirs}
        of_host = [key[1][1] for key in alone if key[1][1] in HOSTS_OWN.keys() - elsewhere]
        own.append(dict(Counter(of_host)))
        only.append(tuple(_label(op) for key, op in alone.items() if key[1][1] not in of_host))
    return only, own
