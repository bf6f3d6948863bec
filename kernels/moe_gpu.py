"""The mixture-of-experts operators have no GPU backend: each says so in one sentence."""

from typing import Any

from isomodels.errors import UnsupportedError


def refuse_gpu(operator: Any) -> None:
    """Register a CUDA kernel that only raises."""

    @operator.register_kernel("cuda")
    def _(*_: Any, **__: Any) -> None:
        raise UnsupportedError(
            f"{operator._qualname} has no GPU kernel yet: run mixture-of-experts models on the CPU"
        )
