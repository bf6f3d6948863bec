"""`isomodels parity`: is every logprob of the engine, bit for bit, the trainer's?"""

import json
import signal
import sys
import tempfile
import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console

from isomodels.cli.arguments import (
    Dtype,
    Host,
    HostDevice,
    JsonFile,
    Workload,
    check_host,
    check_json_file,
    write_report,
)
from isomodels.cli.files import check_folder
from isomodels.errors import CheckpointError, UnsupportedError
from isomodels.registry import find_spec

if TYPE_CHECKING:
    from isomodels.megatron.degrees import Degrees

DEFAULT_ARCH = "Qwen3ForCausalLM"
_ALONE = "tp1"  # a layout of one process


def parity(
    checkpoint: Annotated[
        Path | None,
        typer.Option(help="Hugging Face folder (config.json, *.safetensors)."),
    ] = None,
    config: Annotated[
        Path | None,
        typer.Option(
            help="Folder with a config.json: random weights of these shapes are drawn on the "
            "device, with the logits' spread of a trained model."
        ),
    ] = None,
    num_layers: Annotated[
        int | None,
        typer.Option(min=1, help="With --config: so many layers instead of the config's."),
    ] = None,
    forward_only: Annotated[
        bool,
        typer.Option(
            "--forward-only",
            help="With --config: for a model that fits the device only once. Both sides draw the "
            "weights, one after the other; nothing is trained, stored, or compared with stock.",
        ),
    ] = False,
    arch: Annotated[
        str | None,
        typer.Option(
            metavar="<name>",
            help="Architecture: its class or its model type, as config.json names them. Alone: a "
            f"tiny random model of it [default: {DEFAULT_ARCH}]. With --checkpoint or --config: "
            "what it must be. A wrong name lists all.",
        ),
    ] = None,
    dtype: Annotated[
        Dtype | None,
        typer.Option(
            help="What both sides compute in [default: the checkpoint's, or bfloat16]. A "
            "checkpoint of another dtype is cast into a temporary copy first."
        ),
    ] = None,
    device: Annotated[
        HostDevice, typer.Option(help="What vLLM and Megatron run on here.")
    ] = HostDevice.cpu,
    workload: Annotated[
        Workload,
        typer.Option(
            help="short: the least that enters every case. quick: sequences to 512 tokens, batches "
            "to 8, some 40,000 comparisons. full: to 8,192 tokens and 256, over a million; for a "
            "GPU."
        ),
    ] = Workload.quick,
    max_num_batched_tokens: Annotated[
        int | None,
        typer.Option(min=16, help="Rows of an engine's step [default: 128 or 2048]."),
    ] = None,
    trainer_layout: Annotated[
        str,
        typer.Option(
            metavar="<layout>",
            help="How the trainer's ranks, a process each, share the model: any of tpN (tensor), "
            "sp (sequence), ppN (pipeline), vppN (virtual stages), epN (expert), dpN (data), with "
            "commas, such as tp2,sp,pp2.",
        ),
    ] = _ALONE,
    engine_layout: Annotated[
        str,
        typer.Option(
            metavar="<layout>",
            help="The same of the engine's workers: tpN, or tpN,epN with the same N.",
        ),
    ] = _ALONE,
    stock: Annotated[
        bool, typer.Option(help="Also compare vLLM's and transformers' own models.")
    ] = True,
    seed: Annotated[int, typer.Option(min=0, help="Of prompts, sampling and random weights.")] = 0,
    json_file: JsonFile = None,
) -> None:
    """Compare every logprob of engine and trainer by bit pattern.

    Runs the real vLLM engine and the real Megatron trainer on one checkpoint, before and after a
    weight update.

    Exit code: 0 every case was entered and nothing differs; 1 a difference, or a case that was not
    entered; 2 bad input; 3 vLLM, Megatron or this command failed.

    vLLM's model runner is chosen as vLLM chooses it: VLLM_USE_V2_MODEL_RUNNER=0 or 1.

    Example: isomodels parity --arch MiMoForCausalLM --trainer-layout tp2,sp,pp2
    """
    if forward_only and (trainer_layout, engine_layout) != (_ALONE, _ALONE):
        raise UnsupportedError("--forward-only runs no parallel layout: leave out the layouts")
    _check_model(checkpoint, config, num_layers, forward_only)
    arch = None if arch is None else _named(arch)
    check_json_file(json_file)
    of_trainer, of_engine = _layouts(trainer_layout, engine_layout)
    from isomodels.parity.checkpoints import random_checkpoint
    from isomodels.parity.forward_only import run_forward_only
    from isomodels.parity.remote import ProcessError
    from isomodels.parity.report import as_json, print_report
    from isomodels.parity.run import check_device, check_engine_layout, run_parity
    from isomodels.parity.workload import WORKLOADS

    sizes = WORKLOADS[workload.value]
    if max_num_batched_tokens is not None:
        sizes = replace(sizes, max_num_batched_tokens=max_num_batched_tokens)
    check_engine_layout(of_engine)
    check_device(device.value)
    with ExitStack() as stack:
        stack.enter_context(_exit_by_sigterm())
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="isomodels-")))
        say = stack.enter_context(_status("making the checkpoint"))
        if checkpoint is not None:
            chosen = _given(checkpoint, arch, dtype, folder)
        else:
            write = _config_alone if forward_only else random_checkpoint
            chosen = _drawn(config, num_layers, arch, dtype, seed, device.value, folder, write)
        how: dict[str, Any] = {"device": device.value, "seed": seed, "workload": sizes, "say": say}
        if not forward_only:
            how |= {"stock": stock, "trainer_layout": of_trainer, "engine_layout": of_engine}
        try:
            report = (run_forward_only if forward_only else run_parity)(chosen, **how)
        except ProcessError as error:
            typer.echo(f"error: {error}", err=True)
            raise typer.Exit(3) from None
        if (source := checkpoint or config) is not None:
            report.checkpoint = str(source)
    as_text = json.dumps(as_json(report), indent=2, allow_nan=False)
    write_report(json_file, as_text, lambda: print_report(report, Console()))
    if report.faults():
        raise typer.Exit(1)


