"""What isomodels refuses to run on, for both hosts and the command: one sentence, one remedy.

And the facts about a machine that a report of the battery is valid for.
"""

import functools
import hashlib
import os
import platform
import re
from pathlib import Path
from typing import Any

import torch

from isomodels.errors import UnsupportedError
from isomodels.validate.battery import kernel_folder

OLDEST = (8, 0)  # bf16 matrix units
CHECKED = (9, 0)

CHECKED_TRITON = ("3.6.0", "3.7.1")
# Releases known to compute wrong numbers on Hopper where our kernels would meet it: (from, before,
# reason, its thread at github.com/triton-lang/triton).
BAD_TRITON: tuple[tuple[tuple[int, ...], tuple[int, ...], str, str], ...] = (
    ((0,), (3, 3), "multiplies a product by a transposed product wrongly", "issue 6124"),
    (
        (3, 3),
        (3, 6),
        "overwrites an operand that two products of a pipelined loop share before both have read "
        "it, as in attention's backward",
        "pull request 8554",
    ),
)

# What can choose another code path in torch, oneDNN, MKL and Triton: a report holds under it alone.
_VARIABLES = (
    "ATEN_CPU_CAPABILITY",
    "DISABLE_PTXAS_OPT",
    "DNNL_MAX_CPU_ISA",
    "MKL_CBWR",
    "MKL_DEBUG_CPU_TYPE",
    "MKL_ENABLE_INSTRUCTIONS",
    "ONEDNN_DEFAULT_FPMATH_MODE",
    "ONEDNN_MAX_CPU_ISA",
    "OPENBLAS_CORETYPE",
    "PTXAS_OPTIONS",
    "TRITON_DEFAULT_FP_FUSION",
    "TRITON_F32_DEFAULT",
    "TRITON_KERNEL_OVERRIDE",
    "TRITON_PTXAS_PATH",
)


def refuse_capability(capability: tuple[int, int], name: str = "this GPU") -> None:
    """Refuse a GPU by its compute capability; needs no CUDA context.

    Raises:
        UnsupportedError: older than 8.0, or another than Hopper's 9.0.
    """
    number = f"{capability[0]}.{capability[1]}"
    if capability < OLDEST:
        raise UnsupportedError(
            f"isomodels: {name} has compute capability {number} and no matrix units for bfloat16: "
            "use a Hopper GPU (9.0), or the CPU"
        )
    if capability != CHECKED:
        raise UnsupportedError(
            f"isomodels: the GPU kernels were checked on Hopper (compute capability 9.0) only, and "
            f"{name} has {number}: use a Hopper GPU, or the CPU"
        )


def refuse_triton(installed: str | None) -> None:
    """Refuse a Triton by its version; None: there is none.

    Raises:
        UnsupportedError: there is none, or it is known to miscompile.
    """
    remedy = f"pip install triton=={CHECKED_TRITON[-1]} (checked: {', '.join(CHECKED_TRITON)})"
    if installed is None:
        raise UnsupportedError(f"isomodels: the GPU kernels need Triton: {remedy}")
    numbers = tuple(int(n) for n in re.findall(r"\d+", installed)[:3])
    for first, end, reason, thread in BAD_TRITON:
        if first <= numbers < end:
            raise UnsupportedError(
                f"isomodels: on Hopper, Triton {installed} {reason} ({thread}): {remedy}"
            )


