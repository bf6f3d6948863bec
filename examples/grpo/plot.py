"""Compare the logs of two runs: one table on the terminal, one picture.

python examples/grpo/plot.py PICTURE isomodels=OUT1 stock=OUT2
"""

import argparse
import json
from collections.abc import Callable
from pathlib import Path

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt
from matplotlib.ticker import FixedLocator, MaxNLocator, PercentFormatter
from rich.console import Console
from rich.table import Table

_LEAST = 1e-8  # a logarithmic axis has no zero: it is drawn here


def read(folder: Path) -> list[dict]:
    """The lines of a run's log."""
    return [json.loads(line) for line in (folder / "log.jsonl").read_text().splitlines()]


def draw(picture: Path, runs: dict[str, list[dict]]) -> None:
    """Mean and largest |logprob difference|, share of ratios not 1 and of clipped ones, reward."""
    figure, (difference, share, reward) = plt.subplots(1, 3, figsize=(13, 3.8))
    for name, lines in runs.items():
        steps = [line["step"] for line in lines]
        means = [max(line["mean_difference"], _LEAST) for line in lines]
        largest = [max(line["max_difference"], _LEAST) for line in lines]
        off = [line["differ"] / line["tokens"] for line in lines]
        clipped = [line["clipped"] for line in lines]
        for axis, first, second, words in (
            (difference, means, largest, ("mean", "largest")),
            (share, off, clipped, ("not 1", "clipped")),
        ):  # where both are 0, the dashes show on the wide line
            (drawn,) = axis.plot(steps, first, lw=4, alpha=0.4, label=f"{name}, {words[0]}")
            axis.plot(steps, second, "--", color=drawn.get_color(), label=f"{name}, {words[1]}")
        reward.plot(steps, [line["reward"] for line in lines], label=name)
    powers = [_LEAST, *(10.0**n for n in range(-7, 1))]
    difference.set(yscale="log", ylim=(_LEAST / 2, 2), title="|logprob difference| of a token")
    difference.yaxis.set_major_locator(FixedLocator(powers))
    difference.yaxis.set_minor_locator(FixedLocator([]))
    difference.set_yticklabels(["0", *(f"1e{n}" for n in range(-7, 1))])
    share.set(ylim=(-0.03, 1.03), title="share of tokens whose ratio is")
    share.yaxis.set_major_formatter(PercentFormatter(1.0))
    reward.set(ylim=(-0.03, 1.03), title="mean reward")
    for axis in (difference, share, reward):
        axis.set_xlabel("step")
        axis.xaxis.set_major_locator(MaxNLocator(integer=True))
        axis.grid(alpha=0.3)
        axis.legend(fontsize=8)
    figure.tight_layout()
    figure.savefig(picture, dpi=110)


def table(runs: dict[str, list[dict]]) -> Table:
    """A column for each run."""
    shown = Table("", *runs)
    total = {name: sum(line["tokens"] for line in lines) for name, lines in runs.items()}

    def row(words: str, of: Callable[[str, list[dict]], str]) -> None:
        shown.add_row(words, *(of(name, lines) for name, lines in runs.items()))

    def mean(name: str, lines: list[dict]) -> str:
        return f"{sum(x['mean_difference'] * x['tokens'] for x in lines) / total[name]:.2g}"

    row("steps", lambda _, lines: str(len(lines)))
    row("answered tokens", lambda name, _: f"{total[name]:,}")
    row("whose ratio is not 1", lambda _, lines: f"{sum(x['differ'] for x in lines):,}")
    row("mean |logprob difference|", mean)
    row("largest", lambda _, lines: f"{max(x['max_difference'] for x in lines):.2g}")
    row("reward of the first step", lambda _, lines: f"{lines[0]['reward']:.2f}")
    row("of the last", lambda _, lines: f"{lines[-1]['reward']:.2f}")
    return shown


def main() -> None:
    """The command."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("picture", type=Path, help="file to write: .png, .svg or .pdf")
    parser.add_argument("runs", nargs="+", help="NAME=FOLDER")
    args = parser.parse_args()
    pairs = [run.partition("=") for run in args.runs]
    runs = {name: read(Path(folder)) for name, _, folder in pairs}
    Console().print(table(runs))
    draw(args.picture, runs)


if __name__ == "__main__":
    main()