@contextmanager
def _status(first: str) -> Iterator[Callable[[str], None]]:
    """Tell on stderr what is going on, `first` to begin with; yields what tells the next."""
    console = Console(stderr=True)
    with console.status(first) as status:

        def say(what: str) -> None:
            status.update(what)
            if not console.is_terminal:
                console.print(what, highlight=False)

        yield say


@contextmanager
def _exit_by_sigterm() -> Iterator[None]:
    """Ending by a signal, too, ends the processes that were started and removes what they left."""
    if threading.current_thread() is not threading.main_thread():
        yield  # signals are the main thread's
        return
    before = signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before or signal.SIG_DFL)  # None: not from Python


def _check_model(
    checkpoint: Path | None,
    config: Path | None,
    num_layers: int | None,
    forward_only: bool,
) -> None:
    """Refuse what can be refused without torch."""
    if checkpoint is not None and config is not None:
        raise UnsupportedError("--checkpoint and --config are two models: give one of them")
    for given, option in ((num_layers is not None, "num-layers"), (forward_only, "forward-only")):
        if given and config is None:
            raise UnsupportedError(f"--{option} is only for --config: give that too")
    for name, folder in (("--checkpoint", checkpoint), ("--config", config)):
        if folder is not None:
            check_folder(folder, name, config=True)


def _named(arch: str) -> str:
    """The class of an architecture that `--arch` names."""
    try:
        return find_spec(arch).architecture
    except UnsupportedError as error:
        raise UnsupportedError(f"--arch: {error}") from None


def _layouts(trainer: str, engine: str) -> tuple["Degrees", "Degrees"]:
    """Those of the trainer and of the engine, whose packages must be installed."""
    from isomodels.megatron.degrees import Degrees

    found = []
    for side, text in (("trainer", trainer), ("engine", engine)):
        try:
            found.append(Degrees.parse(text))
        except UnsupportedError as error:
            raise UnsupportedError(f"--{side}-layout: {error}") from None
    check_host(Host.vllm)
    return found[0], found[1]


def _given(checkpoint: Path, arch: str | None, dtype: Dtype | None, folder: Path) -> Path:
    """The user's checkpoint, or a copy cast to another dtype."""
    from isomodels.checkpoint import open_checkpoint
    from isomodels.config import DTYPES
    from isomodels.conversion import convert_checkpoint

    opened = open_checkpoint(checkpoint)  # a damaged file is found before the hosts start
    _check_arch(checkpoint, opened.spec.architecture, arch)
    if dtype is not None and dtype.value != opened.config.dtype:
        return convert_checkpoint(checkpoint, folder / "cast", dtype=DTYPES[dtype.value]).path
    return checkpoint


def _drawn(
    config: Path | None,
    num_layers: int | None,
    arch: str | None,
    dtype: Dtype | None,
    seed: int,
    device: str,
    folder: Path,
    write: Callable[..., Path],
) -> Path:
    """A checkpoint with random weights, by `random_checkpoint` or as it."""
    from isomodels.config import load_config_dict, read_config
    from isomodels.parity.checkpoints import tiny_config

    stated = "bfloat16"
    if config is None:
        raw = tiny_config(arch or DEFAULT_ARCH)
    else:
        raw = load_config_dict(config)
        spec, parsed = read_config(config)
        _check_arch(config, spec.architecture, arch)
        stated = parsed.dtype
        if num_layers is not None:
            raw = _with_layers(raw, num_layers, config)
    return write(folder / "random", raw, dtype.value if dtype else stated, seed, device)


def _with_layers(raw: dict[str, Any], count: int, config: Path) -> dict[str, Any]:
    """A config.json of so many layers, the first of those it had."""
    changed = raw | {"num_hidden_layers": count}
    for field in ("layer_types", "mlp_layer_types"):
        kinds = raw.get(field)
        if kinds and count > len(kinds):
            raise UnsupportedError(
                f"--num-layers {count}: {config} states the kinds of {len(kinds)} layers "
                f"({field}): ask for no more"
            )
        if kinds:
            changed[field] = kinds[:count]
    if raw.get("mlp_only_layers"):
        changed["mlp_only_layers"] = [i for i in raw["mlp_only_layers"] if i < count]
    return changed


def _config_alone(path: Path, raw: dict[str, Any], dtype: str, *_: Any) -> Path:
    """Instead of a checkpoint: what the sides need that draw their weights."""
    path.mkdir()
    raw = {k: v for k, v in raw.items() if k != "torch_dtype"} | {"dtype": dtype}
    (path / "config.json").write_text(json.dumps(raw, indent=2))
    return path


def _check_arch(source: Path, architecture: str, asked: str | None) -> None:
    if asked not in (None, architecture):
        raise CheckpointError(f"{source} is {architecture}, not {asked} (--arch)")
