"""Refusals: one sentence that names the thing and the remedy."""

import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from isomodels.config import read_config
from isomodels.errors import UnsupportedError
from isomodels.validate import device

CPU, CUDA = torch.device("cpu"), torch.device("cuda")
CONFIGS = Path(__file__).parent.parent / "data" / "configs"


@pytest.mark.parametrize("capability", [(3, 5), (7, 0), (7, 5)])
def test_an_old_gpu(capability: tuple[int, int]) -> None:
    number = f"{capability[0]}.{capability[1]}"
    match = rf"Tesla T4 has compute capability {number} and no matrix units .*: use a Hopper GPU"
    with pytest.raises(UnsupportedError, match=match):
        device.refuse_capability(capability, "Tesla T4")


@pytest.mark.parametrize("capability", [(8, 0), (8, 6), (8, 9), (10, 0), (10, 3), (12, 0)])
def test_a_gpu_that_was_not_checked(capability: tuple[int, int]) -> None:
    match = r"checked on Hopper \(compute capability 9\.0\) only, and A100 has .*: use a Hopper GPU"
    with pytest.raises(UnsupportedError, match=match):
        device.refuse_capability(capability, "A100")


def test_hopper_is_taken() -> None:
    device.refuse_capability((9, 0))


def test_the_triton_that_runs_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "triton", SimpleNamespace(__version__="3.6.9"))
    assert device.triton_version() == "3.6.9"
    monkeypatch.setitem(sys.modules, "triton", None)  # an import of it fails
    assert device.triton_version() is None


@pytest.mark.parametrize("version", [None, "2.1.0", "3.2.0", "3.3.1", "3.4.0", "3.5.1"])
def test_a_triton_that_miscompiles(version: str | None) -> None:
    with pytest.raises(UnsupportedError, match=r": pip install triton==3\.7\.1 \(checked: 3\.6\.0"):
        device.refuse_triton(version)


@pytest.mark.parametrize("version", [*device.CHECKED_TRITON, "3.6.0+git1234", "3.8.0", "3.10.0"])
def test_a_triton_of_which_nothing_bad_is_known(version: str) -> None:
    device.refuse_triton(version)


def test_no_checked_release_is_known_to_miscompile() -> None:
    for first, end, reason, thread in device.BAD_TRITON:
        assert first < end
        assert reason
        assert thread


@pytest.mark.parametrize("head_dim", [16, 40, 80, 96, 192])
def test_a_head_size_without_a_kernel(head_dim: int) -> None:
    pytest.importorskip("triton")
    match = rf"no GPU kernel for head_dim {head_dim} \(only .*128.*\): run this checkpoint on the C"
    with pytest.raises(UnsupportedError, match=match):
        device.refuse_model(CUDA, dtype=torch.bfloat16, head_dim=head_dim)
    device.refuse_model(CPU, dtype=torch.bfloat16, head_dim=head_dim)


@pytest.mark.parametrize("where", [CPU, CUDA])
def test_a_dtype_without_a_kernel(where: torch.device) -> None:
    with pytest.raises(UnsupportedError, match=r"no kernels for float16: convert .* --dtype bfloa"):
        device.refuse_model(where, dtype=torch.float16, head_dim=128)


@pytest.mark.parametrize("folder", sorted(CONFIGS.iterdir()), ids=lambda folder: folder.name)
def test_published_models_have_kernels(folder: Path) -> None:
    pytest.importorskip("triton")
    _, config = read_config(folder)
    device.refuse_model(CUDA, dtype=torch.bfloat16, head_dim=config.common_head_dim)


def test_devices_that_are_not_here(monkeypatch: pytest.MonkeyPatch) -> None:
    device.refuse_device(CPU)
    with pytest.raises(UnsupportedError, match="no kernels for mps: use cpu or cuda"):
        device.refuse_device(torch.device("mps"))
    with monkeypatch.context() as patch:
        patch.setattr(torch.version, "cuda", None)
        with pytest.raises(UnsupportedError, match=r"is built without CUDA: use cpu, or a CUDA"):
            device.refuse_device(CUDA)
    if not torch.cuda.is_available():
        monkeypatch.setattr(torch.version, "cuda", "13.0")
        with pytest.raises(UnsupportedError, match="no device cuda:3 here: use cpu"):
            device.refuse_device(torch.device("cuda:3"))


def test_each_refusal_is_one_sentence() -> None:
    sentences = []
    for call in (
        lambda: device.refuse_capability((7, 5)),
        lambda: device.refuse_capability((12, 0)),
        lambda: device.refuse_triton("3.5.0"),
        lambda: device.refuse_triton(None),
        lambda: device.refuse_model(CPU, dtype=torch.float64, head_dim=128),
    ):
        with pytest.raises(UnsupportedError) as caught:
            call()
        sentences.append(str(caught.value))
    assert all("\n" not in s and ":" in s and len(s) < 260 for s in sentences), sentences
