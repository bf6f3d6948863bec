"""The `isomodels` command: one file in this folder is one subcommand.

A mistake of the user's (`IsoError`) ends in its message on stderr and exit code 2.
"""

from typing import Annotated, Any

import typer
from typer.core import TyperGroup

from isomodels import __version__
from isomodels.cli.check import check
from isomodels.cli.contract import contract
from isomodels.cli.convert import convert
from isomodels.cli.inspect import inspect
from isomodels.cli.parity import parity
from isomodels.cli.trace import trace
from isomodels.cli.validate import validate
from isomodels.errors import IsoError


class Commands(TyperGroup):
    """Turns an `IsoError` of any command into a message and exit code 2."""

    def invoke(self, ctx: Any) -> Any:
        """Run the command."""
        try:
            return super().invoke(ctx)
        except IsoError as error:
            typer.echo(f"error: {error}", err=True)
            raise typer.Exit(2) from None


app = typer.Typer(
    cls=Commands,
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,  # it would eat the brackets of help texts
)
app.command()(check)
app.command()(convert)
app.command()(inspect)
app.command()(parity)
app.command()(validate)
app.add_typer(contract, name="contract")
app.add_typer(trace, name="trace")


def _print_version(asked: bool) -> None:
    if asked:
        typer.echo(f"isomodels {__version__}")
        raise typer.Exit


@app.callback()
def options(
    version: Annotated[
        bool,
        typer.Option(
            "--version", callback=_print_version, is_eager=True, help="Print the version and exit."
        ),
    ] = False,
) -> None:
    """One PyTorch module per architecture, with equal bits in vLLM and in Megatron."""
