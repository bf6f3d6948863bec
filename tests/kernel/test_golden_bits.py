"""Row 13 of the field reports: a library's new release changed bits silently.

Operations made of IEEE additions, products, divisions and square roots alone have one right bit
pattern on every processor. Their digests stand here beside the version of the schedule: whoever
changes a bit must raise the version, and a library that changes one is noticed.
"""

import hashlib

import pytest
import torch
from torch import Tensor

from isomodels.kernels.fixed_order import fold_sum
from isomodels.kernels.rms_norm import add_rms_norm, rms_norm
from isomodels.kernels.rope import rope
from isomodels.kernels.row_linear import tree_sum
from isomodels.kernels.schedule import SCHEDULES
from isomodels.validate.inputs import numbers

GOLDEN = {
    ("fold_sum", torch.float32): "1adbb4006f38414c",
    ("tree_sum", torch.float32): "8f023ab414d09c41",
    ("rms_norm", torch.float32): "8ff0ed2b72598382",
    ("rms_norm", torch.bfloat16): "f91032515a84125a",
    ("add_rms_norm", torch.float32): "eacfc9342f8277ca",
    ("add_rms_norm", torch.bfloat16): "7d204812929f5f0f",
    ("rope", torch.float32): "8325e6710d18242a",
    ("rope", torch.bfloat16): "cf3204bef305b3cf",
}
VERSIONS = {"rms_norm": 1, "add_rms_norm": 1, "rope": 1}


def outputs(operation: str, dtype: torch.dtype) -> tuple[Tensor, ...]:
    x = numbers(23, 200, seed=1, dtype=dtype)
    weight = numbers(200, seed=2, dtype=dtype)
    match operation:
        case "fold_sum":
            return (fold_sum(x),)
        case "tree_sum":
            return (tree_sum(list(x[:16].view(4, 4, 200))),)
        case "rms_norm":
            return (rms_norm(x, weight, 1e-6),)
        case "add_rms_norm":
            return add_rms_norm(x, numbers(23, 200, seed=3, dtype=dtype), weight, 1e-6)
        case _:
            table = numbers(30, 40, seed=4, dtype=torch.float32)
            positions = torch.arange(23)
            return (rope(x.view(23, 5, 40), positions, table, weight[:40].contiguous(), 1e-6),)


def digest(tensors: tuple[Tensor, ...]) -> str:
    content = b"".join(t.contiguous().view(torch.uint8).numpy().tobytes() for t in tensors)
    return hashlib.sha256(content).hexdigest()[:16]


@pytest.mark.parametrize(("operation", "dtype"), GOLDEN)
def test_row_13_bits_are_those_of_this_version(operation: str, dtype: torch.dtype) -> None:
    if operation in VERSIONS:
        assert SCHEDULES[operation, "torch"].version == VERSIONS[operation]
    assert digest(outputs(operation, dtype)) == GOLDEN[operation, dtype]


def test_a_moved_bit_changes_the_digest() -> None:
    (y,) = outputs("rms_norm", torch.float32)
    moved = y.clone()
    moved.view(torch.int32)[3, 5] += 1
    assert digest((moved,)) != digest((y,))
