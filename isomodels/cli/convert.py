"""`isomodels convert`: check a checkpoint strictly and write it anew."""

import json as json_module
import re
from pathlib import Path
from typing import Annotated

import typer

from isomodels.errors import UnsupportedError

_UNITS = {"": 1, "KB": 10**3, "MB": 10**6, "GB": 10**9, "KIB": 2**10, "MIB": 2**20, "GIB": 2**30}


def convert(
    source: Annotated[Path, typer.Argument(help="Hugging Face folder to read.")],
    destination: Annotated[Path, typer.Argument(help="Folder to write.")],
    dtype: Annotated[
        str | None,
        typer.Option(help="Round to float32 or bfloat16 [default: keep the file's dtype]."),
    ] = None,
    max_shard_size: Annotated[
        str | None,
        typer.Option(help="Such as 2GB or 500MiB [default: the source's division into files]."),
    ] = None,
    json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> None:
    """Check a checkpoint strictly and write it anew: re-shard it, cast it, or both.

    Every tensor goes through the module's form and back, and the written folder is read again:
    both must have the source's bits. A destination that holds a checkpoint is replaced only when
    the new one is whole. Exit code: 0 written; 2 bad input.

    Example: isomodels convert Qwen3-0.6B Qwen3-0.6B-fp32 --dtype float32 --max-shard-size 1GB
    """
    from isomodels.checkpoint import convert_checkpoint, open_checkpoint
    from isomodels.cli.check import describe
    from isomodels.cli.progress import byte_bar
    from isomodels.config import DTYPES

    if dtype is not None and dtype not in DTYPES:
        raise UnsupportedError(f"--dtype {dtype}: choose one of {', '.join(DTYPES)}")
    size = parse_size(max_shard_size) if max_shard_size is not None else None
    checkpoint = open_checkpoint(source)
    target = DTYPES[dtype] if dtype is not None else checkpoint.dtype
    total = sum(t.numel() for t in checkpoint.tensors.meta().values()) * target.itemsize
    with byte_bar("Converting", total) as progress:
        written = convert_checkpoint(
            checkpoint, destination, dtype=target, max_shard_size=size, progress=progress
        )
    facts = {**describe(written), "round_trip": "bit-exact", "source": str(source)}
    if json:
        typer.echo(json_module.dumps(facts))
    else:
        typer.echo(
            f"{destination}: {facts['tensors']} tensors, {facts['dtype']}, in {facts['files']} "
            "file(s); the round trip is bit-exact"
        )


def parse_size(text: str) -> int:
    """ "500MB" -> 500_000_000; units of HF: KB, MB, GB, KiB, MiB, GiB, none for bytes.

    Raises:
        UnsupportedError: the text is no size.
    """
    match = re.fullmatch(r"(\d+)\s*([A-Za-z]*)", text.strip())
    if not match or match[2].upper() not in _UNITS or int(match[1]) == 0:
        raise UnsupportedError(f"--max-shard-size {text}: write a size such as 2GB or 500MiB")
    return int(match[1]) * _UNITS[match[2].upper()]
