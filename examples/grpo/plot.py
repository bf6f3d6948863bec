"""Draw the logs of two runs into one picture.

python examples/grpo/plot.py PICTURE isomodels=OUT1 stock=OUT2
"""

import argparse
import json
from pathlib import Path

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt

_LEAST = 1e-9  # a logarithmic axis has no zero: it is drawn here, and labelled


def read(folder: Path) -> list[dict]:
    """The lines of a run's log."""
    return [json.loads(line) for line in (folder / "log.jsonl").read_text().splitlines()]


def draw(picture: Path, runs: dict[str, list[dict]]) -> None:
    """Mean and largest |logprob difference|, share of ratios not 1 and of clipped ones, reward."""
    figure, (difference, share, reward) = plt.subplots(1, 3, figsize=(13, 3.8))
    for name, lines in runs.items():
        steps = [line["step"] for line in lines]
        means = [max(line["mean_difference"], _LEAST) for line in lines]
        (drawn,) = difference.plot(steps, means, label=f"{name}, mean")
        largest = [max(line["max_difference"], _LEAST) for line in lines]
        difference.plot(steps, largest, "--", color=drawn.get_color(), label=f"{name}, largest")
        off = [line["differ"] / line["tokens"] for line in lines]
        (drawn,) = share.plot(steps, off, label=f"{name}, not 1")
        clipped = [line["clipped"] for line in lines]
        share.plot(steps, clipped, "--", color=drawn.get_color(), label=f"{name}, clipped")
        reward.plot(steps, [line["reward"] for line in lines], label=name)
    difference.set_yscale("log")
    difference.set_title(f"|logprob difference| (0 is drawn at {_LEAST:g})")
    share.set_title("share of tokens, by their ratio")
    reward.set_title("reward")
    for axis in (difference, share, reward):
        axis.set_xlabel("step")
        axis.legend(fontsize=8)
    figure.tight_layout()
    figure.savefig(picture, dpi=120)


def main() -> None:
    """The command."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("picture", type=Path, help="file to write: .png, .svg or .pdf")
    parser.add_argument("runs", nargs="+", help="NAME=FOLDER")
    args = parser.parse_args()
    pairs = [run.partition("=") for run in args.runs]
    draw(args.picture, {name: read(Path(folder)) for name, _, folder in pairs})


if __name__ == "__main__":
    main()
