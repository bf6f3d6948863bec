"""Options that several commands share. Imports no torch: a wrong one is answered at once."""

import re
from collections.abc import Callable
from enum import StrEnum
from pathlib import Path
from typing import Annotated, Any

import typer

from isomodels.cli.files import check_writable
from isomodels.errors import UnsupportedError

_DEVICE = re.compile(r"cpu|cuda(:(0|[1-9][0-9]?))?")


class Dtype(StrEnum):
    """What `--dtype` may be."""

    float32 = "float32"
    bfloat16 = "bfloat16"


class Host(StrEnum):
    """Who runs a model: the module alone, vLLM's engine or Megatron's trainer."""

    module = "module"
    vllm = "vllm"
    megatron = "megatron"


class HostDevice(StrEnum):
    """What vLLM and Megatron may run on: they choose the GPU themselves."""

    cpu = "cpu"
    cuda = "cuda"


class Workload(StrEnum):
    """What `--workload` may be."""

    short = "short"
    quick = "quick"
    full = "full"


_STDOUT = Path("-")
JsonFile = Annotated[
    Path | None, typer.Option("--json", help="Also write the report as JSON ('-': print it).")
]


def check_json_file(json_file: Path | None) -> None:
    """Refuse a file of `JsonFile` that cannot be written.

    Raises:
        CheckpointError: naming the file and the reason.
    """
    check_writable(None if json_file == _STDOUT else json_file)


def write_report(json_file: Path | None, text: str, show: Callable[[], None]) -> None:
    """Give a report as `JsonFile` asks for it.

    Args:
        json_file: the option.
        text: the report as JSON.
        show: prints it for people; not called where the JSON is printed.
    """
    if json_file == _STDOUT:
        typer.echo(text)
        return
    show()
    if json_file is not None:
        json_file.write_text(text + "\n")


def device_option(text: str) -> Any:
    """`--device` of a command that runs the module itself.

    Args:
        text: the help.
    """
    return typer.Option(metavar="<cpu|cuda|cuda:N>", callback=_known_device, help=text)


def _known_device(value: str | None) -> str | None:
    if value is not None and not _DEVICE.fullmatch(value):
        raise UnsupportedError(f"--device {value}: write cpu, cuda or cuda:1")
    return value


def check_host(host: Host) -> None:
    """Refuse a host that is not installed, before a checkpoint is read for it.

    Raises:
        HostError: it is missing, or of a version that was not checked.
    """
    if host is Host.vllm:
        from isomodels.vllm.versions import check_vllm

        check_vllm()
    elif host is Host.megatron:
        from isomodels.megatron import check_megatron

        check_megatron()
