"""`isomodels convert`: checkpoints of any form into Hugging Face's or Megatron's."""

import json as json_module
import re
import time
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from isomodels.cli.arguments import Dtype
from isomodels.cli.source import Like, open_source
from isomodels.errors import UnsupportedError

if TYPE_CHECKING:
    from isomodels.conversion import Plan

_UNITS = {"": 1, "KB": 10**3, "MB": 10**6, "GB": 10**9, "KIB": 2**10, "MIB": 2**20, "GIB": 2**30}


class Target(StrEnum):
    """What `--to` may be."""

    hf = "hf"
    megatron = "megatron"


class ExpertsForm(StrEnum):
    """What `--experts` may be."""

    apart = "apart"
    fused = "fused"


def convert(
    source: Annotated[
        Path, typer.Argument(help="Hugging Face folder, or Megatron dist_checkpointing folder.")
    ],
    destination: Annotated[Path, typer.Argument(help="Folder to write.")],
    to: Annotated[Target, typer.Option(help="Form to write.")] = Target.hf,
    like: Like = None,
    dtype: Annotated[
        Dtype | None, typer.Option(help="Round to this dtype [default: keep the source's].")
    ] = None,
    experts: Annotated[
        ExpertsForm | None,
        typer.Option(
            help="Of a model with experts, in a Hugging Face folder: each expert's tensors apart, "
            "or those of all in one [default: the source's form]."
        ),
    ] = None,
    max_shard_size: Annotated[
        str | None,
        typer.Option(
            metavar="<size>",
            help="Bytes a file may have, such as 2GB or 500MiB [default: the source's division "
            "into files].",
        ),
    ] = None,
    verify: Annotated[
        bool, typer.Option(help="Read back what was written and compare every bit.")
    ] = True,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Only check, and list every mapping.")
    ] = False,
    json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> None:
    """Convert a checkpoint, check it strictly, and keep every bit.

    Reads Hugging Face folders (experts apart or fused, float8 with block scales) and Megatron
    dist_checkpointing folders of any parallel layout, of isomodels' models or of Megatron's own.
    A contract in the source goes along; one that is not its config's is refused.
    The destination appears only when it is whole and checked; a checkpoint that is there is
    replaced then.

    Exit code: 0 written; 2 bad input.

    Example: isomodels convert Qwen3-8B Qwen3-8B-megatron --to megatron
    """
    if experts is not None and to is Target.megatron:
        raise UnsupportedError(
            "--experts is for Hugging Face folders, a Megatron folder has one form: leave it out"
        )
    size = parse_size(max_shard_size) if max_shard_size is not None else None
    source_weights = open_source(source, like)
    from isomodels.cli.inspect import describe
    from isomodels.cli.progress import byte_bar
    from isomodels.config import DTYPES
    from isomodels.contract.stored import carried
    from isomodels.conversion import check_destination, plan_conversion, run_conversion

    plan = plan_conversion(
        source_weights,
        to=to.value,
        dtype=DTYPES[dtype.value] if dtype is not None else None,
        experts=experts.value if experts is not None else None,
    )
    contract = carried(plan.source.path, *plan.written_config(), exact=plan.exact)
    if dry_run:
        check_destination(plan, destination)
        _print_plan(plan, json)
        return
    begin = time.monotonic()
    with byte_bar("Converting", plan.nbytes * (2 if verify else 1)) as progress:
        written = run_conversion(
            plan,
            destination,
            max_shard_size=size,
            verify=verify,
            contract=contract.to_json(),
            progress=progress,
            verified=progress,
        )
    seconds = time.monotonic() - begin
    facts = {
        **describe(written),
        "source": str(source),
        "source_layout": plan.source.layout,
        "carried_over": list(plan.source.carried_over),
        "round_trip": "bit-exact" if verify else "not compared",
        "bytes": plan.nbytes,
        "seconds": round(seconds, 3),
    }
    if json:
        typer.echo(json_module.dumps(facts))
        return
    megabytes = plan.nbytes / 1e6
    compared = "read back, and bit-exact" if verify else "not compared with the source"
    typer.echo(
        f"{destination}: {facts['layout']}, {facts['tensors']} tensors, {facts['dtype']}, in "
        f"{facts['files']} file(s); {megabytes:,.1f} MB in {seconds:.1f} s, "
        f"{megabytes / seconds:,.0f} MB/s; {compared}"
    )


def _print_plan(plan: "Plan", as_json: bool) -> None:
    mappings = plan.mappings()
    if as_json:
        rows = [{"from": list(read), "to": list(written)} for read, written in mappings]
        typer.echo(json_module.dumps({"bytes": plan.nbytes, "mappings": rows}))
        return
    for read, written in mappings:
        typer.echo(f"{' + '.join(read)} -> {' + '.join(written)}")
    typer.echo(f"{len(mappings)} mappings, {plan.nbytes / 1e6:,.1f} MB; nothing was written")


def parse_size(text: str) -> int:
    """ "500MB" -> 500_000_000; units of HF: KB, MB, GB, KiB, MiB, GiB, none for bytes.

    Raises:
        UnsupportedError: the text is no size.
    """
    match = re.fullmatch(r"([0-9]{1,18})\s*([A-Za-z]*)", text.strip())
    if not match or match[2].upper() not in _UNITS or int(match[1]) == 0:
        raise UnsupportedError(f"--max-shard-size {text}: write a size such as 2GB or 500MiB")
    return int(match[1]) * _UNITS[match[2].upper()]
