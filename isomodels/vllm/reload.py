"""New weights for a live engine."""

from pathlib import Path
from typing import Any

from isomodels.vllm.checks import check_files


def reload_weights(llm: Any, path: Path | str) -> None:
    """Loads another checkpoint of the same config into a live engine.

    Running requests are preempted and recomputed, and the prefix cache is dropped: no token's
    history is of two models. The same holds for `POST /collective_rpc` with
    `{"method": "reload_weights", "kwargs": {"weights_path": ...}}` (VLLM_SERVER_DEV_MODE=1).

    Args:
        llm: a `vllm.LLM` started with `model_impl="isomodels"`.
        path: checkpoint folder.

    Raises:
        ConfigError, CheckpointError: the checkpoint is damaged, or is of another config than the
            running model. The engine then keeps its old weights. (What only the engine can find
            is raised as vLLM's own error type where it runs in another process.)
    """
    check_files(Path(path))
    llm.collective_rpc("reload_weights", kwargs={"weights_path": str(path)})
