"""A trainer's weights on a GPU, mapped by the engines of the same host and copied there.

Through the CUDA driver itself: torch's own sharing keeps counters in named shared memory, which a
killed trainer leaves behind. The mapping ends with each sync.
"""

import base64
import ctypes
import os
import uuid
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from functools import cache
from typing import Any

import torch
from torch import Tensor

from isomodels.errors import CheckpointError
from isomodels.sync.blocks import Blocks, Held
from isomodels.sync.transport import Alone, Lent, Offer, Places

_HANDLE_BYTES = 64
_LAZY_PEER_ACCESS = 1
_IMPORTED = uuid.uuid4().hex


def _process() -> str:
    """Names this process: a handle cannot be opened by the one that made it.

    There the address itself will do. A forked engine has the trainer's modules, but not its number.
    """
    return f"{_IMPORTED}-{os.getpid()}"


class _Handle(ctypes.Structure):
    _fields_ = [("reserved", ctypes.c_ubyte * _HANDLE_BYTES)]


class CudaIpc(Alone):
    """The trainer's side, for engines on GPUs of the same host."""

    name = "cuda_ipc"

    @contextmanager
    def offer(self, blocks: Sequence[Held]) -> Iterator[Offer]:
        """Handles of the allocations in which the blocks lie.

        Raises:
            CheckpointError: a block is not on a GPU, or in memory that has no handle.
        """
        if other := [held.name for held in blocks if not held.tensor.is_cuda]:
            raise CheckpointError(
                f"{other[0]} is not on a GPU: send it through isomodels.sync.SharedMemory"
            )
        tensors = [held.tensor for held in blocks]
        kept = [x if x.is_contiguous() else x.detach().contiguous() for x in tensors]
        for device in {tensor.device for tensor in kept}:
            torch.cuda.synchronize(device)
        sources: list[dict[str, Any]] = []
        numbers: dict[int, int] = {}
        places: Places = []
        base = size = 0
        for tensor in kept:
            address = tensor.data_ptr()
            if not base <= address < base + size:  # most lie beside the one before
                base, size = _allocation(tensor)
            if base not in numbers:
                numbers[base] = len(sources)
                sources.append({
                    "process": _process(),
                    "device": tensor.device.index,
                    "handle": base64.b64encode(_exported(base, tensor.device)).decode(),
                    "base": base,
                    "bytes": size,
                })  # fmt: skip
            places.append((numbers[base], address - base))
        yield Offer(sources, places)
        del kept


class CudaIpcReceiver:
    """A worker's side."""

    lasting = True
    damages = False

    @contextmanager
    def read(
        self, sources: Sequence[dict[str, Any]], blocks: Blocks, device: torch.device
    ) -> Iterator[Lent]:
        """Views of the trainer's memory; see `Receiver`."""
        if device.type != "cuda":
            raise CheckpointError(
                f"weights on a GPU cannot be mapped by an engine on {device.type}: send them "
                "through isomodels.sync.SharedMemory"
            )
        with ExitStack() as stack, torch.cuda.device(device):
            torch.cuda.synchronize(device)  # and the driver's context is current in this thread
            mapped = [stack.enter_context(_opened(source, device)) for source in sources]
            stack.callback(torch.cuda.synchronize, device)  # no kernel reads what is let go
            yield Lent(mapped, blocks)


@contextmanager
def _opened(source: dict[str, Any], device: torch.device) -> Iterator[Tensor]:
    if source["process"] == _process():
        own = torch.device("cuda", source["device"])
        yield _bytes_at(source["base"], source["bytes"], own)
        return
    handle = _Handle()
    data = base64.b64decode(source["handle"])
    ctypes.memmove(ctypes.byref(handle), data, _HANDLE_BYTES)
    address = ctypes.c_uint64()
    _call(
        "the trainer's weights cannot be mapped: it has ended, or its GPU is out of this one's "
        "reach, for which there are isomodels.sync.SharedMemory and, on another host, Network",
        "cuIpcOpenMemHandle_v2",
        ctypes.byref(address),
        handle,
        ctypes.c_uint(_LAZY_PEER_ACCESS),
    )
    try:
        yield _bytes_at(address.value, source["bytes"], device)
    finally:
        _call("the trainer's weights cannot be let go", "cuIpcCloseMemHandle", address)


def _bytes_at(address: int, size: int, device: torch.device) -> Tensor:
    """[size] uint8 at an address that stays its owner's."""
    construct = torch._C._construct_storage_from_data_pointer
    storage = construct(address, device, size)
    return torch.empty(0, dtype=torch.uint8, device=device).set_(storage)


def _allocation(tensor: Tensor) -> tuple[int, int]:
    """Base address and size of the allocation that holds a tensor."""
    base, size = ctypes.c_uint64(), ctypes.c_size_t()
    address = ctypes.c_uint64(tensor.data_ptr())
    problem = f"no allocation holds a tensor of {tensor.nbytes} bytes"
    _call(problem, "cuMemGetAddressRange_v2", ctypes.byref(base), ctypes.byref(size), address)
    return base.value, size.value


def _exported(base: int, device: torch.device) -> bytes:
    handle = _Handle()
    with torch.cuda.device(device):
        _call(
            "the trainer's GPU memory has no handle for other processes: unset "
            "expandable_segments in PYTORCH_ALLOC_CONF (PYTORCH_CUDA_ALLOC_CONF), or send through "
            "isomodels.sync.SharedMemory",
            "cuIpcGetMemHandle",
            ctypes.byref(handle),
            ctypes.c_uint64(base),
        )
    return bytes(handle.reserved)


def _call(problem: str, function: str, *arguments: Any) -> None:
    status = getattr(_driver(), function)(*arguments)
    if status:
        raise CheckpointError(f"{problem} ({function} gave {status})")


@cache
def _driver() -> Any:
    return ctypes.CDLL("libcuda.so.1")
