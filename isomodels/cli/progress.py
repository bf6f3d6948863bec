"""A progress bar on stderr, where people look at it and programs do not."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager

from rich.console import Console
from rich.progress import (
    BarColumn,
    DownloadColumn,
    MofNCompleteColumn,
    Progress,
    TextColumn,
    TimeElapsedColumn,
    TimeRemainingColumn,
)


@contextmanager
def byte_bar(label: str, total: int) -> Iterator[Callable[[int], None]]:
    """Show a bar while the block runs; yields the function that adds bytes."""
    columns = (TextColumn("{task.description}"), BarColumn(), DownloadColumn())
    console = Console(stderr=True)
    with Progress(
        *columns,
        TimeRemainingColumn(),
        console=console,
        transient=True,
        disable=not console.is_terminal,
    ) as bar:
        task = bar.add_task(label, total=total)
        yield lambda count: bar.update(task, advance=count)


@contextmanager
def check_bar(label: str) -> Iterator[Callable[[str, int, int], None]]:
    """Show a bar while the block runs; yields what notes (what has ended, done, total)."""
    console = Console(stderr=True)
    columns = (
        BarColumn(),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
        TextColumn("{task.fields[of]}"),
    )
    with Progress(
        TextColumn(label),
        *columns,
        console=console,
        transient=True,
        disable=not console.is_terminal,
    ) as bar:
        task = bar.add_task("", total=None, of="")

        def note(what: str, done: int, total: int) -> None:
            bar.update(task, completed=done, total=total, of=what)

        yield note
