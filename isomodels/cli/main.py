"""The `isomodels` command: one file in this folder is one subcommand.

A mistake of the user's (`IsoError`, or an argument that typer refuses) ends in one sentence on
stderr and exit code 2. A fault of the command itself is a traceback and exit code 3, since 1 says
that something differs.
"""

import traceback
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

# Typer's click has no public name, in newer versions of typer not even its own package.
_UsageError: Any = typer.BadParameter.__bases__[0]


class Commands(TyperGroup):
    """Turns the errors of any command into a message and an exit code."""

    def invoke(self, ctx: Any) -> Any:
        """Run the command."""
        try:
            return super().invoke(ctx)
        except IsoError as error:
            typer.echo(f"error: {error}", err=True)
            raise typer.Exit(2) from None
        except _UsageError as error:
            path = error.ctx.command_path if error.ctx is not None else ctx.command_path
            typer.echo(f"error: {_sentence(error)} (see `{path} --help`)", err=True)
            raise typer.Exit(2) from None
        except (typer.Exit, typer.Abort, BrokenPipeError):
            raise
        except Exception:
            traceback.print_exc()
            typer.echo("error: isomodels failed, see above: this is a fault of its own", err=True)
            raise typer.Exit(3) from None


def _sentence(error: Any) -> str:
    """What typer says of a wrong argument, without its validator's words."""
    return error.format_message().replace("Value error, ", "").rstrip(".").replace("\n", " ")


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
