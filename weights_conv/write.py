"""Writing checkpoint folders so that a save that is killed leaves a whole checkpoint.

The new folder is made next to the old one, checked, brought to disk, and then takes its place in
one step. Its name is fixed and it is locked while it is made, so that two writers of one folder
cannot meet, and what a killed one left is made anew by the next. Where the file system cannot
exchange two folders, two renames do it; if the process dies exactly between them, the old folder
lies next to the place under a hidden name (`replaced_name`), and the next save, or a reader's
message, brings it back.
"""

import contextlib
import ctypes
import errno
import fcntl
import os
import shutil
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path

from torch import Tensor

from isomodels.errors import CheckpointError
from isomodels.weights_conv.bits import HeldTensors, LazyTensors
from isomodels.weights_conv.dist_names import CONFIG, METADATA
from isomodels.weights_conv.files import (
    CONTRACT,
    DIGESTS,
    INDEX,
    TensorFiles,
    read_tensors,
    refuse_undecodable,
    replaced_name,
)
from isomodels.weights_conv.shards import Progress, plan_shards, write_shards

Check = Callable[[Path], None]
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
    ".distcp",
)
_TEMPLATES = "additional_chat_templates"  # transformers' folder of a tokenizer's named ones
_DISTRIBUTED = (METADATA, CONFIG)  # of Megatron's dist_checkpointing
_AT_FDCWD = -100
_RENAME_EXCHANGE = 2
_NO_EXCHANGE = (errno.EINVAL, errno.ENOSYS, errno.EOPNOTSUPP, errno.EPERM)
_NO_LOCKS = (errno.ENOSYS, errno.ENOLCK, errno.EOPNOTSUPP)


def write_checkpoint(
    path: Path | str,
    tensors: Mapping[str, Tensor],
    *,
    like: TensorFiles | Path | None = None,
    small_files: Path | None = None,
    max_shard_size: int | None = None,
    files: Mapping[str, str] | None = None,
    progress: Progress | None = None,
    check: Check | None = None,
) -> None:
    """Write a checkpoint folder, replacing an old one only when the new one is whole on disk.

    Files of the old folder that are no weights and that the new one lacks are kept.

    Args:
        path: the folder; a checkpoint that is there already is replaced, and nothing else is.
        tensors: HF name -> tensor, on any device; `LazyTensors` are read one at a time.
        like: a checkpoint folder, or one that is open. Its config, tokenizer and other small
            files are copied, and its division into files is kept unless `max_shard_size` is given.
        small_files: the folder whose small files are copied, where there is no `like`.
        max_shard_size: bytes a file may have; a larger tensor gets a file of its own.
        files: file name -> text, to write beside the weights (instead of a copy).
        progress: called with the number of bytes after each tensor.
        check: called with the new folder before it takes its place; may raise.

    Raises:
        CheckpointError: the folder cannot be written, is a mount point, holds something else than
            a checkpoint, or another process writes it; or `tensors` has other names than `like`.
            What was at `path` is still there.
    """
    source = read_tensors(like) if isinstance(like, Path) else like
    lazy = tensors if isinstance(tensors, LazyTensors) else HeldTensors(tensors)
    plan = plan_shards(lazy, source, max_shard_size)

    def fill(folder: Path) -> None:
        write_shards(folder, lazy, plan, source, progress or (lambda _: None))
        copy_small_files(beside, folder, files or {})

    beside = source.path if source is not None else small_files
    size = sum(tensor.nbytes for tensor in lazy.meta().values())
    place(path, fill, size=size, beside=beside, check=check)


def place(
    path: Path | str,
    fill: Callable[[Path], None],
    *,
    size: int = 0,
    beside: Path | None = None,
    check: Check | None = None,
    distributed: bool = False,
) -> None:
    """Make a checkpoint folder, which takes its place in one step when it is whole on disk.

    Args:
        path: the folder; a checkpoint of the same kind that is there is replaced.
        fill: writes into the new folder that it is given.
        size: bytes that it will write at least; refused where the disk has less.
        beside: a folder that is read meanwhile, which must not lie in `path` nor around it.
        check: called with the new folder before it takes its place; may raise.
        distributed: the folder is of Megatron's dist_checkpointing, not of Hugging Face.

    Raises:
        CheckpointError: as `write_checkpoint`.
    """
    path = Path(os.path.realpath(path))
    try:
        _refuse_bad_place(path, beside, distributed)
        with _partial_folder(path) as partial:
            _refuse_full_disk(path, size)
            fill(partial)
            if path.is_dir():
                _keep_extras(path, partial)
            if check is not None:
                check(partial)
            _sync_tree(partial)
            _replace(partial, path)
    except OSError as error:
        # Only a rename names `path` itself here; other busy files lie below it or beside it.
        if error.errno == errno.EBUSY and str(error.filename) == str(path):
            raise _mount_point(path) from error
        raise CheckpointError(f"cannot write {path}: {error.strerror or error}") from error


def check_place(path: Path | str, beside: Path | None = None, *, distributed: bool = False) -> None:
    """Refuse what `place` would refuse of a path before it writes.

    Args:
        path, beside, distributed: as for `place`.

    Raises:
        CheckpointError: naming the path and the reason.
    """
    path = Path(os.path.realpath(path))
    try:
        _refuse_bad_place(path, beside, distributed)
    except OSError as error:
        raise CheckpointError(f"cannot write {path}: {error.strerror or error}") from error


