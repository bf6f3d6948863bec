"""From the runs of a model to a recording: which token each row is of."""

import hashlib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from isomodels.errors import TraceError
from isomodels.layers.parallel import named_tensors
from isomodels.trace.choice import MAX_TOKENS, Choice
from isomodels.trace.digest import tensor_digest
from isomodels.trace.recorder import Form, Recorder, Section
from isomodels.trace.recording import Entries, Recording


@dataclass(frozen=True)
class Span:
    """Rows `row`, row + 1, ... of a run: tokens `first` to `first + count` of a sequence."""

    name: str
    first: int
    row: int
    count: int


@dataclass
class _Part:
    """Digests on the device [n, columns], of (name, position); None for rows of the head."""

    section: Section
    form: int
    run: int
    digests: Tensor
    tokens: list[tuple[str, int]] | None


class Collector:
    """Gathers what a recorder takes, run by run, and makes a recording of it.

    Args:
        recorder: its runs are collected while it is armed.
        choice: which tokens.
        most: tokens to keep at most.

    Attributes:
        full: whether a token was left out for `most`.
    """

    def __init__(self, recorder: Recorder, choice: Choice, most: int = MAX_TOKENS):
        self.recorder, self.choice, self.most = recorder, choice, most
        self.full = False
        self.ids: dict[str, dict[int, int]] = {}
        self._late: list[tuple[list[Span], Tensor]] = []
        self._parts: list[_Part] = []
        self._count, self._run = 0, 0
        recorder.after_head = self._add_head
        self._weights = _weights(recorder)

    def know(self, name: str, ids: Iterable[int], first: int = 0) -> None:
        """Tell the ids of a sequence, from token `first` on."""
        self.ids.setdefault(name, {}).update(enumerate(ids, first))

    def begin(self) -> None:
        """Another run begins: its head belongs to its rows, whichever is heard first."""
        self._run += 1

    def add(self, spans: Sequence[Span], ids: Tensor) -> None:
        """Take the chosen rows of the run that has just been.

        Args:
            spans: what the rows are.
            ids: [T] int64, the run's token ids, on the device.
        """
        spans = [span for span in spans if self.choice.has_sequence(span.name)]
        if not spans:
            return
        rows = [row for span in spans for row in range(span.row, span.row + span.count)]
        # cloned: a host's next run overwrites them
        self._late.append((list(spans), ids[_index(rows, ids.device)].clone()))
        chosen = [
            (span.row + i, (span.name, span.first + i))
            for span in spans
            for i in range(span.count)
            if self.choice.has_position(span.first + i)
        ]
        if self._count + len(chosen) > self.most:
            chosen, self.full = chosen[: self.most - self._count], True
        if not chosen:
            return
        self._count += len(chosen)
        section = self.recorder.forward
        tokens = [token for _, token in chosen]
        digests = section.take(_index([row for row, _ in chosen], ids.device))
        self._parts.append(_Part(section, section.current, self._run, digests, tokens))

    def _add_head(self) -> None:
        section = self.recorder.head
        digests = section.take(slice(section.rows))
        self._parts.append(_Part(section, section.current, self._run, digests, None))

    def finish(self, about: Mapping[str, str]) -> Recording:
        """The recording.

        Raises:
            TraceError: nothing was chosen, the recording failed, or the weights changed.
        """
        self.recorder.after_head = None
        if self.recorder.failed is not None:
            raise TraceError(f"the recording failed: {self.recorder.failed}")
        weights = _weights(self.recorder)
        if weights != self._weights:
            raise TraceError(
                "the weights changed while tokens were recorded: start a recording for each"
            )
        for spans, ids in self._late:
            values = iter(ids.tolist())
            for span in spans:
                self.know(span.name, [next(values) for _ in range(span.count)], span.first)
        numbers: dict[tuple[str, int], int] = {}
        gathered: dict[tuple[int, int], list[tuple[list[int], Tensor]]] = {}
        hidden: dict[int, dict[int, list[int]]] = {}  # run -> digest of hidden -> tokens
        # a head may be heard before the rows that it belongs to
        for part in sorted(self._parts, key=lambda part: part.tokens is None):
            digests = part.digests.cpu()
            form = part.section.forms[part.form]
            if part.tokens is None:
                tokens, digests = _match_head(form, digests, hidden.get(part.run, {}))
            else:
                tokens = [numbers.setdefault(token, len(numbers)) for token in part.tokens]
                found = hidden.setdefault(part.run, {})
                for token, value in zip(tokens, digests[:, _last(form)].tolist(), strict=True):
                    found.setdefault(value, []).append(token)
            key = id(part.section), part.form
            gathered.setdefault(key, []).append((tokens, digests))
        if not numbers:
            raise TraceError(
                "no chosen token was computed while the recording ran (tokens found in a prefix "
                "cache are not computed): name sequences and positions that are"
            )
        return self._recording(about, numbers, gathered, weights)

    def _recording(
        self,
        about: Mapping[str, str],
        numbers: Mapping[tuple[str, int], int],
        gathered: Mapping[tuple[int, int], list[tuple[list[int], Tensor]]],
        weights: Mapping[str, int],
    ) -> Recording:
        names = list(dict.fromkeys(name for name, _ in numbers))
        positions = [position for _, position in numbers]
        entries = [
            Entries(
                section.forms[number],
                torch.tensor([t for tokens, _ in parts for t in tokens], dtype=torch.int64),
                torch.cat([digests for _, digests in parts]),
            )
            for section in (self.recorder.forward, self.recorder.head)
            for number in range(len(section.forms))
            if (parts := gathered.get((id(section), number)))
        ]
        histories = {name: self._histories(name) for name in names}
        return Recording(
            {**about, **({"full": f"only the first {self.most} tokens"} if self.full else {})},
            names,
            torch.tensor([names.index(name) for name, _ in numbers], dtype=torch.int64),
            torch.tensor(positions, dtype=torch.int64),
            torch.tensor([self.ids[name][position] for name, position in numbers]),
            torch.tensor([histories[name][position] for name, position in numbers]),
            entries,
            weights,
        )

    def _histories(self, name: str) -> list[tuple[int, int]]:
        """Of each token of a sequence, a hash of all ids up to it."""
        ids, found = self.ids[name], []
        hashed = hashlib.sha256()
        for position in range(max(ids) + 1):
            if position not in ids:
                raise TraceError(
                    f"token {position} of {name} is not known: start the recording before the "
                    "sequence"
                )
            hashed.update(ids[position].to_bytes(8, "little", signed=True))
            value = hashed.digest()
            parts = (int.from_bytes(value[i : i + 8], "little", signed=True) for i in (0, 8))
            found.append((next(parts), next(parts)))
        return found


