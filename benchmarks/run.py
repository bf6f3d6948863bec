"""Make the benchmark table: `python -m benchmarks.run [--rows a,b] [--out DIR]`.

Writes h200.json and h200.md; rows that were not asked for keep their lines. A row whose test fails
is not timed. Ends with status 1 if that happened or a line is below its floor.
"""

import argparse
import importlib
import subprocess
import sys
import traceback
from collections.abc import Sequence
from pathlib import Path

import torch

from benchmarks.harness import ROWS, Timing
from benchmarks.table import missed, render, update

# Importing a module registers its rows, in the order of the table.
MODULES = (
    "linear",
    "pointwise",
    "hybrid_pointwise",
    "logprob",
    "moe",
    "attention",
    "mla",
    "gated_delta",
    "engine",
    "train_step",
    "sync",
)
HERE = Path(__file__).parent


def load_rows() -> None:
    for name in MODULES:
        importlib.import_module(f"benchmarks.{name}")


def test_passes(test: str) -> bool:
    command = [sys.executable, "-m", "pytest", "-q", "-x", "-m", "gpu", "-p", "no:cacheprovider"]
    result = subprocess.run([*command, test], capture_output=True, text=True)
    if result.returncode:
        print(result.stdout[-3000:], result.stderr[-1000:], sep="\n")
    return result.returncode == 0


def run(names: Sequence[str], out: Path = HERE, skip_tests: bool = False) -> int:
    """Time these rows, put them into the table of `out`; the exit status."""
    tested: dict[str, bool] = {}
    timings: list[Timing] = []
    failed: list[str] = []
    for name in names:
        function, test = ROWS[name]
        if not skip_tests and not tested.setdefault(test, test_passes(test)):
            failed.append(f"{name}: not timed, its test fails: {test}")
            continue
        try:
            timings += list(function())
        except Exception:  # the other rows are still worth having
            failed.append(f"{name}: not timed\n{traceback.format_exc()}")
        torch.cuda.empty_cache()
    lines = update(out, timings, ROWS) if timings else []
    print(render(lines) if lines else "", *failed, sep="\n")
    below = [line for line in lines if missed(line)]
    for line in below:
        print(f"below its floor: {line['row']}, {line['shape']}, {line['baseline']}: "
              f"{line['ratio']:.2f} of {line['floor']:.2f}")  # fmt: skip
    return 1 if failed or below else 0


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rows", default="", help="names, comma separated; default all")
    parser.add_argument("--out", type=Path, default=HERE)
    parser.add_argument("--skip-tests", action="store_true", help="for a row in development")
    options = parser.parse_args()
    load_rows()
    names = options.rows.split(",") if options.rows else list(ROWS)
    if unknown := [name for name in names if name not in ROWS]:
        print(f"no such row: {', '.join(unknown)}; there are {', '.join(ROWS)}")
        return 2
    return run(names, options.out, options.skip_tests)


if __name__ == "__main__":
    sys.exit(main())
