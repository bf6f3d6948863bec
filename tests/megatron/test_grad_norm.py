"""Rows that several ranks hold count once, under the name that each version of Megatron gives."""

import pytest
import torch
from torch import Tensor

from isomodels.errors import HostError
from isomodels.megatron.grad_norm import _count_once


class Before019:
    """What the norm asks of an optimizer up to megatron-core 0.18.2."""

    def __init__(self, *parameters: Tensor):
        self.parameters = list(parameters)

    def get_parameters(self) -> list[Tensor]:
        return self.parameters

    def get_main_grads_for_grad_norm(self) -> list[Tensor]:
        return [one.grad for one in self.parameters]


class Since019(Before019):
    """The same in 0.19.2, whose method takes a group."""

    get_main_grads_for_grad_norm = property()  # type: ignore[assignment]

    def get_grads_for_grad_norm(self, grad_norm_group: str | None = None) -> list[Tensor]:
        return [one.grad for one in self.parameters] if grad_norm_group is None else []


def _parameter(rows: int) -> Tensor:
    one = torch.zeros(rows, 2, requires_grad=True)
    one.grad = torch.arange(2.0 * rows).view(rows, 2)
    return one


@pytest.mark.parametrize("kind", [Before019, Since019])
def test_repeated_rows_are_left_out(kind):
    shared, own = _parameter(4), _parameter(3)
    optimizer = kind(shared, own)
    _count_once(optimizer, {shared: [(2, 6)]})  # rows 1 and 2
    method = "get_main_grads_for_grad_norm" if kind is Before019 else "get_grads_for_grad_norm"
    found = torch.cat([one.reshape(-1) for one in getattr(optimizer, method)()])
    assert found.tolist() == [0, 1, 6, 7, *range(6)]
    if kind is Since019:
        assert optimizer.get_grads_for_grad_norm("router") == []


def test_a_version_without_either_is_refused():
    with pytest.raises(HostError, match=r"this megatron-core's object has none of .*: install"):
        _count_once(object(), {})
