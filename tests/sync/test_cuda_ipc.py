"""The handles of CUDA IPC without a GPU: a driver that hands out host memory stands for CUDA's."""

import ctypes
from contextlib import nullcontext
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from isomodels.errors import CheckpointError
from isomodels.sync import CudaIpc, cuda_ipc
from isomodels.sync.blocks import Block, Blocks, Whole
from isomodels.sync.cuda_ipc import CudaIpcReceiver

DEVICE: Any = SimpleNamespace(type="cuda")


class OnGpu(torch.Tensor):
    """A tensor that says that it lies on a GPU."""

    is_cuda = True


class Driver:
    """Two allocations of host memory; counts what is open."""

    def __init__(self):
        self.memory = [torch.arange(512, dtype=torch.uint8), torch.zeros(256, dtype=torch.uint8)]
        self.memory[0] %= 251
        self.open: list[int] = []
        self.fail = ""

    def cuMemGetAddressRange_v2(self, base, size, address):
        for memory in self.memory:
            if 0 <= address.value - memory.data_ptr() < memory.nbytes:
                base._obj.value, size._obj.value = memory.data_ptr(), memory.nbytes
                return 0
        return 1

    def cuIpcGetMemHandle(self, handle, base):
        if self.fail == "export":
            return 801
        numbers = [memory.data_ptr() for memory in self.memory]
        handle._obj.reserved[63] = 1 + numbers.index(base.value)  # the last byte must travel too
        return 0

    def cuIpcOpenMemHandle_v2(self, address, handle, flags):
        assert flags.value == 1
        if self.fail == "open" and self.open:
            return 201
        address._obj.value = self.memory[handle.reserved[63] - 1].data_ptr()
        self.open.append(address._obj.value)
        return 0

    def cuIpcCloseMemHandle(self, address):
        self.open.remove(address.value)
        return 0


@pytest.fixture
def driver(monkeypatch: pytest.MonkeyPatch) -> Driver:
    fake, place = Driver(), cuda_ipc._bytes_at
    monkeypatch.setattr(cuda_ipc, "_driver", lambda: fake)
    monkeypatch.setattr(cuda_ipc, "_bytes_at", lambda at, n, _: place(at, n, torch.device("cpu")))
    monkeypatch.setattr(torch.cuda, "synchronize", lambda *_: None)
    monkeypatch.setattr(torch.cuda, "device", lambda *_: nullcontext())
    return fake


def held(driver: Driver) -> list[Whole]:
    """Views into both allocations, as a trainer's parameters are into its buffers."""
    first, second = driver.memory
    views = {
        "a": first[16:272].view(torch.bfloat16).view(8, 16),
        "b": second[64:128].view(torch.float32),
        "c": first[272:512].view(torch.int16).view(3, 40),
        "one": first[:2].view(torch.bfloat16).view(()),
    }
    return [Whole(name, view.as_subclass(OnGpu)) for name, view in views.items()]


def offered(driver: Driver) -> tuple[list[Whole], list[Any], Blocks]:
    own = held(driver)
    with CudaIpc().offer(own) as offer:
        places = zip(own, offer.places, strict=True)
        return own, offer.sources, Blocks(Block.of(one, *at) for one, at in places)


def test_each_allocation_is_mapped_once_and_let_go(driver, monkeypatch):
    own, sources, blocks = offered(driver)
    assert [block.source for block in blocks] == [0, 1, 0, 0]
    assert [block.place for block in blocks] == [16, 64, 272, 0]
    monkeypatch.setattr(cuda_ipc, "_process", lambda: "the engine")
    with CudaIpcReceiver().read(sources, blocks, DEVICE) as tensors:
        for one, tensor in zip(own, tensors, strict=True):
            assert len(driver.open) == 2
            assert tensor.data_ptr() == one.tensor.data_ptr()
            assert tensor.dtype == one.tensor.dtype
            assert torch.equal(tensor, one.tensor.as_subclass(torch.Tensor))
    assert driver.open == []


def test_a_trainer_whose_memory_moves_between_syncs(driver, monkeypatch):
    """Blocks at the same places in another allocation: each sync maps what it is told."""
    told = offered(driver)
    driver.memory[0] = driver.memory[0].flip(0)
    again = offered(driver)
    assert again[2] == told[2]  # a known plan
    assert again[1] != told[1]
    monkeypatch.setattr(cuda_ipc, "_process", lambda: "the engine")
    for own, sources, blocks in (again, again):
        with CudaIpcReceiver().read(sources, blocks, DEVICE) as lent:
            for number, one in enumerate(own):
                came, sent = lent[number], one.tensor.as_subclass(torch.Tensor)
                assert came.shape == sent.shape
                assert torch.equal(*(x.reshape(-1).view(torch.uint8) for x in (came, sent)))
                assert lent.spans(np.array([number])).address == lent[number].data_ptr()
        assert driver.open == []


def test_an_engine_in_the_trainers_process_opens_no_handle(driver):
    own, sources, blocks = offered(driver)
    sources = [{**source, "device": 0} for source in sources]
    with CudaIpcReceiver().read(sources, blocks, DEVICE) as tensors:
        assert [t.data_ptr() for t in tensors] == [one.tensor.data_ptr() for one in own]
        assert driver.open == []


@pytest.mark.parametrize("fault", ["open", "raise", "outside"])
def test_nothing_stays_mapped_after_a_failure(driver, monkeypatch, fault):
    _, sources, blocks = offered(driver)
    monkeypatch.setattr(cuda_ipc, "_process", lambda: "the engine")
    driver.fail = fault
    receiver = CudaIpcReceiver()
    if fault == "open":  # the second of two
        with (
            pytest.raises(
                CheckpointError, match=r"cannot be mapped.*cuIpcOpenMemHandle_v2 gave 201"
            ),
            receiver.read(sources, blocks, DEVICE),
        ):
            pass
    elif fault == "raise":
        with pytest.raises(KeyError), receiver.read(sources, blocks, DEVICE):
            raise KeyError
    else:
        blocks = Blocks([blocks[0]._replace(place=300), *blocks[1:]])
        with (
            pytest.raises(CheckpointError, match="a lies outside of what it sent"),
            receiver.read(sources, blocks, DEVICE),
        ):
            pass
    assert driver.open == []


def test_memory_without_a_handle_is_refused(driver):
    driver.fail = "export"
    with pytest.raises(
        CheckpointError, match=r"unset expandable_segments.*cuIpcGetMemHandle gave 8"
    ):
        offered(driver)
    driver.memory.pop(0)
    other = Whole("d", torch.zeros(16).as_subclass(OnGpu))
    with (
        pytest.raises(CheckpointError, match="no allocation holds a tensor of 64 bytes"),
        CudaIpc().offer([other]),
    ):
        pass


def test_an_engine_without_a_gpu_cannot_map_one(driver):
    _, sources, blocks = offered(driver)
    with (
        pytest.raises(CheckpointError, match="cannot be mapped by an engine on cpu: send them"),
        CudaIpcReceiver().read(sources, blocks, torch.device("cpu")),
    ):
        pass


def test_a_handle_is_passed_whole():
    """By value, as the driver's calls take it: 64 bytes."""
    assert ctypes.sizeof(cuda_ipc._Handle) == 64
