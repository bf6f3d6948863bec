"""`isomodels trace`: digests of every operation for chosen tokens, and where two sides part."""

import json as json_module
from collections.abc import Sequence
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from isomodels.cli.arguments import Host, check_host, device_option
from isomodels.cli.files import check_folder, check_recording, check_written
from isomodels.cli.sequences import check_ids, chosen, read_ids
from isomodels.errors import UnsupportedError
from isomodels.trace.choice import Choice

if TYPE_CHECKING:
    from isomodels.trace import Comparison

trace = typer.Typer(
    no_args_is_help=True,
    rich_markup_mode=None,
    help="Find the first operation whose output differs.",
)
_SHOWN = 5


@trace.command()
def record(
    checkpoint: Annotated[Path, typer.Argument(help="Hugging Face folder.")],
    out: Annotated[
        Path, typer.Argument(help="File to write; a recording that is there is replaced.")
    ],
    ids: Annotated[
        Path,
        typer.Option(
            help="JSON file with a list of token ids for each sequence, such as "
            "[[1, 2, 3], [4, 5]]."
        ),
    ],
    host: Annotated[
        Host,
        typer.Option(
            help="Who runs the sequences: the module alone, vLLM's engine or Megatron's trainer."
        ),
    ] = Host.module,
    positions: Annotated[
        str | None,
        typer.Option(
            metavar="<positions>",
            help="Tokens of each sequence, counted from 0: numbers, and ranges without their end, "
            "such as 3,10:20,40: [default: all].",
        ),
    ] = None,
    device: Annotated[
        str | None,
        device_option(
            "Where the module runs alone; a host takes the GPU where there is one [default: cpu]."
        ),
    ] = None,
    json: Annotated[bool, typer.Option("--json", help="Print what was recorded as JSON.")] = False,
) -> None:
    """Run sequences on one side and write digests.

    Of every operation's output at every chosen token.

    A live side is recorded without this command: an engine by collective_rpc
    isomodels_trace_start and isomodels_trace_stop, a trainer by isomodels.trace.record.

    Exit code: 0 written; 2 bad input.

    Example: isomodels trace record Qwen3-0.6B engine.trace --ids ids.json --host vllm
    """
    if host is not Host.module and device is not None:
        raise UnsupportedError(
            f"--device is for the module alone: --host {host} takes the GPU where there is one: "
            "leave it out"
        )
    sequences = read_ids(ids)
    choice = chosen(positions, sequences)
    check_folder(checkpoint, config=True)
    check_recording(out)
    check_host(host)
    run = {Host.vllm: _run_engine, Host.megatron: _run_trainer}.get(
        host, partial(_run_module, device=device or "cpu")
    )
    run(checkpoint, ids, sequences, choice, out)
    _tell(out, host, json)


def _tell(out: Path, host: Host, as_json: bool) -> None:
    from isomodels.trace import Recording

    written = Recording.load(out)
    facts = {
        "path": str(out),
        "host": host.value,
        "sequences": len(written.sequences),
        "tokens": len(written.position),
        "operations": sum(len(entry.form.operations) for entry in written.entries),
    }
    if as_json:
        typer.echo(json_module.dumps(facts))
        return
    typer.echo(
        f"recorded {out}: {facts['tokens']} tokens of {facts['sequences']} sequences, "
        f"{facts['operations']} operations"
    )


