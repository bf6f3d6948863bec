"""Which operations served, on each side, against those that its contract requests."""

from collections.abc import Mapping
from typing import Any

from isomodels.contract import Contract, differences
from isomodels.contract.served import ServedOperations, installed, served_faults


def answer(contract: Contract, served: ServedOperations | list[dict[str, Any]]) -> dict[str, Any]:
    """What a side says of itself after its runs, ready for another process.

    Args:
        contract: its own.
        served: its count, or what that gave in another process.
    """
    return {
        "contract": contract.to_json(),
        "installed": installed(contract),
        "served": served.ran() if isinstance(served, ServedOperations) else served,
    }


def operation_faults(requested: Contract, side: str, said: Mapping[str, Any]) -> list[str]:
    """Where requested, installed and served are not the same; empty if they are.

    Args:
        requested: the contract of the checkpoint on this device.
        side: "engine" or "trainer".
        said: its `answer`.
    """
    own = Contract.from_json(said["contract"], f"the {side}'s contract")
    found = [
        f"the {side}'s contract has {difference}"
        for difference in differences(own, requested)
        if difference.section != "deployment"
    ]
    found += [
        f"the {side}'s {name} was registered by {who}, not by isomodels"
        for name, who in said["installed"].items()
        if who != "isomodels"
    ]
    return found + served_faults(requested, said["served"], side)
