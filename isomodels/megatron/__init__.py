"""The trainer host: an isomodels module inside Megatron.

Needs megatron-core (`pip install 'isomodels[megatron]'`); `import isomodels` alone does not.
The names below are loaded on first use, so that asking for one does not import the others.
"""

import importlib
import importlib.metadata
from typing import TYPE_CHECKING

from isomodels.errors import HostError

if TYPE_CHECKING:
    from isomodels.megatron.grad_norm import count_rows_once
    from isomodels.megatron.head import token_logprobs_processor
    from isomodels.megatron.model import IsoLanguageModel
    from isomodels.megatron.provider import model_provider, transformer_config
    from isomodels.megatron.resume import repair_torch_adam_resume
    from isomodels.megatron.trainer import Trainer

# Versions of megatron-core on which tests/megatron ran.
CHECKED_VERSIONS = ("0.16.1", "0.17.1", "0.18.2", "0.19.2")

_HOMES = {
    "IsoLanguageModel": "isomodels.megatron.model",
    "Trainer": "isomodels.megatron.trainer",
    "count_rows_once": "isomodels.megatron.grad_norm",
    "model_provider": "isomodels.megatron.provider",
    "repair_torch_adam_resume": "isomodels.megatron.resume",
    "token_logprobs_processor": "isomodels.megatron.head",
    "transformer_config": "isomodels.megatron.provider",
}

__all__ = [
    "CHECKED_VERSIONS",
    "IsoLanguageModel",
    "Trainer",
    "count_rows_once",
    "model_provider",
    "repair_torch_adam_resume",
    "token_logprobs_processor",
    "transformer_config",
]


def check_megatron() -> str:
    """Returns the version of megatron-core.

    Raises:
        HostError: if megatron-core is missing, or is a version that was not checked.
    """
    try:
        version = importlib.metadata.version("megatron-core")
    except importlib.metadata.PackageNotFoundError:
        raise HostError(
            "megatron-core is not installed: pip install 'isomodels[megatron]'"
        ) from None
    if version not in CHECKED_VERSIONS:
        raise HostError(
            f"megatron-core {version} was not checked with isomodels; "
            f"install one of: {', '.join(CHECKED_VERSIONS)}"
        )
    return version


check_megatron()


def __getattr__(name: str) -> object:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(_HOMES[name]), name)
