import pytest
import torch

from tests.hybrid.models import load_ours, make


@pytest.fixture(scope="session")
def checkpoint(tmp_path_factory):
    """checkpoint(name, dtype) -> folder; made once."""
    made = {}

    def get(name, dtype=torch.float32):
        key = (name, dtype)
        if key not in made:
            made[key] = make(name, tmp_path_factory.mktemp(name), dtype)
        return made[key]

    return get


@pytest.fixture(scope="session")
def ours(checkpoint):
    """ours(name, dtype) -> our module, shared: leave its weights as they are."""
    made = {}

    def get(name, dtype=torch.float32):
        key = (name, dtype)
        if key not in made:
            made[key] = load_ours(checkpoint(name, dtype)).requires_grad_(False)
        return made[key]

    return get
