"""Which tokens to record. Imports no torch, so that a command can check its arguments at once."""

from dataclasses import dataclass

from isomodels.errors import TraceError

MAX_TOKENS = 1 << 16  # that a recording keeps
_REMEDY = "give numbers and ranges, such as 3,10:20,40:"


@dataclass(frozen=True)
class Choice:
    """Which tokens to record.

    Attributes:
        sequences: names, or parts of names; None: every sequence.
        positions: (first, end) of each stretch; None: every token.
    """

    sequences: tuple[str, ...] | None = None
    positions: tuple[tuple[int, int], ...] | None = None

    @staticmethod
    def parse(sequences: str | None, positions: str | None) -> "Choice":
        """From "NAME,NAME" and "3,10:20,40:"; None chooses all.

        Raises:
            TraceError: for positions that are no numbers or ranges, naming the first.
        """
        names = tuple(name for name in (sequences or "").split(",") if name) or None
        if positions is None:
            return Choice(names)
        try:
            return Choice(names, tuple(_stretch(part) for part in positions.split(",")))
        except ValueError as error:
            raise TraceError(f"positions {positions!r}: {error}: {_REMEDY}") from None

    @property
    def text(self) -> str | None:
        """The positions as `parse` reads them."""
        if self.positions is None:
            return None
        return ",".join(f"{first}:{end}" for first, end in self.positions)

    def has_sequence(self, name: str) -> bool:
        """Whether any token of a sequence may be chosen."""
        return self.sequences is None or any(part in name for part in self.sequences)

    def has_position(self, position: int) -> bool:
        """Whether a position is chosen."""
        if self.positions is None:
            return True
        return any(first <= position < end for first, end in self.positions)


def _stretch(text: str) -> tuple[int, int]:
    if not text.strip():
        raise ValueError("a part of it is empty")
    first, colon, end = (part.strip() for part in text.partition(":"))
    start = _number(first) if first or not colon else 0
    if not colon:
        return start, start + 1
    stop = _number(end) if end else 1 << 62
    if stop <= start:
        raise ValueError(f"{text.strip()} holds no token, since its end is not after its start")
    return start, stop


def _number(text: str) -> int:
    if not (text.isascii() and text.isdecimal() and len(text) < 19):
        raise ValueError(f"{text!r} is no position, which counts from 0")
    return int(text)
