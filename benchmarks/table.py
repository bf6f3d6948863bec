"""The benchmark table: h200.json holds the lines, h200.md shows them.

`python -m benchmarks.table FILE...` merges JSON files of other machines' runs into the table.

Each line carries the run it was measured in: date, device, versions, and a digest of the kernels'
source. A run replaces the rows that it timed and leaves the others with the run they came from.
"""

import datetime
import hashlib
import importlib.metadata
import json
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import torch

from benchmarks.harness import Timing

KERNELS = Path(__file__).parent.parent / "kernels"
_INTRODUCTION = """\
Ratio: the baseline's time over ours, of medians; where both fit one process, of CUDA graph replays
taken in turns. Spread: 20th to 80th percentile over the median, the wider of the two. A ratio below
its floor is marked **missed**. Run: what the line was measured on, listed below the table.
"""


def this_run() -> dict[str, str]:
    """What decides how comparable two lines are."""
    import triton

    run = {
        "date": str(datetime.date.today()),
        "device": torch.cuda.get_device_name(),
        "torch": torch.__version__,
        "triton": triton.__version__,
        "kernels": kernels_digest(),
    }
    for package in ("vllm", "megatron-core"):
        try:
            run[package] = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            continue
    return run


def kernels_digest() -> str:
    """Eight hex digits of the kernels' source: lines of one digest ran the same kernels."""
    digest = hashlib.sha256()
    for file in sorted(KERNELS.glob("*.py")):
        digest.update(file.name.encode() + b"\0" + file.read_bytes() + b"\0")
    return digest.hexdigest()[:8]


def record(timing: Timing, run: dict[str, str]) -> dict[str, Any]:
    """A timing as one line of the JSON file."""
    line: dict[str, Any] = {
        "row": timing.row,
        "shape": timing.shape,
        "baseline": timing.baseline,
        "ratio": round(timing.ratio, 4),
        "floor": timing.floor,
    }
    if not timing.mean:
        line["ours_us"] = round(1e3 * timing.ours_ms, 2)
        line["baseline_us"] = round(1e3 * timing.baseline_ms, 2)
        line["spread"] = round(timing.spread, 4)
    if timing.note:
        line["note"] = timing.note
    return {**line, "run": run}


def merge(old: Iterable[dict], new: Iterable[dict], order: Iterable[str] = ()) -> list[dict]:
    """The old lines, those of rows in `new` replaced by these; sorted by row as in `order`."""
    new = list(new)
    replaced = {line["row"] for line in new}
    lines = [line for line in old if line["row"] not in replaced] + new
    names = [*order, *(line["row"] for line in lines)]
    return sorted(lines, key=lambda line: names.index(line["row"]))


def missed(line: dict) -> bool:
    """Whether a line is below its floor."""
    return line["ratio"] < line["floor"]


def render(lines: list[dict]) -> str:
    """The table as Markdown."""
    runs: list[dict] = []
    for line in lines:
        if line["run"] not in runs:
            runs.append(line["run"])
    devices = sorted({run["device"] for run in runs})
    text = [f"# {', '.join(devices)}", "", _INTRODUCTION]
    text += [
        "| row | shape | baseline | ours (us) | baseline (us) | ratio | floor | spread | run | |",
        "|---|---|---|---|---|---|---|---|---|---|",
    ]
    for line in lines:
        times = ["", ""]
        if "ours_us" in line:
            times = [f"{line['ours_us']:,.1f}", f"{line['baseline_us']:,.1f}"]
        ratio = f"{line['ratio']:.2f}" + (" **missed**" if missed(line) else "")
        floor = f"{line['floor']:.2f}" if line["floor"] else ""
        spread = f"{line['spread']:.0%}" if "spread" in line else ""
        cells = [line["row"], line["shape"], line["baseline"], *times, ratio, floor, spread]
        text.append(f"| {' | '.join([*cells, _letter(runs, line), line.get('note', '')])} |")
    text += ["", "Runs:", ""]
    for run in runs:
        stated = ", ".join(f"{key} {value}" for key, value in run.items() if key != "device")
        text.append(f"* {_letter(runs, {'run': run})}: {stated}")
    return "\n".join(text) + "\n"


def _letter(runs: list[dict], line: dict) -> str:
    number = runs.index(line["run"])
    return chr(ord("a") + number) if number < 26 else str(number)


def update(folder: Path, timings: Iterable[Timing], order: Iterable[str] = ()) -> list[dict]:
    """Puts timings of this run into the table of `folder`; returns the new lines."""
    run = this_run()
    new = [record(timing, run) for timing in timings]
    file = folder / "h200.json"
    old = json.loads(file.read_text()) if file.exists() else []
    write(folder, merge(old, new, order))
    return new


def write(folder: Path, lines: list[dict]) -> None:
    """Writes both files."""
    folder.mkdir(parents=True, exist_ok=True)
    body = ",\n".join(json.dumps(line) for line in lines)
    (folder / "h200.json").write_text(f"[\n{body}\n]\n")
    (folder / "h200.md").write_text(render(lines))


def main(files: list[str]) -> None:
    """Merges tables made elsewhere (JSON files) into the one beside this file."""
    here = Path(__file__).parent
    lines = json.loads((here / "h200.json").read_text())
    order = list(dict.fromkeys(line["row"] for line in lines))
    for file in files:
        lines = merge(lines, json.loads(Path(file).read_text()), order)
    write(here, lines)


if __name__ == "__main__":
    main(sys.argv[1:])
