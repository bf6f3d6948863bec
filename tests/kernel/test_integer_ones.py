"""Every kernel compiles where an integer argument is 1: one head, row, expert, a pitch of one.

See `ones.py`, which does it. The Hopper form of attention is Gluon for one version of Triton, and
is compiled by its own tests.
"""

import ast
import json
import os
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest

pytestmark = [
    pytest.mark.skipif(find_spec("triton") is None, reason="Triton is not installed"),
    pytest.mark.skipif(os.environ.get("TRITON_INTERPRET") == "1", reason="compiles nothing"),
]
KERNELS = Path(__file__).parents[2] / "kernels"
ELSEWHERE = {"attention_hopper_triton"}


def _jitted(function: ast.stmt) -> bool:
    return isinstance(function, ast.FunctionDef) and any(
        "jit" in ast.unparse(one) for one in function.decorator_list
    )


def launched() -> set[str]:
    """module.kernel of each that Python code launches or hands to a launcher."""
    found = set()
    for file in KERNELS.glob("*_triton.py"):
        body = ast.parse(file.read_text()).body
        own = {one.name for one in body if isinstance(one, ast.FunctionDef) and _jitted(one)}
        host = [one for one in body if not _jitted(one)]
        used = {
            node.id for one in host for node in ast.walk(one) if isinstance(node, ast.Name)
        }  # fmt: skip
        found |= {f"{file.stem}.{name}" for name in own & used}
    return {name for name in found if name.partition(".")[0] not in ELSEWHERE}


def test_every_kernel_compiles_with_ones():
    command = [sys.executable, "-W", "ignore", "-m", "tests.kernel.ones"]
    done = subprocess.run(command, capture_output=True, text=True, cwd=KERNELS.parent)
    assert done.returncode == 0, done.stderr[-2000:]
    result = json.loads(done.stdout.splitlines()[-1])
    assert result["failed"] == {}
    assert launched() - set(result["compiled"]) == set()
