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

from tests.kernel.battery import assert_same_bits

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


def assert_rows_stand_alone_on_gpu(op, x: Tensor, counts: tuple[int, ...]) -> Tensor:
    """Row t of op(x) must not depend on how many rows, which, and where; returns op(x)."""
    whole = op(x)
    assert_same_bits(op(x), whole, "second run")
    for count in counts:
        if count < len(x):
            assert_same_bits(op(x[:count]), whole[:count], f"the first {count} rows")
            assert_same_bits(op(x[-count:]), whole[-count:], f"the last {count} rows")
    for row in (0, 1, len(x) // 2, len(x) - 1):
        assert_same_bits(op(x[row : row + 1]), whole[row : row + 1], f"row {row} alone")
        among = torch.full_like(x[:70], torch.nan)
        among[33] = x[row]
        assert_same_bits(op(among)[33], whole[row], f"row {row} among NaN")
    assert_same_bits(op(x.flip(0)).flip(0), whole, "rows in reverse")
    wide = torch.full((len(x), x[0].numel() + 7), torch.nan, dtype=x.dtype, device=x.device)
    wide[:, 3 : 3 + x[0].numel()] = x.flatten(1)
    view = wide[:, 3 : 3 + x[0].numel()].unflatten(1, x.shape[1:]) if x.dim() > 2 else None
    view = wide[:, 3 : 3 + x.shape[1]] if view is None else view
    assert_same_bits(op(view), whole, "part of a wider matrix at an odd offset")
    assert op(x[:0]).shape == (0, *whole.shape[1:])
    return whole


def assert_same_in_a_graph(op, x: Tensor) -> None:
    """The same bits when captured and replayed on other values."""
    other = x.flip(0).clone()
    expected, buffer = op(other), x.clone()
    op(buffer)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = op(buffer)
    buffer.copy_(other)
    graph.replay()
    torch.cuda.synchronize()
    assert_same_bits(out, expected, "replayed")
