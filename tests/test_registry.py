"""The registry finds architectures by folder, and says what is wrong with a folder."""

import importlib
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from isomodels import dense
from isomodels.errors import ConfigError, UnsupportedError
from isomodels.registry import FAMILIES, architectures, find_spec, load_object


@pytest.fixture
def add_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable]:
    """add_folder(name, text): a folder below `dense` whose __init__.py has this text."""
    monkeypatch.setattr(dense, "__path__", [*dense.__path__, str(tmp_path)])
    architectures.cache_clear()
    names = []

    def add(name: str, text: str) -> None:
        names.append(name)
        (tmp_path / name).mkdir()
        (tmp_path / name / "__init__.py").write_text(text)
        importlib.invalidate_caches()

    yield add
    architectures.cache_clear()
    for name in names:
        sys.modules.pop(f"isomodels.dense.{name}", None)


def test_every_folder_is_found_and_names_what_exists() -> None:
    root = Path(dense.__file__).parent.parent
    folders = {
        f"isomodels.{family}.{file.parent.name}"
        for family in FAMILIES
        for file in (root / family).glob("*/__init__.py")
    }
    found = architectures()
    assert {spec.model.rsplit(".", 1)[0] for spec in found.values()} == folders
    for name, spec in found.items():
        assert name == spec.architecture
        assert f"isomodels.{spec.family}." in spec.model
        for reference in (spec.config, spec.model, spec.weights, spec.tiny):
            assert load_object(reference) is not None


def test_two_folders_of_one_architecture(add_folder: Callable) -> None:
    add_folder("twin", "from isomodels.dense.qwen3 import SPEC")
    both = "isomodels/dense/qwen3 and isomodels/dense/twin both state Qwen3ForCausalLM"
    with pytest.raises(ConfigError, match=both):
        architectures()


@pytest.mark.parametrize("text", ["", "SPEC = None", "SPEC = {'architecture': 'X'}"])
def test_a_folder_without_a_spec(add_folder: Callable, text: str) -> None:
    add_folder("draft", text)
    with pytest.raises(ConfigError, match=r"isomodels/dense/draft .* SPEC = ArchSpec\(\.\.\.\)"):
        architectures()


def test_class_and_model_type_name_one_architecture_each() -> None:
    """`isomodels parity --arch` takes either."""
    specs = architectures()
    assert len({spec.model_type for spec in specs.values()}) == len(specs)
    for name, spec in specs.items():
        assert find_spec(name) is find_spec(spec.model_type) is spec
    with pytest.raises(UnsupportedError, match="unknown architecture 'gpt2'"):
        find_spec("gpt2")
