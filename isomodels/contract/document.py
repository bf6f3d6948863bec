"""A contract as a document: three sections, canonical JSON, one SHA-256 each."""

import hashlib
import json
import struct
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from isomodels.errors import ContractError

FORMAT = 1
SECTIONS = ("semantic", "numerical_policy", "deployment")
_FLOAT = "float64 bits "


@dataclass(frozen=True)
class Contract:
    """What two sides must agree on.

    Values are what JSON has; a float is written as its bit pattern, so that none is rounded.

    Attributes:
        semantic: the logical model: architecture, config, parameters.
        numerical_policy: what decides the bits: operations of every case with their schedules,
            dtypes, device architecture, compilers, and the layouts that are shown to move no bit.
        deployment: what moves none: host, layout, versions, source of the kernels.
    """

    semantic: Mapping[str, Any]
    numerical_policy: Mapping[str, Any]
    deployment: Mapping[str, Any]

    @property
    def digests(self) -> dict[str, str]:
        """SHA-256 of each section's canonical JSON."""
        return {
            name: hashlib.sha256(canonical_json(getattr(self, name)).encode()).hexdigest()
            for name in SECTIONS
        }

    @property
    def stated(self) -> dict[str, str]:
        """The digests of the sections that are not empty."""
        return {name: digest for name, digest in self.digests.items() if getattr(self, name)}

    def to_dict(self) -> dict[str, Any]:
        """The document, ready for JSON."""
        sections = {name: canonical(getattr(self, name)) for name in SECTIONS}
        return {"format": FORMAT, **sections, "digests": self.digests}

    def to_json(self) -> str:
        """Canonical JSON: sorted keys, no spaces, floats as bit patterns."""
        return canonical_json(self.to_dict())

    @staticmethod
    def from_json(text: str | bytes, where: str = "the contract") -> "Contract":
        """Read a document and check its digests.

        Args:
            text: what `to_json` wrote, however it was laid out since.
            where: names it in messages.

        Raises:
            ContractError: no such document, or one whose digests are not those of its content.
        """
        try:
            document = json.loads(text)
        except (ValueError, RecursionError) as error:  # also of too many digits, or too deep
            raise ContractError(f"{where} is no JSON: {error}") from None
        if not isinstance(document, dict) or document.get("format") != FORMAT:
            raise ContractError(
                f"{where} is no contract of format {FORMAT}: "
                "write one with `isomodels contract show CHECKPOINT --json`"
            )
        missing = [n for n in SECTIONS if not isinstance(document.get(n), dict)]
        if missing:
            raise ContractError(f"{where} has no section {missing[0]}")
        contract = Contract(*(document[name] for name in SECTIONS))
        if document.get("digests") != contract.digests:
            raise ContractError(
                f"{where}: its digests are not those of its content; it was changed by hand or cut"
            )
        return contract


def canonical(value: Any) -> Any:
    """The value with sorted keys and floats as bit patterns.

    Raises:
        TypeError: something that JSON does not have.
    """
    if isinstance(value, Mapping):
        return {str(key): canonical(value[key]) for key in sorted(value, key=str)}
    if isinstance(value, list | tuple):
        return [canonical(item) for item in value]
    if isinstance(value, float):
        return _FLOAT + struct.pack(">d", value).hex()
    if isinstance(value, str):
        return str.__str__(value)  # torch's version is a str with an order of its own
    if value is None or isinstance(value, int):
        return value
    raise TypeError(f"a contract cannot hold {type(value).__name__} {value!r}")


def canonical_json(value: Any) -> str:
    """`canonical` as text: one text for one content."""
    return json.dumps(canonical(value), sort_keys=True, separators=(",", ":"), ensure_ascii=True)


def readable(value: Any) -> str:
    """A value for people: bit patterns of floats with the number behind them."""
    if isinstance(value, str) and value.startswith(_FLOAT):
        number = struct.unpack(">d", bytes.fromhex(value.removeprefix(_FLOAT)))[0]
        return f"{number!r} ({value})"
    return json.dumps(value, sort_keys=True)
