import sys
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path
from types import ModuleType

import pytest

SCRIPT = Path(__file__).parents[2] / "examples" / "grpo" / "grpo.py"


@pytest.fixture(scope="session")
def grpo() -> ModuleType:
    """The example as a module."""
    spec = spec_from_file_location("grpo_example", SCRIPT)
    assert spec is not None
    assert spec.loader is not None
    module = module_from_spec(spec)
    sys.path.insert(0, str(SCRIPT.parent))  # as for a script: its options lie beside it
    sys.modules[spec.name] = module  # dataclasses look their module up
    spec.loader.exec_module(module)
    return module
