"""The sync row's parts that need no GPU."""

import pytest
import torch
from torch import nn

from benchmarks.sync import TimedClient, in_one_buffer


def test_parameters_lie_in_one_allocation():
    core = nn.Sequential(nn.Linear(7, 3), nn.Linear(3, 5)).to(torch.bfloat16)
    shapes = [p.shape for p in core.parameters()]
    in_one_buffer(core)
    parameters = list(core.parameters())
    assert [p.shape for p in parameters] == shapes
    assert len({p.untyped_storage().data_ptr() for p in parameters}) == 1
    first = parameters[0].data_ptr()
    assert [p.data_ptr() - first for p in parameters] == [0, 256, 512, 768]


def test_each_call_is_timed_also_when_it_fails():
    class Client:
        def good(self, x):
            return x + 1

        def bad(self):
            raise ValueError("no answer")

    client = TimedClient(Client())
    assert client.good(1) == 2
    with pytest.raises(ValueError, match="no answer"):
        client.bad()
    assert client.seconds.keys() == {"good", "bad"}
    assert min(client.seconds.values()) >= 0
