"""The code of docs/recipes.md, and stand-ins for the modules that it imports."""

import importlib.util
import re
import sys
from pathlib import Path
from types import ModuleType

import pytest

DOCUMENT = Path(__file__).parents[2] / "docs" / "recipes.md"


def recipes() -> dict[str, str]:
    """File name -> content, of each code block that names its file in the first line."""
    text = DOCUMENT.read_text()
    blocks = re.findall(r"```python\n(# (\w+)\.py\n.*?)```", text, re.DOTALL)
    return {name: code for code, name in blocks}


def load(name: str, folder: Path, monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """A recipe as a module, with the recipes that it imports beside it."""
    for other, code in recipes().items():
        (folder / f"{other}.py").write_text(code)
    monkeypatch.syspath_prepend(str(folder))
    for other in recipes():
        monkeypatch.delitem(sys.modules, other, raising=False)
    spec = importlib.util.spec_from_file_location(name, folder / f"{name}.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    monkeypatch.setitem(sys.modules, name, module)
    spec.loader.exec_module(module)
    return module


def stand_in(monkeypatch: pytest.MonkeyPatch, path: str, **names: object) -> ModuleType:
    """A module of this path with these names, and its parent packages."""
    parent = None
    parts = path.split(".")
    for depth in range(1, len(parts) + 1):
        name = ".".join(parts[:depth])
        known = sys.modules.get(name)
        module = known if known is not None else ModuleType(name)
        if known is None:
            module.__path__ = []
            monkeypatch.setitem(sys.modules, name, module)
        if parent is not None:
            monkeypatch.setattr(parent, parts[depth - 1], module, raising=False)
        parent = module
    assert parent is not None
    for name, value in names.items():
        monkeypatch.setattr(parent, name, value, raising=False)
    return parent
