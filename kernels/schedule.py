"""What defines an operation's rounding, as data.

A schedule holds the constants that decide the bits of an operation: how K is cut, block lengths,
the order of sums, accumulation dtypes. Changing one is a new version of the operation. Constants
that cannot move a bit (tile shapes on a GPU, warps, stages) do not belong here.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field


@dataclass(frozen=True)
class Schedule:
    """The identity of one operation on one backend.

    Attributes:
        operation: name under the `isomodels::` namespace.
        backend: "torch" (CPU) or "triton" (GPU).
        version: raised whenever the bits of any output may change.
        constants: the numbers and names that define the rounding.
    """

    operation: str
    backend: str
    version: int
    constants: Mapping[str, int | str] = field(default_factory=dict)


SCHEDULES: dict[tuple[str, str], Schedule] = {}


def declare(schedule: Schedule) -> Schedule:
    """Make a schedule known to the contract; one schedule for one operation and backend."""
    key = (schedule.operation, schedule.backend)
    if key in SCHEDULES and SCHEDULES[key] != schedule:
        raise ValueError(f"two schedules for {key[0]} on backend {key[1]}")
    SCHEDULES[key] = schedule
    return schedule
