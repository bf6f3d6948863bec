"""Imports point one way, and the package stays light and complete."""

import ast
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
CORE = {
    "batch",
    "checkpoint",
    "config",
    "conversion",
    "errors",
    "registry",
    "stored_weights",
}
BRICKS = {"kernels", "layers", "weights_conv"} | CORE
FAMILIES = {"dense", "moe", "hybrid"}
HOSTS = {"vllm", "megatron"}
# What the files of each part may import from isomodels, beside the part itself.
MAY_IMPORT = {
    "kernels": {"errors"},
    "weights_conv": {"errors"},
    **{name: CORE | {"weights_conv"} for name in CORE},
    "layers": BRICKS,
    # The registry reads an architecture's config by name; none imports another.
    **dict.fromkeys(FAMILIES, BRICKS),
    "validate": {"kernels", "errors"},
    "trace": BRICKS,
    "contract": BRICKS | FAMILIES | {"validate"},
    "sync": {"contract", "errors"},
    **dict.fromkeys(HOSTS, BRICKS | FAMILIES | {"validate", "contract", "sync", "trace"}),
    "parity": BRICKS | FAMILIES | HOSTS | {"validate", "contract", "sync"},
    "cli": BRICKS | FAMILIES | HOSTS | {"parity", "validate", "contract", "trace"},
}
# Leaves that other projects may copy: nothing but these from outside.
OUTSIDE = {"kernels": {"torch", "triton"}, "weights_conv": {"torch", "safetensors"}}


def source_files() -> list[Path]:
    files = [p for p in (ROOT / "isomodels").rglob("*.py") if not p.parent.is_symlink()]
    return sorted({*files, *ROOT.glob("kernels/*.py"), *ROOT.glob("weights_conv/*.py")})


def part_of(file: Path) -> str:
    relative = file.relative_to(ROOT).parts
    parts = relative[1:] if relative[0] == "isomodels" else relative
    return parts[0].removesuffix(".py")


def imported(tree: ast.AST) -> set[str]:
    """Dotted names of all imports, also those inside functions."""
    names: set[str] = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, "relative import"
            # `from isomodels import x` imports the part x.
            names |= {f"{node.module}.{alias.name}" for alias in node.names}
    return names


def violations(file: Path, text: str) -> list[str]:
    part, found = part_of(file), []
    for name in sorted(imported(ast.parse(text))):
        top, *rest = name.split(".")
        if top == "isomodels":
            target = rest[0] if rest else ""
            if part == "__init__" or target.startswith("__"):
                allowed = target.startswith("__")
            elif target == part and part in FAMILIES:
                allowed = rest[1] == file.parent.name
            else:
                allowed = target == part or target in MAY_IMPORT[part]
        elif top in HOSTS:
            allowed = part == top
        else:
            outside = OUTSIDE.get(part)
            allowed = outside is None or top in outside or top in sys.stdlib_module_names
        if not allowed:
            found.append(f"{file.relative_to(ROOT)} imports {name}")
    return found


def test_imports_point_one_way() -> None:
    files = source_files()
    assert set(MAY_IMPORT) | {"__init__"} == {part_of(file) for file in files}
    assert len(files) > 20
    assert [v for file in files for v in violations(file, file.read_text())] == []


@pytest.mark.parametrize(
    ("file", "line"),
    [
        ("kernels/x.py", "from isomodels.layers.mlp import MLP"),
        ("kernels/x.py", "import numpy"),
        ("weights_conv/x.py", "from isomodels.config import DTYPES"),
        ("weights_conv/x.py", "import huggingface_hub"),
        ("isomodels/layers/x.py", "from isomodels.dense.qwen3.model import Qwen3ForCausalLM"),
        ("isomodels/dense/mimo/x.py", "from isomodels.dense.qwen3.model import Qwen3ForCausalLM"),
        ("isomodels/dense/mimo/x.py", "from isomodels.vllm import plugin"),
        ("isomodels/megatron/x.py", "from isomodels import vllm"),
        ("isomodels/megatron/x.py", "def f():\n    import vllm"),
        ("isomodels/vllm/x.py", "import isomodels.cli.main"),
        ("isomodels/megatron/x.py", "from isomodels.parity import workload"),
        ("isomodels/parity/x.py", "from isomodels.cli import progress"),
        ("isomodels/parity/x.py", "import vllm"),
        ("isomodels/validate/x.py", "from isomodels.layers import norm"),
        ("isomodels/layers/x.py", "from isomodels.validate import bits"),
        ("isomodels/checkpoint.py", "from isomodels.layers import norm"),
        ("isomodels/layers/x.py", "from isomodels.trace import record"),
        ("isomodels/trace/x.py", "from isomodels.contract import contract_of"),
        ("isomodels/cli/x.py", "import vllm.version"),
        ("isomodels/__init__.py", "import isomodels.checkpoint"),
    ],
)
def test_a_wrong_import_is_seen(file: str, line: str) -> None:
    assert violations(ROOT / file, line)


def test_no_import_loads_a_host() -> None:
    """Neither the package nor a model, nor the command, loads vLLM or Megatron."""
    code = (
        "import sys, isomodels\n"
        "assert 'torch' not in sys.modules, 'import isomodels loads torch'\n"
        "import isomodels.cli.main, isomodels.checkpoint\n"
        "from isomodels.registry import architectures, load_object\n"
        "for spec in architectures().values():\n"
        "    load_object(spec.model), load_object(spec.config), load_object(spec.weights)\n"
        "loaded = {'vllm', 'megatron', 'transformers'} & set(sys.modules)\n"
        "assert not loaded, loaded\n"
    )
    subprocess.run([sys.executable, "-c", code], check=True, cwd="/", timeout=120)


def test_links_are_relative() -> None:
    for name in ("kernels", "weights_conv"):
        link = ROOT / "isomodels" / name
        assert link.is_symlink()
        assert str(link.readlink()) == f"../{name}"
        assert not (ROOT / name / "__init__.py").exists()


def test_wheel_holds_the_linked_files(tmp_path: Path) -> None:
    copy = tmp_path / "copy"  # a build leaves its folders beside the sources
    for name in ("isomodels", "kernels", "weights_conv"):
        shutil.copytree(ROOT / name, copy / name, symlinks=True)
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, copy)
    build = ["wheel", "-q", "--no-deps", "--no-build-isolation", "-w", str(tmp_path), str(copy)]
    subprocess.run([sys.executable, "-m", "pip", *build], check=True, timeout=300)
    (wheel,) = tmp_path.glob("*.whl")
    names = {n for n in zipfile.ZipFile(wheel).namelist() if n.endswith(".py")}
    relative = {file.relative_to(ROOT).as_posix() for file in source_files()}
    assert names == {n if n.startswith("isomodels/") else f"isomodels/{n}" for n in relative}
