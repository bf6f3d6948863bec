"""`isomodels parity`: is every logprob of the engine, bit for bit, the trainer's?"""

import json
import signal
import sys
import tempfile
import traceback
from contextlib import ExitStack
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from isomodels.errors import CheckpointError, IsoError, UnsupportedError

DEFAULT_ARCH = "Qwen3ForCausalLM"


def parity(
    checkpoint: Annotated[
        Path | None,
        typer.Option(help="Hugging Face folder (config.json, *.safetensors)."),
    ] = None,
    arch: Annotated[
        str | None,
        typer.Option(
            help="HF class name. Without --checkpoint: a tiny random model of it "
            f"[default: {DEFAULT_ARCH}]. With one: what it must be."
        ),
    ] = None,
    dtype: Annotated[
        str | None,
        typer.Option(
            help="float32 or bfloat16 [default: the checkpoint's, or bfloat16]. A checkpoint of "
            "another dtype is cast into a temporary copy first."
        ),
    ] = None,
    device: Annotated[
        str, typer.Option(help="cpu or cuda: what vLLM and Megatron run on here.")
    ] = "cpu",
    seed: Annotated[int, typer.Option(min=0, help="Of prompts, sampling and random weights.")] = 0,
    json_file: Annotated[
        Path | None, typer.Option("--json", help="Also write the report as JSON.")
    ] = None,
) -> None:
    """Run the real vLLM engine and the real Megatron trainer on one checkpoint and compare every
    logprob by bit pattern, before and after a weight update.

    Exit code: 0 every case was entered and nothing differs; 1 a difference, or a case that was not
    entered; 2 bad input; 3 vLLM, Megatron or this command failed.

    Example: isomodels parity --arch MiMoForCausalLM --dtype float32
    """
    from isomodels.config import DTYPES
    from isomodels.parity.remote import ProcessError
    from isomodels.parity.report import as_json, print_report
    from isomodels.parity.run import run_parity

    if dtype is not None and dtype not in DTYPES:
        raise UnsupportedError(f"--dtype {dtype}: choose one of {', '.join(DTYPES)}")
    _check_writable(json_file)
    # Ending by a signal, too, must end the processes below and remove what they left.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))
    console, progress = Console(), Console(stderr=True)
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="isomodels-")))
        chosen = _choose(checkpoint, arch, dtype, seed, folder)
        status = stack.enter_context(progress.status("starting"))

        def say(what: str) -> None:
            status.update(what)
            if not progress.is_terminal:
                progress.print(what, highlight=False)

        try:
            report = run_parity(chosen, device=device, seed=seed, say=say)
        except IsoError:
            raise
        except Exception as error:  # an uncaught one would exit with 1, "a difference"
            if not isinstance(error, ProcessError):
                traceback.print_exc()
            typer.echo(f"error: {error}", err=True)
            raise typer.Exit(3) from None
        if checkpoint is not None:
            report.checkpoint = str(checkpoint)
    print_report(report, console)
    if json_file:
        json_file.write_text(json.dumps(as_json(report), indent=2, allow_nan=False) + "\n")
    if report.faults():
        raise typer.Exit(1)


def _choose(
    checkpoint: Path | None, arch: str | None, dtype: str | None, seed: int, folder: Path
) -> Path:
    """The checkpoint to run: as given, cast, or random."""
    from isomodels.checkpoint import convert_checkpoint
    from isomodels.config import DTYPES, read_config
    from isomodels.parity.checkpoints import random_checkpoint

    if checkpoint is None:
        name = arch or DEFAULT_ARCH
        return random_checkpoint(folder / "random", name, dtype or "bfloat16", seed)
    spec, config = read_config(checkpoint)
    if arch is not None and arch != spec.architecture:
        raise CheckpointError(f"{checkpoint} is {spec.architecture}, not {arch} (--arch)")
    if dtype is not None and dtype != config.dtype:
        return convert_checkpoint(checkpoint, folder / "cast", dtype=DTYPES[dtype]).path
    return checkpoint


def _check_writable(file: Path | None) -> None:
    """Before minutes of work, not after; an old report stays until there is a new one."""
    if file is None:
        return
    existed = file.exists()
    try:
        with file.open("a"):
            pass
    except OSError as error:
        raise CheckpointError(f"--json {file}: cannot be written ({error.strerror})") from None
    if not existed:
        file.unlink()
