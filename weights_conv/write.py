"""Writing checkpoint folders so that a save that is killed leaves a whole checkpoint.

The new folder is made next to the old one, brought to disk, and then takes its place in one step.
Where the file system cannot exchange two folders, two renames do it; if the process dies exactly
between them, the old folder lies next to the place under a hidden name (`replaced_name`), and the
next save, or a reader's message, brings it back.
"""

import contextlib
import ctypes
import errno
import fcntl
import json
import os
import secrets
import shutil
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path

from safetensors import SafetensorError
from safetensors.torch import save_file
from torch import Tensor

from isomodels.errors import CheckpointError
from isomodels.weights_conv.files import INDEX, SINGLE, TensorFiles, read_tensors, replaced_name
from isomodels.weights_conv.rules import shorten

DEFAULT_SHARD_SIZE = 5_000_000_000
_WEIGHTS = (
    ".safetensors",
    ".index.json",
    ".bin",
    ".pt",
    ".pth",
    ".ckpt",
    ".gguf",
    ".onnx",
    ".h5",
    ".msgpack",
)
_AT_FDCWD = -100
_RENAME_EXCHANGE = 2
_NO_EXCHANGE = (errno.EINVAL, errno.ENOSYS, errno.EOPNOTSUPP, errno.EPERM)


def write_checkpoint(
    path: Path | str,
    tensors: Mapping[str, Tensor],
    *,
    like: TensorFiles | Path | None = None,
    max_shard_size: int | None = None,
    files: Mapping[str, str] | None = None,
    progress: Callable[[int], None] | None = None,
) -> None:
    """Write a checkpoint folder, replacing an old one only when the new one is whole on disk.

    Files of the old folder that are no weights and that the new one lacks are kept. One shard at a
    time is held in memory.

    Args:
        path: the folder; a checkpoint that is there already is replaced, and nothing else is.
        tensors: HF name -> tensor, on any device; may be lazy.
        like: a checkpoint folder, or one that is open. Its config, tokenizer and other small
            files are copied, and its division into files is kept unless `max_shard_size` is given.
        max_shard_size: bytes a file may have; a larger tensor gets a file of its own.
        files: file name -> text, to write beside the weights (instead of those of `like`).
        progress: called with the number of bytes after each file.

    Raises:
        CheckpointError: the folder cannot be written, is a mount point, or holds something else
            than a checkpoint; or `tensors` has other names than `like`. What was at `path` is
            still there.
    """
    path = Path(os.path.realpath(path))
    source = read_tensors(like) if isinstance(like, Path) else like
    try:
        _refuse_bad_place(path, source)
        plan = _plan(tensors, source, max_shard_size)
        _recover(path)
        with _partial_folder(path) as partial:
            _write_weights(partial, tensors, plan, source, progress or (lambda _: None))
            if source is not None:
                _copy_small_files(source.path, partial)
            for name, text in (files or {}).items():
                (partial / name).write_text(text)
            if path.is_dir():
                _keep_extras(path, partial)
            _sync_tree(partial)
            _replace(partial, path)
    except (OSError, SafetensorError) as error:
        # Only a rename names `path` itself here; other busy files lie below it or beside it.
        if (
            isinstance(error, OSError)
            and error.errno == errno.EBUSY
            and str(error.filename) == str(path)
        ):
            raise _mount_point(path) from error
        reason = getattr(error, "strerror", None) or error
        raise CheckpointError(f"cannot write {path}: {reason}") from error


def _refuse_bad_place(path: Path, source: TensorFiles | None) -> None:
    if path.exists() and not path.is_dir():
        raise CheckpointError(f"{path} is a file: give a folder to write to")
    if os.path.ismount(path):
        raise _mount_point(path)
    if path.is_dir() and not _may_be_replaced(path):
        raise CheckpointError(
            f"{path} exists and is no checkpoint (config.json and safetensors files): "
            "give a new or an empty folder"
        )
    if source is not None:
        other = Path(os.path.realpath(source.path))
        if path != other and (path in other.parents or other in path.parents):
            raise CheckpointError(f"{path} and {other} lie one in the other: give another folder")


def _may_be_replaced(path: Path) -> bool:
    names = {entry.name for entry in path.iterdir()}
    # Many a project has a config.json: weights must lie beside it.
    weights = INDEX in names or any(name.endswith(".safetensors") for name in names)
    return not names or ("config.json" in names and weights)


def _mount_point(path: Path) -> CheckpointError:
    return CheckpointError(
        f"{path} is a mount point, which no folder can replace: give a folder below it"
    )


def _plan(
    tensors: Mapping[str, Tensor], source: TensorFiles | None, max_shard_size: int | None
) -> dict[str, list[str]]:
    """File name -> tensor names."""
    plan: dict[str, list[str]] = {}
    if source is not None and max_shard_size is None:
        different = set(source) ^ set(tensors)
        if different:
            raise CheckpointError(f"{source.path} has other tensors: {shorten(different)}")
        for name, file in source.weight_map.items():
            plan.setdefault(file, []).append(name)
        return plan
    shards: list[list[str]] = [[]]
    limit, filled = max_shard_size or DEFAULT_SHARD_SIZE, 0
    for name in tensors:
        size = tensors[name].nbytes
        if shards[-1] and filled + size > limit:
            shards.append([])
            filled = 0
        shards[-1].append(name)
        filled += size
    if len(shards) == 1:
        return {SINGLE: shards[0]}
    count = len(shards)
    return {f"model-{i:05d}-of-{count:05d}.safetensors": s for i, s in enumerate(shards, 1)}


