"""Where the Triton kernels run in the tests: on the GPU, or in Triton's interpreter without one.

The interpreter shows errors of indices and masks. It multiplies no bf16 matrices and cuts instead
of rounding to bf16, so on a CPU only fp32 results are compared. Bits are compared on a GPU, in the
tests marked `gpu`.
"""

import os
from importlib import import_module
from importlib.util import find_spec
from types import ModuleType

import pytest
import torch
from torch import Tensor

from isomodels.validate import rows
from isomodels.validate.rows import assert_same_in_a_graph

__all__ = [
    "DEVICE",
    "ON_GPU",
    "assert_rows_stand_alone_on_gpu",
    "assert_same_in_a_graph",
    "kernels",
]

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
ON_GPU = pytest.mark.gpu


def kernels(name: str) -> ModuleType:
    """`isomodels.kernels.NAME`; skips the module where neither GPU nor interpreter is at hand.

    Triton reads TRITON_INTERPRET when it is first imported, so the interpreter has a process of its
    own: see test_triton_interpreter.py.
    """
    if find_spec("triton") is None:
        pytest.skip("Triton is not installed", allow_module_level=True)
    if DEVICE == "cpu" and os.environ.get("TRITON_INTERPRET") != "1":
        pytest.skip("runs in test_triton_interpreter.py", allow_module_level=True)
    return import_module(f"isomodels.kernels.{name}")


def assert_rows_stand_alone_on_gpu(
    op: rows.RowFunction, x: Tensor, counts: tuple[int, ...]
) -> Tensor:
    """Row t of op(x) must not depend on how many rows, which, and where; returns op(x)."""
    whole = rows.assert_row_invariant(op, x, counts=counts)
    rows.assert_storage_does_not_matter(op, x)
    return whole
