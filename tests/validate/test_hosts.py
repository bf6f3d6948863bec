"""Both hosts ask before they build a model, and refuse where the kernels failed."""

from pathlib import Path

import pytest
import torch

from isomodels.errors import UnsupportedError
from isomodels.validate.device import facts
from isomodels.validate.report import load, store
from tests.checkpoints import make_qwen3
from tests.validate.conftest import Broken
from tests.validate.test_faults import wrong_by
from tests.validate.test_report import report

CPU = torch.device("cpu")
REFUSED = r"kernels failed their checks on .*: run `isomodels validate --device cpu` to see why"
pytestmark = pytest.mark.usefixtures("cache", "few_operations")


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_qwen3(tmp_path_factory.mktemp("hosts") / "model", num_hidden_layers=1)


def build_in_vllm(checkpoint: Path) -> torch.nn.Module:
    """The model as vLLM's worker builds it."""
    from vllm.config import set_current_vllm_config
    from vllm.engine.arg_utils import EngineArgs

    from isomodels.vllm.model import IsoModelsForCausalLM

    options = {"dtype": "float32", "max_model_len": 256, "model_impl": "isomodels"}
    config = EngineArgs(model=str(checkpoint), **options).create_engine_config()
    with set_current_vllm_config(config), torch.device(config.device_config.device):
        return IsoModelsForCausalLM(vllm_config=config)


def build_in_megatron(checkpoint: Path) -> torch.nn.Module:
    """The module as the provider builds it."""
    from isomodels.config import read_config
    from isomodels.megatron.provider import build_core

    return build_core(*read_config(checkpoint), torch.float32)


HOSTS = {"vllm": build_in_vllm, "megatron": build_in_megatron}


@pytest.mark.parametrize("host", HOSTS)
def test_a_host_refuses_a_failing_report(host: str, checkpoint: Path) -> None:
    pytest.importorskip(host)
    store(report("full", fault="row 3 differs"))
    with pytest.raises(UnsupportedError, match=REFUSED):
        HOSTS[host](checkpoint)


@pytest.mark.parametrize("host", HOSTS)
def test_a_host_refuses_faulty_kernels(host: str, checkpoint: Path, broken: Broken) -> None:
    pytest.importorskip(host)
    broken("swiglu", wrong_by(1.1))
    with pytest.raises(UnsupportedError, match=REFUSED):
        HOSTS[host](checkpoint)


@pytest.mark.parametrize("host", HOSTS)
def test_a_host_proves_the_kernels_and_goes_on(host: str, checkpoint: Path) -> None:
    pytest.importorskip(host)
    before = torch.get_rng_state()
    assert HOSTS[host](checkpoint) is not None
    kept, _ = load(facts(CPU))
    assert kept is not None
    assert kept.passed
    assert torch.equal(torch.get_rng_state(), before)


def test_vllm_refuses_a_gpu_in_its_front_end(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("vllm")
    from vllm.platforms import current_platform

    from isomodels.vllm.checks import _device_refusals

    monkeypatch.setattr(type(current_platform), "is_cuda", lambda self: True)
    monkeypatch.setattr(type(current_platform), "get_device_capability", lambda *_: (8, 0))
    monkeypatch.setattr(type(current_platform), "get_device_name", lambda *_: "A100")
    with pytest.raises(UnsupportedError, match=r"checked on Hopper .*A100 has 8\.0"):
        _device_refusals(None)
