"""The sequences that `trace record` runs: `--ids` and `--positions`. Imports no torch."""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from isomodels.errors import TraceError
from isomodels.trace.choice import MAX_TOKENS, Choice

_FORM = "give a JSON file with a list of token ids for each sequence, such as [[1, 2, 3], [4, 5]]"


def read_ids(path: Path) -> list[list[int]]:
    """The token ids of each sequence.

    Raises:
        TraceError: naming what is wrong with the file, and where.
    """
    name = f"--ids {path}"
    try:
        found = json.loads(path.read_text())
    except FileNotFoundError:
        raise TraceError(f"{name}: there is no such file: {_FORM}") from None
    except OSError as error:
        raise TraceError(f"{name} cannot be read ({error.strerror}): {_FORM}") from None
    except UnicodeDecodeError:
        raise TraceError(f"{name} is no text: {_FORM}") from None
    except json.JSONDecodeError as error:
        where = f"line {error.lineno}, column {error.colno}"
        raise TraceError(f"{name} is no JSON ({error.msg}: {where}): {_FORM}") from None
    except (RecursionError, ValueError):  # nested too deep, or a number of too many digits
        raise TraceError(f"{name} holds no token ids: {_FORM}") from None
    if fault := _fault(found):
        raise TraceError(f"{name}: {fault}: {_FORM}")
    return found


def _fault(found: Any) -> str:
    """What is wrong, or nothing."""
    if not isinstance(found, list):
        return f"the file holds {_kind(found)}"
    if not found:
        return "the list is empty"
    for number, sequence in enumerate(found):
        if not isinstance(sequence, list):
            one = " (a single sequence is a list in the list)" if type(sequence) is int else ""
            return f"sequence {number} is {_kind(sequence)}{one}"
        if not sequence:
            return f"sequence {number} is empty"
        for position, token in enumerate(sequence):
            if type(token) is not int:
                return f"token {position} of sequence {number} is {_kind(token)}"
            if token < 0:
                return f"token {position} of sequence {number} is {token}, and ids start at 0"
    return ""


def _kind(value: Any) -> str:
    match value:
        case dict():
            return "an object"
        case list():
            return "a list"
        case str():
            return f"the text {value[:20]!r}"
        case None | bool():
            return json.dumps(value)
        case _:
            return f"the number {value}"


def chosen(positions: str | None, sequences: Sequence[Sequence[int]]) -> Choice:
    """The tokens that `--positions` chooses of some sequences.

    Raises:
        TraceError: it is no list of positions, or chooses none, or more than a recording keeps.
    """
    try:
        choice = Choice.parse(None, positions)
    except TraceError as error:
        raise TraceError(f"--{error}") from None
    longest = max(map(len, sequences))
    count = sum(choice.has_position(i) for sequence in sequences for i in range(len(sequence)))
    if count == 0:
        raise TraceError(
            f"--positions {positions}: no sequence of --ids reaches there: the longest has "
            f"{longest} tokens, from 0 to {longest - 1}"
        )
    if count > MAX_TOKENS:
        raise TraceError(
            f"a recording keeps {MAX_TOKENS:,} tokens, and {count:,} are chosen: choose fewer with "
            "--positions, or record in several files"
        )
    return choice


def check_ids(name: Path, sequences: Sequence[Sequence[int]], config: Any, room: int = 0) -> None:
    """Refuse sequences that a model cannot run.

    Args:
        name: of the file.
        sequences: from `read_ids`.
        config: of the model.
        room: tokens that must fit behind each sequence.

    Raises:
        TraceError: naming the first token or sequence.
    """
    vocabulary, most = config.vocab_size, config.max_position_embeddings - room
    for number, sequence in enumerate(sequences):
        if max(sequence) >= vocabulary:
            position = next(i for i, token in enumerate(sequence) if token >= vocabulary)
            raise TraceError(
                f"--ids {name}: token {position} of sequence {number} is {sequence[position]}, and "
                f"the ids of this model end at {vocabulary - 1}: use its own tokenizer"
            )
        if len(sequence) > most:
            raise TraceError(
                f"--ids {name}: sequence {number} has {len(sequence):,} tokens, and this model "
                f"takes {most:,} here (max_position_embeddings): shorten it"
            )
