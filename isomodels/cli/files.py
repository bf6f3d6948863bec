"""Files that a command writes."""

from pathlib import Path

from isomodels.errors import CheckpointError


def check_writable(file: Path | None) -> None:
    """Refuse a file that cannot be written before minutes of work, not after.

    An old report stays until there is a new one.

    Raises:
        CheckpointError: naming the file and the reason.
    """
    if file is None:
        return
    existed = file.exists()
    try:
        with file.open("a"):
            pass
    except OSError as error:
        raise CheckpointError(f"--json {file}: cannot be written ({error.strerror})") from None
    if not existed:
        file.unlink()
