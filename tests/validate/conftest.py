"""A kernel can be replaced by a faulty one; reports lie in a folder of the test's own."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from isomodels.validate.battery import Place, load_operations, operators
from isomodels.validate.run import run_check

QUICK = Place(torch.device("cpu"), "quick")
Broken = Callable[[str, Callable[..., Any]], None]


@pytest.fixture
def broken(monkeypatch: pytest.MonkeyPatch) -> Broken:
    """broken(operation, make): its CPU kernel is make(the right kernel) during the test."""

    def replace(name: str, make: Callable[..., Any]) -> None:
        kernels = operators()[name]._backend_fns
        monkeypatch.setitem(kernels, "cpu", make(kernels["cpu"]))

    return replace


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Where reports lie during the test."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    return tmp_path / "isomodels" / "validate"


@pytest.fixture
def few_operations(monkeypatch: pytest.MonkeyPatch) -> None:
    """The battery has three fast operations only."""
    few = {name: load_operations()[name] for name in ("embedding", "rms_norm", "swiglu")}
    for module in ("run", "start"):
        monkeypatch.setattr(f"isomodels.validate.{module}.load_operations", lambda: few)


def fault_of(name: str, check: str, place: Place = QUICK) -> str | None:
    """What one check of an operation says."""
    return run_check(place, load_operations()[name], check)[1]
