"""`sleep(level=2)` discards the weights, and vLLM wakes with whatever memory then holds.

So the workers are told, and serve nothing until a reload or a sync has brought weights.
"""

import functools
from typing import Any

from isomodels.vllm.plugin import MODEL_IMPL

_DISCARDS = 2  # the level of sleep


def install() -> None:
    """Watches the executor, which every way to sleep goes through."""
    from vllm.v1.executor.abstract import Executor

    original = Executor.sleep

    @functools.wraps(original)
    def sleep(self: Any, level: int = 1) -> None:
        slept = self.is_sleeping  # then vLLM does nothing
        original(self, level)
        ours = self.vllm_config.model_config.model_impl == MODEL_IMPL
        if ours and level >= _DISCARDS and not slept:
            self.collective_rpc(_without_weights)

    Executor.sleep = sleep


def _without_weights(worker: Any) -> None:
    """In one worker."""
    worker = getattr(worker, "worker", worker)  # vLLM's wrapper of it
    worker.model_runner.get_model().refusal = (
        "the weights were discarded by a sleep of level 2: reload them or send new ones"
    )
