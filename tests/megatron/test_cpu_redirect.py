"""The redirect moves devices, never arithmetic, and leaves nothing behind."""

import pytest
import torch

pytest.importorskip("megatron.core", reason="megatron-core is not installed")

from isomodels.errors import HostError
from isomodels.megatron import cpu_redirect
from tests.megatron.bits import assert_same_bits

NAMES = list(cpu_redirect._STAND_INS)


@pytest.fixture
def redirected():
    cpu_redirect.install()
    yield
    cpu_redirect.uninstall()


def compute() -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(33, 65, generator=generator)
    w = torch.randn(65, 17, generator=generator, dtype=torch.float32).bfloat16()
    return [x.softmax(-1), x.to(torch.bfloat16) @ w, x.sum(0), torch.nn.functional.silu(x)]


def test_devices_become_the_cpu(redirected):
    assert torch.zeros(2, device="cuda").device.type == "cpu"
    assert torch.zeros(2).cuda().device.type == "cpu"
    assert torch.cuda.current_device() == torch.device("cpu")
    assert torch.zeros(2, dtype=torch.bfloat16).type() == "torch.cuda.BFloat16Tensor"


def test_arithmetic_keeps_its_bits():
    before = compute()
    cpu_redirect.install()
    try:
        inside = compute()
    finally:
        cpu_redirect.uninstall()
    for left, right in zip(before, inside, strict=True):
        assert_same_bits(left, right)


def test_uninstall_restores_everything():
    before = [getattr(torch.cuda, name) for name in NAMES]
    cpu_redirect.install()
    cpu_redirect.install()
    assert all(getattr(torch.cuda, n) is not b for n, b in zip(NAMES, before, strict=True))
    cpu_redirect.uninstall()
    assert [getattr(torch.cuda, name) for name in NAMES] == before
    assert torch.zeros(2).type() == "torch.FloatTensor"


def test_refused_where_there_is_a_gpu(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    with pytest.raises(HostError, match="without a GPU"):
        cpu_redirect.install()
