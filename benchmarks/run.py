"""Make the benchmark table: `PYTHONPATH=. python -m benchmarks.run [--rows a,b] [--out DIR]`.

Writes h200.json (a list of row, shape, baseline, ratio, floor) and h200.md. A row whose kernel
test fails is not timed: the command ends with status 1 after the other rows.
"""

import argparse
import datetime
import importlib
import json
import subprocess
import sys
from pathlib import Path

import torch
import triton

from benchmarks.harness import ROWS, Timing, bandwidth

# Importing a module registers its rows; one that does not exist yet is left out.
MODULES = ("linear", "pointwise", "logprob", "attention")


def load_rows() -> None:
    for name in MODULES:
        if (Path(__file__).parent / f"{name}.py").exists():
            importlib.import_module(f"benchmarks.{name}")


def test_passes(test: str) -> bool:
    command = [sys.executable, "-m", "pytest", "-q", "-x", "-m", "gpu", "-p", "no:cacheprovider"]
    result = subprocess.run([*command, test], capture_output=True, text=True)
    if result.returncode:
        print(result.stdout[-3000:], result.stderr[-1000:], sep="\n")
    return result.returncode == 0


def table(timings: list[Timing]) -> str:
    versions = f"torch {torch.__version__}, Triton {triton.__version__}"
    lines = [
        f"# {torch.cuda.get_device_name()}",
        "",
        f"{datetime.date.today()}, {versions}. Ratio: the baseline's time over ours, medians of "
        "replays taken in turns in one process. Spread: 20th to 80th percentile over the median. "
        f"A large copy moved {bandwidth() / 1e9:.2f} TB/s.",
        "",
        "| row | shape | baseline | ours (us) | baseline (us) | ratio | floor | spread |",
        "|---|---|---|---|---|---|---|---|",
    ]
    lines += [
        f"| {t.row} | {t.shape} | {t.baseline} | {1e3 * t.ours_ms:.1f} | "
        f"{1e3 * t.baseline_ms:.1f} | {t.ratio:.2f} | {t.floor:.2f} | {t.spread:.0%} |"
        + (f" {t.note}" if t.note else "")
        for t in timings
    ]
    return "\n".join(lines) + "\n"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rows", default="", help="names, comma separated; default all")
    parser.add_argument("--out", type=Path, default=Path(__file__).parent)
    parser.add_argument("--skip-tests", action="store_true", help="for a row in development")
    options = parser.parse_args()
    load_rows()
    names = options.rows.split(",") if options.rows else list(ROWS)
    if unknown := [name for name in names if name not in ROWS]:
        print(f"no such row: {', '.join(unknown)}; there are {', '.join(ROWS)}")
        return 2
    tested: dict[str, bool] = {}
    timings: list[Timing] = []
    for name in names:
        function, test = ROWS[name]
        if not options.skip_tests and not tested.setdefault(test, test_passes(test)):
            print(f"{name}: not timed, its test fails: {test}")
            continue
        timings += list(function())
        torch.cuda.empty_cache()
    keys = ("row", "shape", "baseline", "ratio", "floor")
    records = [{key: getattr(t, key) for key in keys} for t in timings]
    options.out.mkdir(parents=True, exist_ok=True)
    (options.out / "h200.json").write_text(json.dumps(records, indent=1) + "\n")
    (options.out / "h200.md").write_text(table(timings))
    print(table(timings))
    return 0 if all(tested.values()) else 1


if __name__ == "__main__":
    raise SystemExit(main())
