"""Comparison by bit pattern: torch.equal holds -0 and +0 for the same."""

import torch
from torch import Tensor

_INTEGERS = {torch.float32: torch.int32, torch.bfloat16: torch.int16}


def assert_same_bits(left: Tensor, right: Tensor, what: str = "tensors") -> None:
    assert left.dtype == right.dtype, what
    assert left.shape == right.shape, what
    integers = _INTEGERS[left.dtype]
    differ = int((left.detach().view(integers) != right.detach().view(integers)).sum())
    assert differ == 0, f"{what}: {differ} of {left.numel()} differ"


def assert_all_same_bits(left: list[Tensor], right: list[Tensor]) -> None:
    assert len(left) == len(right)
    for index, (a, b) in enumerate(zip(left, right, strict=True)):
        assert_same_bits(a, b, f"tensor {index}")
