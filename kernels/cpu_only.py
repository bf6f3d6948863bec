"""Operators without a GPU backend say so in one sentence."""

from typing import Any

from isomodels.errors import UnsupportedError


def refuse_gpu(models: str, *operators: Any) -> None:
    """Register CUDA kernels that only raise; `models` names whose they are."""

    def refuse(*_: Any, **__: Any) -> None:
        raise UnsupportedError(f"{models} have no GPU kernels yet: run them on the CPU")

    for operator in operators:
        operator.register_kernel("cuda")(refuse)
