"""The engine's side of parity, run in a process of its own."""

import math
from collections.abc import Sequence
from typing import Any

from isomodels.config import read_config
from isomodels.contract import Contract
from isomodels.contract.served import COUNT_OPERATIONS
from isomodels.layers.hybrid_config import HybridConfig
from isomodels.megatron.degrees import Degrees
from isomodels.parity.checkpoints import draw_weights
from isomodels.parity.operations import answer
from isomodels.parity.workload import BLOCK_SIZE, Workload, page_of
from isomodels.vllm.engine import Engine, Request, Result, Step
from isomodels.vllm.weights import LOADED_LATER


class ParityEngine:
    """A vLLM engine with limits that make it chunk, cache and preempt.

    With `draw_seed` its weights are drawn on the device instead of read from the checkpoint.
    """

    def __init__(
        self,
        checkpoint: str,
        dtype: str,
        seed: int,
        device: str,
        workload: Workload,
        layout: str = "tp1",
        draw_seed: int | None = None,
    ):
        degrees = Degrees.parse(layout)
        limits = {
            **workload.engine_limits(),
            **device_limits(checkpoint, device, workload.num_blocks),
            "tensor_parallel_size": degrees.tp,
            "enable_expert_parallel": degrees.ep > 1,
        }
        self.counts = degrees.tp == 1  # a rank's parts have operations of their own
        limits["additional_config"] = {
            LOADED_LATER: draw_seed is not None,
            COUNT_OPERATIONS: self.counts,
        }
        self.engine = Engine(checkpoint, dtype=dtype, seed=seed, record_routes=True, **limits)
        if draw_seed is not None:
            self.engine.llm.apply_model(lambda model: draw_weights(model.core, draw_seed))

    def model_runner(self) -> str:
        """Which of vLLM's model runners runs: "V1" or "V2"."""
        return self.engine.model_runner

    def operations(self) -> dict[str, Any] | None:
        """See `isomodels.parity.operations.answer`; None of several workers."""
        if not self.counts:
            return None
        ask = self.engine.llm.collective_rpc
        contract = Contract.from_json(ask("isomodels_contract")[0])
        return answer(contract, ask("isomodels_served")[0])

    def run(
        self, requests: Sequence[Request], seed: int, graphs: bool
    ) -> tuple[list[Result], list[Step]]:
        """Run requests to their end."""
        return self.engine.run(requests, seed=seed, graphs=graphs), self.engine.steps

    def reload(self, path: str) -> None:
        """Load other weights into the live engine."""
        self.engine.reload(path)

    def trace(self, token_ids: Sequence[int], decode: bool) -> dict[str, str]:
        """Hash of every operation's output at the last of `token_ids`, by prefill or by decode."""
        return self.engine.trace(token_ids, decode=decode)

    def close(self) -> None:
        """Stop the engine."""
        self.engine.close()


def device_limits(checkpoint: str, device: str, num_blocks: int) -> dict[str, Any]:
    """Arguments of `vllm.LLM` for an engine that shares its GPU with a trainer.

    vLLM would size its cache by what is free, while the trainer takes its own memory.
    """
    if device == "cpu":
        return {}
    _, config = read_config(checkpoint)
    if isinstance(config, HybridConfig):
        # A page is one of keys or one state: a layer of each group shares its memory.
        page = page_of(config, device)[1] * len(config.layers_of("full_attention"))
    else:
        row = math.prod(config.page_shape) * config.torch_dtype.itemsize
        page = BLOCK_SIZE * config.num_hidden_layers * row
    return {
        "enforce_eager": False,
        "gpu_memory_utilization": 0.02,  # only asked to be free at the start
        "kv_cache_memory_bytes": num_blocks * page,
    }
