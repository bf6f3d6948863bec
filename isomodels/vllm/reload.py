"""New weights for a live engine."""

from pathlib import Path
from typing import Any

from isomodels.weights_conv.files import read_tensors


def reload_weights(llm: Any, path: Path | str) -> None:
    """Loads another checkpoint of the same config into a live engine.

    Running requests are preempted and recomputed, and the prefix cache is dropped: no token's
    history is of two models. The same holds for `POST /collective_rpc` with
    `{"method": "reload_weights", "kwargs": {"weights_path": ...}}` (VLLM_SERVER_DEV_MODE=1).

    Args:
        llm: a `vllm.LLM` started with `model_impl="isomodels"`.
        path: checkpoint folder.

    Raises:
        CheckpointError: the checkpoint is damaged, or does not fit the running model. The engine
            then keeps its old weights. (Raised by vLLM as its own error type where the engine
            runs in another process.)
    """
    read_tensors(Path(path))
    llm.collective_rpc("reload_weights", kwargs={"weights_path": str(path)})
