"""A contract as a document: three sections, canonical JSON, one SHA-256 each."""

import hashlib
import json
import struct
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from isomodels.errors import ContractError

FORMAT = 1
SECTIONS = ("semantic", "numerical_policy", "deployment")
_FLOAT = "float64 bits "
_ANY = "*"
_KINDS = {dict: "object", list: "list", str: "text", int: "whole number"}
# What readers of a stated section go by; what else it holds is compared and no more.
_CALLS = {_ANY: {_ANY: {_ANY: int}}}
_SHAPES: dict[str, Any] = {
    "semantic": {"architecture": str, "config": dict, "parameters": {_ANY: [int]}},
    "numerical_policy": {
        "dtype": str,
        "pinned": {_ANY: str},
        "device": {_ANY: str},
        "cases": {_ANY: str},
        "forms": _CALLS,
        "schedules": {_ANY: {"version": int, "constants": dict}},
        "layouts": {_ANY: [int]},
    },
    "deployment": {"host": dict},
}


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
            json.dumps(document, ensure_ascii=False).encode()  # halves of characters have no text
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
        if document.get("digests") != _digests(contract, where):
            raise ContractError(
                f"{where}: its digests are not those of its content; it was changed by hand or cut"
            )
        for name in SECTIONS:
            if document[name] and (wrong := _misshapen(document[name], _SHAPES[name], name)):
                raise ContractError(f"{where}: {wrong}, as in no contract that isomodels writes")
        return contract


def _digests(contract: Contract, where: str) -> dict[str, str]:
    try:
        return contract.digests
    except RecursionError:
        raise ContractError(f"{where} is nested too deeply") from None


def _misshapen(value: Any, shape: Any, path: str) -> str | None:
    """The first place whose value is not of the kind that is written there; None: all are."""
    kind: Any = shape if isinstance(shape, type) else type(shape)
    if type(value) is not kind:
        return f"{path} is no {_KINDS[kind]}"
    if not isinstance(shape, dict | list):
        return None
    below: Iterable[tuple[str, Any, Any]]
    if isinstance(shape, list):
        below = ((f"{path}[{i}]", one, shape[0]) for i, one in enumerate(value))
    elif _ANY in shape:
        below = ((f"{path}.{key}", value[key], shape[_ANY]) for key in value)
    else:
        if absent := [key for key in shape if key not in value]:
            return f"{path} has no {absent[0]}"
        below = ((f"{path}.{key}", value[key], of) for key, of in shape.items())
    found = (_misshapen(one, of, name) for name, one, of in below)
    return next((wrong for wrong in found if wrong), None)


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
