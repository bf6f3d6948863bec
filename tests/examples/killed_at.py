"""grpo.py, killed where it calls a function for the n-th time.

python tests/examples/killed_at.py MODULE:NAME N ARGUMENTS-OF-GRPO
"""

import os
import signal
import sys
from functools import reduce
from importlib import import_module
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[2] / "examples" / "grpo"))

import command_line
import grpo


def main(where: str, number: int) -> None:
    """Run it until then."""
    module, _, path = where.partition(":")
    *owners, name = path.split(".")
    owner = reduce(getattr, owners, grpo if module == "grpo" else import_module(module))
    function, calls = getattr(owner, name), 0

    def counted(*args: Any, **kwargs: Any) -> Any:
        nonlocal calls
        calls += 1
        if calls == number:
            os.kill(os.getpid(), signal.SIGKILL)
        return function(*args, **kwargs)

    setattr(owner, name, counted)
    command_line.run(grpo.train, None)


if __name__ == "__main__":
    where, number = sys.argv[1:3]
    del sys.argv[1:3]
    main(where, int(number))
elif __name__ == "__mp_main__":  # as grpo.py
    command_line.die_with_parent()
