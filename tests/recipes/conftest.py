from types import SimpleNamespace

import pytest
import torch

from tests.checkpoints import make_qwen3
from tests.recipes.recipes import stand_in

LENGTHS = (5, 1, 17, 9)


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    return make_qwen3(tmp_path_factory.mktemp("checkpoint") / "qwen3", torch.bfloat16, tied=True)


@pytest.fixture(scope="module")
def trainer(checkpoint):
    from isomodels.megatron import Trainer

    with Trainer(checkpoint, dtype=torch.bfloat16) as trainer:
        yield trainer


@pytest.fixture(scope="module")
def sequences() -> list[list[int]]:
    generator = torch.Generator().manual_seed(0)
    return [torch.randint(512, (n,), generator=generator).tolist() for n in LENGTHS]


@pytest.fixture
def bridge(monkeypatch):
    """What the recipes import where Megatron-Bridge is missing: it notes how it is called."""
    calls: list[tuple] = []

    def iso_bridge(checkpoint, **kwargs):
        calls.append((checkpoint, kwargs))
        return SimpleNamespace()

    module = "isomodels.megatron.bridge"
    stand_in(monkeypatch, module, iso_bridge=iso_bridge, IsoAutoBridge=SimpleNamespace())
    return calls
