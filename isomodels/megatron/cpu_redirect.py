"""Runs Megatron on a machine without a GPU: what asks for a CUDA device gets the CPU.

Megatron's wrappers, schedules and optimizers name CUDA devices, streams and tensor types directly.
This file redirects the device and nothing else: no arithmetic and no dtype changes. `Trainer` (and
with it the parity command) loads it where there is no GPU; `model_provider`, which is all that a
trainer of another project takes, never does. It refuses where a GPU exists.

Checked on megatron-core 0.16.1, 0.17.1, 0.18.2 and 0.19.2 with torch 2.13.0+cpu and gloo.
"""

import contextlib
from collections.abc import Callable
from typing import Any

import torch
from torch.overrides import TorchFunctionMode

from isomodels.errors import HostError


class _CudaToCpu(TorchFunctionMode):
    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        kwargs = kwargs or {}
        if _names_cuda(kwargs.get("device")):
            kwargs = {**kwargs, "device": "cpu"}
        if func is torch.Tensor.cuda:
            return args[0]
        if func is torch.Tensor.type and len(args) == 1 and not kwargs:
            # the optimizers accept a parameter by the name "torch.cuda.FloatTensor"
            return func(*args).replace("torch.", "torch.cuda.", 1)
        return func(*args, **kwargs)


class _Stream:
    def __init__(self, *args: object, **kwargs: object) -> None: ...

    def wait_stream(self, stream: object) -> None: ...

    def wait_event(self, event: object) -> None: ...

    def record_event(self, event: object = None) -> None: ...

    def synchronize(self) -> None: ...


def _names_cuda(device: Any) -> bool:
    if device is None or isinstance(device, int):
        return False
    return torch.device(device).type == "cuda"


def _nothing() -> Callable[..., None]:
    # a new function each time: torch's compiler refuses one function under two names
    return lambda *args, **kwargs: None


# Names of torch.cuda that Megatron calls, and what stands in for each.
_STAND_INS: dict[str, Any] = {
    "current_device": lambda: torch.device("cpu"),
    "current_stream": lambda *args: _Stream(),
    "default_stream": lambda *args: _Stream(),
    "Stream": _Stream,
    "stream": lambda stream: contextlib.nullcontext(),
    "synchronize": _nothing(),
    "empty_cache": _nothing(),
    "set_device": _nothing(),
}

_undo: contextlib.ExitStack | None = None


def install() -> None:
    """Redirects CUDA devices to the CPU for this process; a second call changes nothing.

    Raises:
        HostError: if this machine has a GPU.
    """
    global _undo
    if torch.cuda.is_available():
        raise HostError("the CPU device redirect is only for machines without a GPU")
    if _undo is not None:
        return
    with contextlib.ExitStack() as stack:
        for name, stand_in in _STAND_INS.items():
            stack.callback(setattr, torch.cuda, name, getattr(torch.cuda, name))
            setattr(torch.cuda, name, stand_in)
        for name in ("range_push", "range_pop"):
            stack.callback(setattr, torch.cuda.nvtx, name, getattr(torch.cuda.nvtx, name))
            setattr(torch.cuda.nvtx, name, _nothing())
        stack.enter_context(_CudaToCpu())
        _undo = stack.pop_all()


def uninstall() -> None:
    """Puts torch back as it was."""
    global _undo
    if _undo is not None:
        _undo.close()
        _undo = None
