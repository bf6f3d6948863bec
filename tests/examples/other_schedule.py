"""grpo.py with a trainer whose contract has one schedule constant changed; the engine's is as ever.

python tests/examples/other_schedule.py OPERATION CONSTANT ARGUMENTS-OF-GRPO
"""

import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[2] / "examples" / "grpo"))

import command_line
import grpo

import isomodels.contract
from isomodels.kernels.schedule import SCHEDULES
from isomodels.sync import WeightSender


def main(operation: str, constant: str) -> None:
    """Train; the constant changes when the trainer states its contract, the engine is running."""
    contract_of, key = isomodels.contract.contract_of, (operation, "torch")

    def changed(*args: Any, **kwargs: Any) -> Any:
        constants = dict(SCHEDULES[key].constants)
        constants[constant] += 1
        SCHEDULES[key] = replace(SCHEDULES[key], constants=constants)
        return contract_of(*args, **kwargs)

    def sent(*args: Any, **kwargs: Any) -> None:
        raise AssertionError("weights were sent")

    isomodels.contract.contract_of = changed
    WeightSender.send = sent  # type: ignore[method-assign]
    command_line.run(grpo.train, None)


if __name__ == "__main__":
    operation, constant = sys.argv[1:3]
    del sys.argv[1:3]
    main(operation, constant)