def _index(rows: list[int], device: torch.device) -> Tensor | slice:
    """Rows of a tensor on a device, without waiting for it: an engine prepares its next step."""
    first = rows[0] if rows else 0
    if rows == list(range(first, first + len(rows))):
        return slice(first, first + len(rows))
    index = torch.tensor(rows, pin_memory=device.type == "cuda")
    return index.to(device, non_blocking=True)


def _last(form: Form) -> int:
    """Column of the decoder's result."""
    return form.operations[-1].outputs[0]


def _match_head(
    form: Form, digests: Tensor, hidden: Mapping[int, list[int]]
) -> tuple[list[int], Tensor]:
    """The rows of the head whose hidden states are those of chosen tokens of the same run.

    A host gives the head any rows it likes; equal hidden states are equal inputs.
    """
    first = next(c for c in form.operations[0].inputs.values() if isinstance(c, int))
    pairs = [
        (token, row)
        for row, value in enumerate(digests[:, first].tolist())
        for token in hidden.get(value, ())
    ]
    rows = torch.tensor([row for _, row in pairs], dtype=torch.int64)
    return [token for token, _ in pairs], digests[rows]


def _weights(recorder: Recorder) -> dict[str, int]:
    found = {name: tensor_digest(t) for name, t in named_tensors(recorder.core).items()}
    if not found:
        return {}
    values = torch.cat(list(found.values())).tolist()
    return dict(zip(found, values, strict=True))
