"""Digests of a saved training's files: what is loaded has the bits of what was saved.

Neither Megatron nor torch checks the files it reads: one flipped bit is another training. The
ranks digest files side by side: each the shards that it wrote itself, and of a folder that is
loaded an equal share.
"""

import hashlib
import json
import re
from collections.abc import Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import torch.distributed as dist

from isomodels.contract.document import canonical_json
from isomodels.errors import CheckpointError
from isomodels.weights_conv.bits import shorten
from isomodels.weights_conv.files import CONTRACT, DIGESTS

_SHARD = re.compile(r"__(\d+)_\d+\.distcp")
_THREADS = 4  # hashlib lets go of the interpreter
_REMEDY = "copy the folder again, or resume from another save"


def finish(folder: Path, path: str | Path, contract: str | None) -> None:
    """Writes what a folder states of its files beside them; every rank calls it.

    Args:
        folder: where Megatron has saved.
        path: what the user calls it.
        contract: what the folder states of its weights, as JSON.

    Raises:
        CheckpointError: on all ranks, if a file cannot be written or read back.
        OSError: on the first rank, if `DIGESTS` cannot be written.
    """
    rank = dist.get_rank()
    wrong = []
    try:
        if rank == 0 and contract is not None:
            (folder / CONTRACT).write_text(contract)
    except OSError as error:
        wrong.append(error.strerror or str(error))
    own = [file.name for file in folder.iterdir() if _writer(file.name) == rank]
    found, wrong = _all_digests(folder, own, wrong)
    if wrong:
        raise CheckpointError(f"cannot write {path}: {wrong[0]}")
    if rank == 0:
        (folder / DIGESTS).write_bytes(_document(found))


def require_digests(folder: Path) -> None:
    """Goes on only if all files of a folder are as they were saved; every rank calls it.

    A contract that was removed is none that was changed: that is how a user accepts other bits.

    Raises:
        CheckpointError: on all ranks, naming the files and the remedy.
    """
    expected, wrong = _read(folder)
    rank, ranks = dist.get_rank(), dist.get_world_size()
    missing = [name for name in expected if name != CONTRACT and not (folder / name).exists()]
    if missing:
        wrong.append(f"cannot load {folder}: {shorten(missing)} is missing: {_REMEDY}")
    there = [name for name in sorted(expected) if (folder / name).exists()]
    found, unread = _all_digests(folder, [] if wrong else there[rank::ranks], wrong)
    if unread:
        raise CheckpointError(unread[0])
    if damaged := [name for name in there if found[name] != expected[name]]:
        raise CheckpointError(
            f"cannot load {folder}: {shorten(damaged)} is not as it was saved (cut or damaged): "
            f"{_REMEDY}"
        )


def _read(folder: Path) -> tuple[dict[str, str], list[str]]:
    """The digests that a folder states, and what is wrong."""
    if not folder.is_dir():
        return {}, [f"cannot load {folder}: it is no folder: give one that Trainer.save wrote"]
    try:
        document = (folder / DIGESTS).read_bytes()
        files: dict[str, str] = json.loads(document)["files"]
        if document == _document(files):
            return files, []
    except FileNotFoundError:
        return {}, [
            f"cannot load {folder}: {DIGESTS} is missing, by which the other files are checked: "
            "give a folder that Trainer.save of this version wrote"
        ]
    except OSError as error:
        return {}, [f"cannot load {folder}: cannot read {DIGESTS}: {error.strerror or error}"]
    except (ValueError, TypeError, KeyError, RecursionError):
        pass
    return {}, [f"cannot load {folder}: {DIGESTS} is cut or damaged: {_REMEDY}"]


def _all_digests(
    folder: Path, names: Sequence[str], wrong: Iterable[str] = ()
) -> tuple[dict[str, str], list[str]]:
    """The digests of the files of all ranks, and what any of them found wrong."""
    found: dict[str, str] = {}
    own = list(wrong)
    try:
        with ThreadPoolExecutor(_THREADS) as pool:
            digests = pool.map(lambda name: _sha256(folder / name), names)
            found = dict(zip(names, digests, strict=True))
    except OSError as error:
        own.append(f"cannot read {error.filename or folder}: {error.strerror or error}")
    gathered: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(gathered, (found, own))
    together = {name: value for part, _ in gathered for name, value in part.items()}
    return together, [message for _, messages in gathered for message in messages]


def _writer(name: str) -> int:
    """The rank that wrote a file: the first one all that is no shard of tensors."""
    match = _SHARD.fullmatch(name)
    return int(match[1]) if match else 0


def _sha256(file: Path) -> str:
    with file.open("rb") as opened:
        return hashlib.file_digest(opened, "sha256").hexdigest()


def _document(files: dict[str, str]) -> bytes:
    """The text of `DIGESTS`, with a digest of its own: one text for one content."""
    own = hashlib.sha256(canonical_json(files).encode()).hexdigest()
    return (json.dumps({"files": files, "sha256": own}, indent=1, sort_keys=True) + "\n").encode()
