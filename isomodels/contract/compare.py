"""What differs between two contracts, and the refusal."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from isomodels.contract.document import SECTIONS, Contract, canonical, readable
from isomodels.errors import ContractError

_ABSENT = "(absent)"
_SHOWN = 5


@dataclass(frozen=True)
class Difference:
    """One value that two contracts state differently.

    Attributes:
        section: whose digest it moves.
        path: where in the section, keys joined by dots.
        left, right: the two values, readable.
    """

    section: str
    path: str
    left: str
    right: str

    def __str__(self) -> str:
        """One line."""
        return f"{self.section}.{self.path}: {self.left} against {self.right}"


def differences(left: Contract, right: Contract) -> list[Difference]:
    """Everything that differs, in the order of sections and paths; equal digests give none."""
    return [
        Difference(section, path, *values)
        for section in SECTIONS
        for path, *values in _walk(
            canonical(getattr(left, section)), canonical(getattr(right, section)), ""
        )
    ]


def _walk(left: Any, right: Any, path: str) -> Iterator[tuple[str, str, str]]:
    if isinstance(left, Mapping) and isinstance(right, Mapping):
        for key in sorted({*left, *right}):
            inner = f"{path}.{key}" if path else key
            if key not in left:
                yield inner, _ABSENT, readable(right[key])
            elif key not in right:
                yield inner, readable(left[key]), _ABSENT
            else:
                yield from _walk(left[key], right[key], inner)
    elif left != right or type(left) is not type(right):
        yield path, readable(left), readable(right)


def require_same(trainer: Contract, engine: Contract) -> None:
    """Go on only if the two sides compute the same model with the same bits.

    Deployments may differ: that is what they are for. But each side's degrees of parallelism must
    be among those that the policy claims to move no bit.

    Raises:
        ContractError: naming what differs, the first values in full.
    """
    found = [d for d in differences(trainer, engine) if d.section != "deployment"]
    if not found:
        _require_claimed("trainer", trainer)
        _require_claimed("engine", engine)
        return
    moved = ", ".join(dict.fromkeys(d.section for d in found))
    shown = "; ".join(str(d) for d in found[:_SHOWN])
    more = f"; and {len(found) - _SHOWN} more" if len(found) > _SHOWN else ""
    raise ContractError(
        f"trainer and engine differ in {moved} (trainer against engine): {shown}{more}. "
        "Start both from the same checkpoint config with the same isomodels, torch and Triton on "
        "the same kind of device"
    )


def _require_claimed(side: str, contract: Contract) -> None:
    host = contract.deployment.get("host")
    if host is None:
        raise ContractError(
            f"the {side}'s contract states no deployment, and so no degrees of parallelism: make "
            "it with isomodels.contract.contract_of, or take the host's own"
        )
    for kind, claimed in contract.numerical_policy["layouts"].items():
        degree = host.get(kind, 1)
        if degree not in claimed:
            raise ContractError(
                f"the {side}'s {kind} of {degree} is not shown to keep the bits: "
                f"use {', '.join(map(str, claimed))}"
            )