def refuse_model(device: torch.device, *, dtype: torch.dtype, head_dim: int | None) -> None:
    """Refuse a dtype or head size that the kernels of a device do not have.

    Args:
        device: on which the model will run.
        dtype: of the model.
        head_dim: of its softmax attention; None where keys and values have no common size.

    Raises:
        UnsupportedError: naming it, and what there is.
    """
    if dtype not in (torch.float32, torch.bfloat16):
        name = str(dtype).removeprefix("torch.")
        raise UnsupportedError(
            f"isomodels has no kernels for {name}: convert the checkpoint with "
            "`isomodels convert CHECKPOINT OUT --dtype bfloat16`"
        )
    if device.type != "cuda" or head_dim is None:
        return
    from isomodels.kernels.attention_triton import HEAD_DIMS

    if head_dim not in HEAD_DIMS:
        sizes = ", ".join(map(str, HEAD_DIMS))
        raise UnsupportedError(
            f"isomodels: attention has no GPU kernel for head_dim {head_dim} (only {sizes}): "
            "run this checkpoint on the CPU"
        )


def refuse_device(device: torch.device) -> None:
    """Refuse a device that the battery need not try.

    Raises:
        UnsupportedError: no such device here, or one that `refuse_capability` or `refuse_triton`
            refuses.
    """
    if device.type == "cpu":
        return
    if device.type != "cuda":
        raise UnsupportedError(f"isomodels has no kernels for {device.type}: use cpu or cuda")
    if torch.version.cuda is None:
        raise UnsupportedError(
            f"torch {torch.__version__} is built without CUDA: use cpu, or a CUDA build of torch"
        )
    if not torch.cuda.is_available() or (device.index or 0) >= torch.cuda.device_count():
        raise UnsupportedError(f"there is no device {device} here: use cpu, or see nvidia-smi")
    properties = torch.cuda.get_device_properties(device)
    refuse_capability((properties.major, properties.minor), properties.name)
    refuse_triton(triton_version())


def with_index(device: torch.device) -> torch.device:
    """ "cuda" as the current GPU: in another thread the current one is the first."""
    if device.type != "cuda" or device.index is not None:
        return device
    return torch.device("cuda", torch.cuda.current_device())


def triton_version() -> str | None:
    """Of the Triton that runs: PYTHONPATH may put one before that of the installed packages."""
    try:
        import triton
    except ImportError:
        return None
    return triton.__version__


def facts(device: torch.device) -> dict[str, Any]:
    """Everything that bits on a device may depend on, ready for JSON.

    A report of the battery is valid where these are equal.
    """
    common = {
        "torch": torch.__version__,
        "kernels": source_digest(),
        "environment": {name: os.environ[name] for name in _VARIABLES if name in os.environ},
    }
    if device.type == "cuda":
        properties = torch.cuda.get_device_properties(device)
        return {
            "backend": "triton",
            "device": properties.name,
            "compute_capability": f"{properties.major}.{properties.minor}",
            "driver": driver_version(),
            "cuda": torch.version.cuda,
            "triton": triton_version(),
            **common,
        }
    return {
        "backend": "torch",
        "device": _cpu_name(),
        "isa": torch.backends.cpu.get_cpu_capability(),
        "features": hashlib.sha256(_cpu_line("flags").encode()).hexdigest()[:16],
        **common,
    }


def driver_version() -> str:
    """Of the NVIDIA driver, else of the CUDA that it supports."""
    try:
        text = Path("/proc/driver/nvidia/version").read_text()
    except OSError:
        text = ""
    found = re.search(r"\b\d+\.\d+(\.\d+)?\b", text)
    return found[0] if found else f"CUDA {torch._C._cuda_getDriverVersion()}"  # type: ignore[attr-defined]


@functools.cache
def _cpu_line(key: str) -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return ""
    return next((x.partition(":")[2].strip() for x in lines if x.startswith(key)), "")


def _cpu_name() -> str:
    return _cpu_line("model name") or platform.processor() or platform.machine()


@functools.cache
def source_digest() -> str:
    """SHA-256 over the source of the kernels and of the battery: a change voids every report."""
    hashed = hashlib.sha256()
    for folder in (kernel_folder(), Path(__file__).parent):
        for file in sorted(folder.rglob("*.py")):
            hashed.update(file.relative_to(folder).as_posix().encode() + b"\0" + file.read_bytes())
    return hashed.hexdigest()
