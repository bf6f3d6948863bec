"""The vLLM host: the only package of isomodels that imports vllm.

`vllm serve CHECKPOINT --model-impl isomodels` serves a checkpoint with the module of isomodels;
`vllm.LLM(checkpoint, model_impl="isomodels")` does the same in Python. Importing this package
imports no vllm.
"""

from typing import TYPE_CHECKING, Any

from isomodels.vllm.versions import CHECKED_VERSIONS, check_vllm

if TYPE_CHECKING:
    from isomodels.vllm.engine import Engine, Request, Result, Token
    from isomodels.vllm.reload import reload_weights
    from isomodels.vllm.sync_client import LLMSyncClient

__all__ = [
    "CHECKED_VERSIONS",
    "Engine",
    "LLMSyncClient",
    "Request",
    "Result",
    "Token",
    "check_vllm",
    "reload_weights",
]


def __getattr__(name: str) -> Any:
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    check_vllm()
    if name == "reload_weights":
        from isomodels.vllm import reload

        return reload.reload_weights
    if name == "LLMSyncClient":
        from isomodels.vllm import sync_client

        return sync_client.LLMSyncClient
    from isomodels.vllm import engine

    return getattr(engine, name)
