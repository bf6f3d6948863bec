"""Options of grpo.py and stock.py, and the folder of a run."""

import argparse
import ctypes
import fcntl
import json
import multiprocessing
import os
import signal
import sys
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import IO

import torch

from isomodels.errors import CheckpointError, IsoError


def run(main: Callable[[argparse.Namespace], None], description: str | None) -> None:
    """Call `main` with the options; an error that names its remedy is shown without a traceback."""
    warnings.simplefilter("ignore")  # libraries tell of their optional parts
    try:
        args = parse(description)
        with claim(args):
            main(args)
    except IsoError as error:
        sys.exit(f"{type(error).__name__}: {error}")


def die_with_parent() -> None:
    """End this process as soon as its parent ends, even if that is killed: no engine is left."""
    ctypes.CDLL(None).prctl(1, signal.SIGKILL)  # PR_SET_PDEATHSIG, of Linux
    parent = multiprocessing.parent_process()
    if parent is not None and os.getppid() != parent.pid:  # it has ended already
        os._exit(1)


def parse(description: str | None) -> argparse.Namespace:
    """The options."""
    kinds = (argparse.RawDescriptionHelpFormatter, argparse.ArgumentDefaultsHelpFormatter)
    form = type("Form", kinds, {})  # both: the text as it is, and the defaults
    parser = argparse.ArgumentParser(description=description, formatter_class=form)
    add = parser.add_argument
    add("out", type=Path, help="folder for the log, the state and the new base model")
    add("--checkpoint", type=Path, help="start here, in place of a small new model in OUT/base")
    add("--engine", choices=("isomodels", "vllm"), default="isomodels", help="model in vLLM")
    device = "cuda" if torch.cuda.is_available() else "cpu"
    add("--device", choices=("cuda", "cpu"), default=device, help="of both sides")
    add("--dtype", choices=("bfloat16", "float32"), default="bfloat16", help="of the weights")
    add("--steps", type=int, default=20, help="optimizer steps")
    add("--prompts", type=int, default=16, help="prompts a step")
    add("--group", type=int, default=8, help="answers to a prompt")
    add("--behind", type=int, default=0, help="steps between rollout and update")
    add("--lr", type=float, default=3e-4, help="learning rate of Adam")
    add("--warm-up", type=int, default=60, help="supervised steps of a new model")
    add("--seed", type=int, default=0, help="of prompts and answers")
    add("--resume", action="store_true", help="go on from OUT/state, with the options of before")
    args = parser.parse_args()
    least = {"steps": 1, "prompts": 1, "group": 2, "behind": 0, "lr": 0, "warm_up": 0, "seed": 0}
    for name, value in least.items():
        if not getattr(args, name) >= value:
            parser.error(f"--{name.replace('_', '-')} must be at least {value}")
    if args.behind >= args.steps:
        parser.error("--behind must be less than --steps: nothing would be trained on")
    if args.behind and args.resume:
        parser.error("--resume keeps no rollouts that wait for their update: leave out --behind")
    if args.checkpoint and not (args.checkpoint / "config.json").is_file():
        parser.error(f"--checkpoint {args.checkpoint} has no config.json")
    return args


def claim(args: argparse.Namespace) -> IO[str]:
    """Keep the options of a new run in OUT, or compare those of the run that is resumed.

    Returns:
        An open file, which locks OUT; no process that is started from here inherits the lock.
    """
    try:
        args.out.mkdir(parents=True, exist_ok=True)
        file = (args.out / "options.json").open("a+")
    except OSError as error:
        raise CheckpointError(f"cannot write into {args.out}: {error.strerror}") from None
    try:
        fcntl.lockf(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        raise CheckpointError(f"another run writes into {args.out}: give another folder") from None
    file.seek(0)
    before, log = file.read(), args.out / "log.jsonl"
    free = ("out", "steps", "resume")  # may change
    given = {name: str(value) for name, value in vars(args).items() if name not in free}
    if args.resume:
        try:
            kept = json.loads(before)
        except ValueError:
            raise CheckpointError(f"{file.name} tells of no run: leave out --resume") from None
        changed = [f"{k} {kept.get(k)}, now {v}" for k, v in given.items() if kept.get(k) != v]
        if changed:
            raise CheckpointError(f"{args.out} was begun with other options: {'; '.join(changed)}")
    elif log.exists() and log.stat().st_size:
        raise CheckpointError(f"{args.out} holds a run: give another folder, or --resume")
    else:
        file.truncate(0)
        file.write(json.dumps(given))
        file.flush()
    return file


def cut_log(log: Path, steps: int) -> None:
    """Leave the lines of the steps that the state has; a killed run may have logged one more."""
    log.touch()
    lines = log.read_bytes().splitlines(keepends=True)
    whole = [line for line in lines[:steps] if line.endswith(b"}\n")]
    if len(whole) < steps or len(lines) > steps + 1:
        raise CheckpointError(
            f"{log} has {len(lines)} lines, {len(whole)} of them whole, and the state is of "
            f"{steps} steps: one of them is damaged; begin anew in another folder"
        )
    os.truncate(log, sum(map(len, whole)))
