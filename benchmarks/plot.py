"""The table as one picture: a place for each line, so that no shape can hide behind a mean.

python -m benchmarks.plot [PICTURE]    (needs requirements/examples.txt)
"""

import json
import sys
from pathlib import Path

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt
from matplotlib.axes import Axes
from matplotlib.ticker import FixedLocator, NullLocator, StrMethodFormatter

from benchmarks.table import missed

HERE = Path(__file__).parent
_BANDWIDTH = "measured memory bandwidth"
# What a mark says: (in words, colour, whether a line is of this kind).
_KINDS = (
    ("below its floor", "tab:red", missed),
    ("against a plain copy of as many bytes", "tab:gray", lambda x: x["baseline"] == _BANDWIDTH),
    ("against the library a user would run", "tab:blue", lambda x: True),
)


def _kind(line: dict) -> int:
    return next(i for i, (_, _, belongs) in enumerate(_KINDS) if belongs(line))


def draw(lines: list[dict], picture: Path) -> None:
    """Writes the ratios of all timed lines, a row of the picture for each row of the table.

    Args:
        lines: as `benchmarks.table.record` makes them; means are left out, their parts are in.
        picture: file to write: .png, .svg or .pdf.
    """
    timed = [line for line in lines if "ours_us" in line]
    rows = list(dict.fromkeys(line["row"] for line in timed))
    height = 0.26 * len(rows) + 1.0
    figure, axis = plt.subplots(figsize=(9, height), layout="constrained")
    for kind in reversed(range(len(_KINDS))):  # what is below its floor is drawn above the rest
        words, colour, _ = _KINDS[kind]
        chosen = [line for line in timed if _kind(line) == kind]
        places = [rows.index(line["row"]) for line in chosen]
        axis.scatter(
            [line["ratio"] for line in chosen],
            places,
            s=26,
            color=colour,
            alpha=0.6,
            lw=0,
            label=words,
        )
    _label(axis, rows)
    figure.savefig(picture, dpi=110)
    plt.close(figure)


def _label(axis: Axes, rows: list[str]) -> None:
    axis.set(xscale="log", ylim=(len(rows) - 0.4, -0.6))
    axis.xaxis.set_major_locator(FixedLocator([0.1, 0.25, 0.5, 0.7, 1, 1.4, 2, 4, 10, 20]))
    axis.xaxis.set_minor_locator(NullLocator())
    axis.xaxis.set_major_formatter(StrMethodFormatter("{x:g}"))
    axis.set_yticks(range(len(rows)), rows)
    axis.set_xlabel("time of the baseline over ours: right of 1 isomodels is faster")
    axis.axvline(1, color="black", lw=1)
    axis.grid(alpha=0.3)
    axis.legend(loc="upper left", fontsize=8)


if __name__ == "__main__":
    table = json.loads((HERE / "h200.json").read_text())
    draw(table, Path(sys.argv[1]) if len(sys.argv) > 1 else HERE / "h200.png")
