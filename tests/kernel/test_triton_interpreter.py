import os
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest
import torch

FILES = (
    "linear",
    "row_linear",
    "pointwise",
    "logprob",
    "causal_conv",
    "gates_and_norms",
    "grouped_linear",
    "routing",
)


@pytest.mark.skipif(find_spec("triton") is None, reason="Triton is not installed")
@pytest.mark.skipif(torch.cuda.is_available(), reason="the same tests run on the GPU itself")
def test_kernels_in_the_interpreter():
    files = [str(Path(__file__).with_name(f"test_{name}_triton.py")) for name in FILES]
    command = [sys.executable, "-m", "pytest", "-q", "-x", "-p", "no:cacheprovider", *files]
    environment = {**os.environ, "TRITON_INTERPRET": "1"}
    result = subprocess.run(command, env=environment, capture_output=True, text=True)
    assert result.returncode == 0, result.stdout[-4000:]
