"""An object in a process of its own, called through a pipe.

Engine, trainer and stock runs each need a whole process: they set global state that must not meet.
"""

import contextlib
import multiprocessing
import os
import queue
import sys
import tempfile
import threading
import traceback
from collections.abc import Mapping, Sequence
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from isomodels.errors import IsoError
from isomodels.registry import load_object


class ProcessError(RuntimeError):
    """A process that failed for no fault of the input."""


def threads(device: str) -> dict[str, str]:
    """Environment of a process beside others: on a CPU one thread, unless the user has said.

    Products run on one thread anyway (`kernels/fixed_order.py`); the rest is too small to share,
    and threads that wait for one another take the cores of the other processes.
    """
    return {"OMP_NUM_THREADS": os.environ.get("OMP_NUM_THREADS", "1")} if device == "cpu" else {}


class Remote:
    """Starts `factory(**kwargs)` in a new process and runs its methods there, in order.

    Args:
        name: for messages.
        factory: "module:name".
        environment: variables set there before anything is built.
        forked: fork a process that has imported these modules, which several then need not do.
        kwargs: picklable arguments.

    `result` gives the next outstanding value: first that of the start (None), then one for each
    `submit`. It raises an `IsoError` as raised there, and a `ProcessError` for any other failure,
    which names the process's log.
    """

    def __init__(
        self,
        name: str,
        factory: str,
        *,
        environment: Mapping[str, str] | None = None,
        forked: Sequence[str] = (),
        **kwargs: Any,
    ):
        self.name = name
        descriptor, path = tempfile.mkstemp(prefix=f"isomodels-{name}-", suffix=".log")
        os.close(descriptor)
        self.log = Path(path)
        context: Any = multiprocessing.get_context("forkserver" if forked else "spawn")
        if forked:
            context.set_forkserver_preload(list(forked))
        self._pipe, theirs = context.Pipe()
        self._process = context.Process(
            target=_serve,
            args=(theirs, str(self.log), factory, dict(environment or {}), kwargs),
            name=name,
        )
        self._process.start()
        theirs.close()
        # Read all the time: a process that waits to send does not go on to its next method.
        self._named_log = False
        self._answers: queue.SimpleQueue[tuple[str, Any]] = queue.SimpleQueue()
        threading.Thread(target=self._read, daemon=True).start()

    def submit(self, method: str, *args: Any, **kwargs: Any) -> None:
        """Start a method without waiting."""
        with contextlib.suppress(OSError):  # it ended: `result` says why
            self._pipe.send((method, args, kwargs))

    def result(self) -> Any:
        """Wait for the next outstanding value."""
        kind, value = self._answers.get()
        self._named_log = self._named_log or kind in ("end", "error")
        if kind == "end":
            self._answers.put((kind, value))
            self._process.join()
            code, last = self._process.exitcode, self._last_line()
            raise ProcessError(
                f"the {self.name} process ended (exit code {code}): {last}\n(log: {self.log})"
            )
        if kind == "iso":
            raise value
        if kind == "error":
            raise ProcessError(f"the {self.name} process failed: {value}\n(log: {self.log})")
        return value

    def call(self, method: str, *args: Any, **kwargs: Any) -> Any:
        """Run a method and wait for its value; nothing else may be outstanding."""
        self.submit(method, *args, **kwargs)
        return self.result()

    @property
    def ready(self) -> bool:
        """Whether `result` would not wait."""
        return not self._answers.empty()

    def kill(self) -> None:
        """End the process at once, in the middle of whatever it does, and those it started."""
        import psutil  # type: ignore[import-untyped]

        started: list[Any] = []
        with contextlib.suppress(psutil.NoSuchProcess):
            started = psutil.Process(self._process.pid).children(recursive=True)
        self._process.kill()
        self._process.join()
        for one in started:
            with contextlib.suppress(psutil.NoSuchProcess):
                one.kill()

    def _read(self) -> None:
        with contextlib.suppress(EOFError, OSError):
            while True:
                self._answers.put(self._pipe.recv())
        self._answers.put(("end", None))

    def _last_line(self) -> str:
        lines = self.log.read_text(errors="replace").split("\n")
        return next((line for line in reversed(lines) if line.strip()), "")

    def stop(self) -> None:
        """Ask the process to end, without waiting."""
        if self._process.is_alive():
            with contextlib.suppress(OSError):
                self._pipe.send(None)

    def close(self) -> None:
        """End the process; its log goes with it unless a `ProcessError` names it."""
        if self._process.is_alive():
            self.stop()
            self._process.join(20)
        for end in (self._process.terminate, self._process.kill):
            if self._process.is_alive():
                end()
                self._process.join(5)
        if not self._named_log:
            self.log.unlink(missing_ok=True)

    def __enter__(self) -> "Remote":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def _serve(
    pipe: Connection,
    log: str,
    factory: str,
    environment: dict[str, str],
    kwargs: dict[str, Any],
) -> None:
    """The other process: build the object, then answer calls until told to end."""
    os.environ.update(environment)
    with open(log, "ab", buffering=0) as file:
        os.dup2(file.fileno(), 1)
        os.dup2(file.fileno(), 2)
    failed = False
    target: Any = None
    try:
        target = load_object(factory)(**kwargs)
        pipe.send(("value", None))
        while (message := pipe.recv()) is not None:
            method, args, keywords = message
            pipe.send(("value", getattr(target, method)(*args, **keywords)))
    except EOFError:
        pass  # the parent is gone
    except IsoError as error:
        failed = True
        traceback.print_exc()
        pipe.send(("iso", error))
    except Exception as error:
        failed = True
        traceback.print_exc()
        cause = _iso_cause(error)
        pipe.send(("iso", cause) if cause else ("error", f"{type(error).__name__}: {error}"))
    if hasattr(target, "close"):
        target.close()
    sys.exit(int(failed))


def _iso_cause(error: BaseException | None) -> IsoError | None:
    """Hosts wrap our refusals in errors of their own."""
    while error is not None:
        if isinstance(error, IsoError):
            return error
        error = error.__cause__ or error.__context__
    return None