def _write_weights(
    folder: Path,
    tensors: Mapping[str, Tensor],
    plan: dict[str, list[str]],
    source: TensorFiles | None,
    progress: Callable[[int], None],
) -> None:
    total = 0
    for file, names in plan.items():
        shard: dict[str, Tensor] = {}
        addresses: set[int] = set()
        for name in names:
            tensor = tensors[name].detach().cpu().contiguous()
            if tensor.data_ptr() in addresses:  # a tied tensor: a file holds every tensor by itself
                tensor = tensor.clone()
            addresses.add(tensor.data_ptr())
            shard[name] = tensor
        known = source is not None and file in source.weight_map.values()
        metadata = source.file_metadata(file) if source is not None and known else {"format": "pt"}
        (folder / file).touch()
        mode = (folder / file).stat().st_mode
        save_file(shard, folder / file, metadata=metadata)
        (folder / file).chmod(mode)  # safetensors lets only the owner read, whatever the umask
        size = sum(tensor.nbytes for tensor in shard.values())
        total += size
        progress(size)
    if set(plan) != {SINGLE}:
        weight_map = {name: file for file, names in plan.items() for name in names}
        old = (source.index_metadata or {}) if source is not None else {}
        index = {
            "metadata": {**old, "total_size": total},
            "weight_map": dict(sorted(weight_map.items())),
        }
        (folder / INDEX).write_text(json.dumps(index, indent=2) + "\n")


def _copy_small_files(source: Path, folder: Path) -> None:
    for entry in source.iterdir():
        hidden = entry.name.startswith(".")
        if entry.is_file() and not hidden and not entry.name.endswith(_WEIGHTS):
            shutil.copyfile(entry, folder / entry.name)


def _keep_extras(old: Path, new: Path) -> None:
    """Links what a user put beside the old weights into the new folder."""
    for entry in old.iterdir():
        target = new / entry.name
        if target.exists() or entry.name.endswith((".safetensors", ".safetensors.index.json")):
            continue
        if entry.is_dir() and not entry.is_symlink():
            shutil.copytree(entry, target, symlinks=True, copy_function=_link_or_copy)
        else:
            _link_or_copy(entry, target)


def _link_or_copy(source: Path | str, target: Path | str) -> None:
    try:
        os.link(source, target, follow_symlinks=False)
    except OSError:
        shutil.copy2(source, target, follow_symlinks=False)


@contextlib.contextmanager
def _partial_folder(path: Path) -> Iterator[Path]:
    """A new folder beside `path`, locked while it is in use and removed at the end."""
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = path.with_name(f"{_partial_prefix(path)}{secrets.token_hex(4)}")
    partial.mkdir()
    # The lock tells another save that this folder is in use and not left over.
    lock = os.open(partial, os.O_RDONLY | os.O_DIRECTORY)
    try:
        with contextlib.suppress(OSError):  # some network file systems have no locks
            fcntl.flock(lock, fcntl.LOCK_EX)
        yield partial
    finally:
        shutil.rmtree(partial, ignore_errors=True)
        os.close(lock)


def _partial_prefix(path: Path) -> str:
    return f".{path.name}.isomodels-partial-"


def _recover(path: Path) -> None:
    """Clears what a killed save left: folders nobody has locked, and the old folder."""
    old = replaced_name(path)
    if old.is_dir():
        if path.exists():
            shutil.rmtree(old)
        else:
            os.rename(old, path)
    for left in path.parent.glob(f"{_partial_prefix(path)}*"):
        lock = os.open(left, os.O_RDONLY | os.O_DIRECTORY)
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:  # in use, or no way to tell
            continue
        else:
            shutil.rmtree(left, ignore_errors=True)
        finally:
            os.close(lock)


def _replace(new: Path, path: Path) -> None:
    """Puts `new` at `path`. An old folder ends at `new`, or is removed."""
    if not path.is_dir():
        os.rename(new, path)
    elif not _exchange(new, path):
        old = replaced_name(path)
        os.rename(path, old)
        os.rename(new, path)
        _sync(path.parent)
        shutil.rmtree(old)
    _sync(path.parent)


def _exchange(a: Path, b: Path) -> bool:
    """Exchange two folders in one step; False where the system cannot."""
    try:
        renameat2 = ctypes.CDLL(None, use_errno=True).renameat2
    except AttributeError:
        return False
    names = (ctypes.c_char_p(os.fsencode(path)) for path in (a, b))
    first, second = names
    if renameat2(_AT_FDCWD, first, _AT_FDCWD, second, ctypes.c_uint(_RENAME_EXCHANGE)) == 0:
        return True
    number = ctypes.get_errno()
    if number in _NO_EXCHANGE:
        return False
    raise OSError(number, os.strerror(number), str(b))


def _sync_tree(folder: Path) -> None:
    for entry in folder.rglob("*"):
        if not entry.is_symlink():
            _sync(entry)
    _sync(folder)


def _sync(path: Path) -> None:
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