@trace.command()
def diff(
    left: Annotated[Path, typer.Argument(help="A recording.")],
    right: Annotated[Path, typer.Argument(help="The other side's.")],
    json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> None:
    """Print the first operation that differs.

    With the digests of its inputs.

    Tokens are compared where both sides recorded the same history, whatever the sequences are
    called. First is the earliest token with any difference, and there the earliest operation: all
    before it agree.

    Exit code: 0 nothing differs; 1 something does; 2 bad input, or nothing to compare.

    Example: isomodels trace diff engine.trace trainer.trace
    """
    for path in (left, right):
        check_written(path, "recording", "isomodels trace record")
    from isomodels.trace import Recording, compare

    found = compare(Recording.load(left), Recording.load(right))
    if json:
        typer.echo(json_module.dumps(asdict(found)))
    else:
        _print(found)
    if found.differing:
        raise typer.Exit(1)


def _print(found: "Comparison") -> None:
    from isomodels.trace.comparison import HOSTS_OWN

    typer.echo(f"{found.tokens} tokens of one history, {found.operations} operations on both sides")
    for side, only in (("left", found.only_left), ("right", found.only_right)):
        if only:
            more = f" and {len(only) - _SHOWN} more" if len(only) > _SHOWN else ""
            typer.echo(f"on the {side} alone: {', '.join(only[:_SHOWN])}{more}")
    for side, own in (("left", found.own_left), ("right", found.own_right)):
        for name, count in own.items():
            typer.echo(f"of the {side}'s host: {count} {name} ({HOSTS_OWN[name]})")
    if found.weights:
        typer.echo(f"weights that differ: {', '.join(found.weights[:_SHOWN])}")
    if found.first is None:
        typer.echo("no difference")
        return
    one = found.first
    same = one.right_operator == one.left_operator
    other = "" if same else f" ({one.right_operator} on the right)"
    typer.echo(
        f"first difference: token {one.position} (id {one.token_id}) of sequence {one.sequence}; "
        f"{one.earlier} tokens before it agree"
    )
    typer.echo(f"operation: {one.module} {one.left_operator}{other}, output {one.output}")
    typer.echo(f"  left {_hex(one.left)}  right {_hex(one.right)}")
    for value in one.inputs:
        said = {None: "", False: "equal", True: "DIFFERS"}[value.differs]
        digests = f"{_hex(value.left)}  {_hex(value.right)}" if value.differs is not None else "-"
        typer.echo(f"  input {value.name:16}{said:8}{digests}  {value.source}")
    places = sorted(found.places.items(), key=lambda item: -item[1])[:_SHOWN]
    typer.echo(f"{found.differing} tokens differ, first in:")
    for place, count in places:
        typer.echo(f"  {count:6} {place}")


def _hex(digest: int | None) -> str:
    return "-" if digest is None else f"{digest & (1 << 64) - 1:016x}"


def _run_module(
    checkpoint: Path,
    ids: Path,
    sequences: Sequence[Sequence[int]],
    choice: Choice,
    out: Path,
    *,
    device: str,
) -> None:
    import torch

    from isomodels.batch import Batch
    from isomodels.checkpoint import load_checkpoint
    from isomodels.trace import record
    from isomodels.validate.device import refuse_device

    refuse_device(torch.device(device))
    _read_config(checkpoint, ids, sequences)
    core: Any = load_checkpoint(checkpoint).to(device)
    flat = torch.tensor([i for sequence in sequences for i in sequence], device=device)
    bounds = torch.tensor([0, *map(len, sequences)], device=device).cumsum(0).int()
    with record(core, out, choice=choice, about={"host": "module"}), torch.no_grad():
        core(flat, Batch.positions(bounds), Batch.packed(bounds))


def _run_engine(
    checkpoint: Path, ids: Path, sequences: Sequence[Sequence[int]], choice: Choice, out: Path
) -> None:
    config = _read_config(checkpoint, ids, sequences, room=1)  # for the token that it samples
    from isomodels.vllm import Engine, Request

    limits: dict[str, Any] = {
        "max_model_len": max(map(len, sequences)) + 1,
        "skip_tokenizer_init": True,
    }
    with Engine(checkpoint, dtype=config.dtype, **limits) as engine:
        engine.llm.collective_rpc("isomodels_trace_start", kwargs={"positions": choice.text})
        engine.run([Request(sequence, prompt_logprobs=True) for sequence in sequences])
        engine.llm.collective_rpc("isomodels_trace_stop", kwargs={"path": str(out.absolute())})


def _run_trainer(
    checkpoint: Path, ids: Path, sequences: Sequence[Sequence[int]], choice: Choice, out: Path
) -> None:
    config = _read_config(checkpoint, ids, sequences)
    from isomodels.megatron import Trainer
    from isomodels.trace import record

    with (
        Trainer(checkpoint, dtype=config.torch_dtype) as trainer,
        record(trainer.core, out, choice=choice, about={"host": "megatron"}),
    ):
        trainer.score(sequences)


def _read_config(
    checkpoint: Path, ids: Path, sequences: Sequence[Sequence[int]], room: int = 0
) -> Any:
    """The model's config, when the sequences fit it."""
    from isomodels.config import read_config

    _, config = read_config(checkpoint)
    check_ids(ids, sequences, config, room)
    return config
