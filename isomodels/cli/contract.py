"""`isomodels contract`: what decides the bits of a model, and what differs between two sides."""

import json as json_module
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from isomodels.cli.arguments import Dtype, device_option
from isomodels.cli.files import check_folder, check_there
from isomodels.errors import ContractError, UnsupportedError

if TYPE_CHECKING:
    from isomodels.contract import Contract

contract = typer.Typer(
    no_args_is_help=True,
    rich_markup_mode=None,
    help="Show what decides the bits of a model; compare two sides.",
)
_SOURCE = (
    "Hugging Face folder, or a contract in JSON as `show --json` prints it and checkpoints hold."
)
Device = Annotated[
    str | None, device_option("Of a folder: where the model would run [default: cpu].")
]
OfDtype = Annotated[
    Dtype | None, typer.Option(help="Of a folder: of the model [default: the checkpoint's].")
]


@contract.command()
def show(
    checkpoint: Annotated[Path, typer.Argument(help=_SOURCE)],
    device: Device = None,
    dtype: OfDtype = None,
    json: Annotated[bool, typer.Option("--json", help="Print the whole contract.")] = False,
) -> None:
    """Print a model's contract.

    Three digests, and every operation with its schedule.

    Equal `semantic` digests: the same logical model. Equal `numerical_policy` digests: the same
    bits. `deployment` is what moves no bit.

    Exit code: 0 printed; 2 bad input.

    Example: isomodels contract show Qwen3-0.6B --device cuda
    """
    _check([checkpoint], device, dtype)
    made = _read(checkpoint, device, dtype)
    if json:
        typer.echo(made.to_json())
        return
    for name in made.digests:
        typer.echo(f"{name:18}{made.stated.get(name, 'not stated')}")
    if made.semantic:
        typer.echo(f"{'architecture':18}{made.semantic['architecture']}")
    if made.numerical_policy:
        _print_policy(made.numerical_policy)


def _print_policy(policy: Mapping[str, Any]) -> None:
    typer.echo(f"{'dtype':18}{policy['dtype']}, {len(policy['pinned'])} tensors pinned")
    typer.echo(f"{'device':18}{', '.join(f'{k} {v}' for k, v in policy['device'].items())}")
    for form, parts in policy["forms"].items():
        cases = [case for case, of in policy["cases"].items() if of == form]
        typer.echo(f"\n{form}: {', '.join(cases)}")
        for part, calls in parts.items():
            typer.echo(f"  {part:20}{', '.join(f'{n} {op}' for op, n in calls.items())}")
    typer.echo("\nschedules")
    for name, schedule in policy["schedules"].items():
        constants = ", ".join(f"{k} = {v}" for k, v in schedule["constants"].items())
        typer.echo(f"  {name} v{schedule['version']}: {constants or 'a copy'}")


@contract.command()
def diff(
    left: Annotated[Path, typer.Argument(help=_SOURCE)],
    right: Annotated[Path, typer.Argument(help="The same.")],
    device: Device = None,
    dtype: OfDtype = None,
    json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> None:
    """Name what differs between two contracts.

    And which digest it moves.

    Exit code: 0 the same model and the same bits; 1 not; 2 bad input.

    Example: isomodels contract diff trainer.json engine.json
    """
    _check([left, right], device, dtype)
    from isomodels.contract import differences

    found = differences(_read(left, device, dtype), _read(right, device, dtype))
    if json:
        typer.echo(json_module.dumps([vars(d) for d in found]))
    else:
        for difference in found:
            typer.echo(str(difference))
        moved = sorted({d.section for d in found})
        typer.echo(f"differs in {', '.join(moved)}" if moved else "no difference")
    if any(d.section != "deployment" for d in found):
        raise typer.Exit(1)


def _check(paths: list[Path], device: str | None, dtype: Dtype | None) -> None:
    """Refuse what can be refused without torch."""
    for path in paths:
        check_there(path, "a checkpoint's folder or a contract")
    folders = [path for path in paths if path.is_dir()]
    for path in folders:
        check_folder(path, config=True)
    if not folders and (device, dtype) != (None, None):
        option = "--device" if device is not None else "--dtype"
        raise UnsupportedError(
            f"{option} is for a checkpoint's folder, and {paths[0]} is a contract that states its "
            "own: leave it out"
        )


def _read(path: Path, device: str | None, dtype: Dtype | None) -> "Contract":
    import torch

    from isomodels.config import DTYPES
    from isomodels.contract import Contract, contract_of

    if not path.is_dir():  # a pipe of the shell's `<(...)` will do
        try:
            return Contract.from_json(path.read_bytes(), str(path))
        except OSError as error:
            raise ContractError(f"{path} cannot be read: {error.strerror}") from None
    where = torch.device(device or "cpu")
    return contract_of(path, where, dtype=DTYPES[dtype.value] if dtype is not None else None)
