"""`isomodels trace`: digests of every operation for chosen tokens, and where two sides part."""

import json as json_module
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from isomodels.errors import TraceError, UnsupportedError

if TYPE_CHECKING:
    from isomodels.trace import Choice, Comparison

trace = typer.Typer(
    no_args_is_help=True,
    rich_markup_mode=None,
    help="Digests of every operation for chosen tokens, and the first that differs.",
)
HOSTS = ("module", "vllm", "megatron")
_SHOWN = 5


@trace.command()
def record(
    checkpoint: Annotated[Path, typer.Argument(help="Hugging Face folder.")],
    out: Annotated[Path, typer.Argument(help="File to write.")],
    ids: Annotated[Path, typer.Option(help="JSON: token ids, one list a sequence.")],
    host: Annotated[
        str,
        typer.Option(help="Who runs them: module (alone), vllm (engine) or megatron (trainer)."),
    ] = "module",
    positions: Annotated[
        str | None, typer.Option(help="Of each sequence, such as 3,10:20,40: [default: all].")
    ] = None,
    device: Annotated[
        str, typer.Option(help="cpu or cuda, for the module alone; hosts take what is here.")
    ] = "cpu",
) -> None:
    """Run sequences on one side and write the digest of every operation's output at every token.

    A live side is recorded without this command: an engine by collective_rpc
    isomodels_trace_start and isomodels_trace_stop, a trainer by isomodels.trace.record.

    Example: isomodels trace record Qwen3-0.6B engine.trace --ids ids.json --host vllm
    """
    from isomodels.trace import Choice

    if host not in HOSTS:
        raise UnsupportedError(f"--host {host}: use one of {', '.join(HOSTS)}")
    sequences = _read_ids(ids)
    choice = Choice.parse(None, positions)
    if host == "module":
        _run_module(checkpoint, sequences, choice, out, device)
    else:
        run = _run_engine if host == "vllm" else _run_trainer
        run(checkpoint, sequences, choice, out)
    typer.echo(f"recorded {out}")


@trace.command()
def diff(
    left: Annotated[Path, typer.Argument(help="A recording.")],
    right: Annotated[Path, typer.Argument(help="The other side's.")],
    json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> None:
    """Print the first operation that differs, with the digests of its inputs.

    Tokens are compared where both sides recorded the same history, whatever the sequences are
    called. First is the earliest token with any difference, and there the earliest operation: all
    before it agree.

    Exit code: 0 nothing differs; 1 something does; 2 nothing to compare.

    Example: isomodels trace diff engine.trace trainer.trace
    """
    from isomodels.trace import Recording, compare

    found = compare(Recording.load(left), Recording.load(right))
    if json:
        typer.echo(json_module.dumps(asdict(found)))
    else:
        _print(found)
    if found.differing:
        raise typer.Exit(1)


def _print(found: "Comparison") -> None:
    typer.echo(f"{found.tokens} tokens of one history, {found.operations} operations on both sides")
    for side, only in (("left", found.only_left), ("right", found.only_right)):
        if only:
            more = f" and {len(only) - _SHOWN} more" if len(only) > _SHOWN else ""
            typer.echo(f"on the {side} alone: {', '.join(only[:_SHOWN])}{more}")
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


def _read_ids(path: Path) -> list[list[int]]:
    try:
        found = json_module.loads(path.read_text())
    except (OSError, UnicodeDecodeError, json_module.JSONDecodeError) as error:
        raise TraceError(f"--ids {path} cannot be read: {error}") from None
    sound = isinstance(found, list) and all(
        isinstance(one, list) and one and all(type(i) is int and i >= 0 for i in one)
        for one in found
    )
    if not sound or not found:
        raise TraceError(f"--ids {path}: give a list of lists of token ids, such as [[1, 2], [3]]")
    return found


def _run_module(
    checkpoint: Path, sequences: Sequence[Sequence[int]], choice: "Choice", out: Path, device: str
) -> None:
    import torch

    from isomodels.batch import Batch
    from isomodels.checkpoint import load_checkpoint
    from isomodels.trace import record
    from isomodels.validate.device import refuse_device

    try:
        refuse_device(torch.device(device))
    except RuntimeError:
        raise UnsupportedError(f"--device {device}: use cpu, cuda or cuda:N") from None
    core: Any = load_checkpoint(checkpoint).to(device)
    _check_ids(sequences, core.config)
    flat = torch.tensor([i for sequence in sequences for i in sequence], device=device)
    bounds = torch.tensor([0, *map(len, sequences)], device=device).cumsum(0).int()
    with record(core, out, choice=choice, about={"host": "module"}), torch.no_grad():
        core(flat, Batch.positions(bounds), Batch.packed(bounds))


def _run_engine(
    checkpoint: Path, sequences: Sequence[Sequence[int]], choice: "Choice", out: Path
) -> None:
    from isomodels.config import read_config
    from isomodels.vllm import Engine, Request

    _, config = read_config(checkpoint)
    _check_ids(sequences, config)
    limits: dict[str, Any] = {
        "max_model_len": max(map(len, sequences)) + 1,
        "skip_tokenizer_init": True,
    }
    with Engine(checkpoint, dtype=config.dtype, **limits) as engine:
        engine.llm.collective_rpc("isomodels_trace_start", kwargs={"positions": choice.text})
        engine.run([Request(sequence, prompt_logprobs=True) for sequence in sequences])
        engine.llm.collective_rpc("isomodels_trace_stop", kwargs={"path": str(out)})


def _run_trainer(
    checkpoint: Path, sequences: Sequence[Sequence[int]], choice: "Choice", out: Path
) -> None:
    from isomodels.config import read_config
    from isomodels.megatron import Trainer
    from isomodels.trace import record

    _, config = read_config(checkpoint)
    _check_ids(sequences, config)
    with (
        Trainer(checkpoint, dtype=config.torch_dtype) as trainer,
        record(trainer.core, out, choice=choice, about={"host": "megatron"}),
    ):
        trainer.score(sequences)


def _check_ids(sequences: Sequence[Sequence[int]], config: Any) -> None:
    largest = max(map(max, sequences))
    if largest >= config.vocab_size:
        raise TraceError(f"--ids has token {largest}, the model has {config.vocab_size}")
    longest = max(map(len, sequences))
    if longest > config.max_position_embeddings:
        raise TraceError(
            f"--ids has a sequence of {longest} tokens, the model takes "
            f"{config.max_position_embeddings}"
        )