def _refuse_full_disk(path: Path, size: int) -> None:
    free = shutil.disk_usage(path.parent).free
    if size > free:
        raise CheckpointError(
            f"cannot write {path}: it needs {size / 1e9:.1f} GB and {free / 1e9:.1f} GB are free"
        )


def _refuse_bad_place(path: Path, beside: Path | None, distributed: bool) -> None:
    refuse_undecodable(path)
    if path.exists() and not path.is_dir():
        raise CheckpointError(f"{path} is a file: give a folder to write to")
    if os.path.ismount(path):
        raise _mount_point(path)
    if path.is_dir() and not _may_be_replaced(path, distributed):
        what = " and ".join(_DISTRIBUTED) if distributed else "config.json and safetensors files"
        raise CheckpointError(
            f"{path} exists and is no checkpoint ({what}): give a new or an empty folder"
        )
    if beside is not None:
        other = Path(os.path.realpath(beside))
        if path != other and (path in other.parents or other in path.parents):
            raise CheckpointError(f"{path} and {other} lie one in the other: give another folder")


def _may_be_replaced(path: Path, distributed: bool) -> bool:
    names = {entry.name for entry in path.iterdir()}
    if distributed:
        return not names or names.issuperset(_DISTRIBUTED)
    # Many a project has a config.json: weights must lie beside it.
    weights = INDEX in names or any(name.endswith(".safetensors") for name in names)
    return not names or ("config.json" in names and weights)


def _mount_point(path: Path) -> CheckpointError:
    return CheckpointError(
        f"{path} is a mount point, which no folder can replace: give a folder below it"
    )


def copy_small_files(source: Path | None, folder: Path, files: Mapping[str, str]) -> None:
    """Copy what is no weights: config, tokenizer, generation config, chat template.

    Args:
        source: where they lie.
        folder: where to.
        files: file name -> text to write, instead of a copy.
    """
    for entry in source.iterdir() if source is not None else ():
        hidden = entry.name.startswith(".")
        weights = entry.name.endswith(_WEIGHTS) or entry.name in (*_DISTRIBUTED, CONTRACT, DIGESTS)
        if entry.is_file() and not hidden and not weights:
            shutil.copyfile(entry, folder / entry.name)
        elif entry.name == _TEMPLATES and entry.is_dir():
            (folder / _TEMPLATES).mkdir()
            for template in entry.glob("*.jinja"):
                shutil.copyfile(template, folder / _TEMPLATES / template.name)
    for name, text in files.items():
        (folder / name).write_text(text)


def _keep_extras(old: Path, new: Path) -> None:
    """Links what a user put beside the old weights into the new folder."""
    for entry in old.iterdir():
        target = new / entry.name
        weights = (".safetensors", ".safetensors.index.json", ".distcp", CONTRACT, DIGESTS)
        if target.exists() or entry.name.endswith(weights):
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
    partial = path.with_name(f".{path.name}.isomodels-partial")
    lock = _locked(partial, path)
    try:
        _recover(path)
        for left in partial.iterdir():  # of a save that was killed
            _remove(left)
        yield partial
    finally:
        # Once it has its place, the name is free for another save, which may have taken it.
        if _is(lock, partial):
            shutil.rmtree(partial, ignore_errors=True)
        os.close(lock)


def _locked(partial: Path, path: Path) -> int:
    """Make the folder if it is absent, and lock it: the open folder."""
    while True:
        with contextlib.suppress(FileExistsError):
            partial.mkdir()
        try:
            # a link of this name would have the folder behind it emptied
            lock = os.open(partial, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
        except FileNotFoundError:  # another save has just put it in its place
            continue
        except NotADirectoryError:
            raise CheckpointError(
                f"{partial}, where {path} would be made, is a file or a link: remove it"
            ) from None
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            if error.errno not in _NO_LOCKS:  # some network file systems have no locks
                os.close(lock)
                raise CheckpointError(
                    f"another process is writing {path}: wait for it, or give another folder"
                ) from None
        if _is(lock, partial):
            return lock
        os.close(lock)  # it was put in its place, or removed, before it was locked


def _is(handle: int, folder: Path) -> bool:
    try:
        return os.path.samestat(os.fstat(handle), os.stat(folder))
    except FileNotFoundError:
        return False


def _remove(entry: Path) -> None:
    if entry.is_dir() and not entry.is_symlink():
        shutil.rmtree(entry)
    else:
        entry.unlink()


def _recover(path: Path) -> None:
    """Brings back, or removes, the old folder of a save that was killed between two renames."""
    old = replaced_name(path)
    if old.is_dir():
        if path.exists():
            shutil.rmtree(old)
        else:
            os.rename(old, path)


def _replace(new: Path, path: Path) -> None:
    """Puts `new` at `path`. An old folder is removed."""
    if not path.is_dir():
        os.rename(new, path)
        _sync(path.parent)
        return
    lock = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
    try:
        # An exchange gives the old folder the name of a partial one: another save must not take it.
        with contextlib.suppress(OSError):
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        if _exchange(new, path):
            _sync(path.parent)
            shutil.rmtree(new, ignore_errors=True)
        else:
            old = replaced_name(path)
            os.rename(path, old)
            os.rename(new, path)
            _sync(path.parent)
            shutil.rmtree(old)
    finally:
        os.close(lock)
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
        if not entry.is_symlink() and (entry.is_file() or entry.is_dir()):  # a pipe would wait
            _sync(entry)
    _sync(folder)


def _sync(path: Path) -> None:
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
