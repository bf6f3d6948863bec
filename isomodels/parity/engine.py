"""The engine's side of parity, run in a process of its own."""

from collections.abc import Sequence

from isomodels.parity.workload import DEVICE_LIMITS, ENGINE_LIMITS
from isomodels.vllm.engine import Engine, Request, Result, Step


class ParityEngine:
    """A vLLM engine with limits that make it chunk, cache and preempt."""

    def __init__(self, checkpoint: str, dtype: str, seed: int, device: str):
        limits = {**ENGINE_LIMITS, **DEVICE_LIMITS[device]}
        self.engine = Engine(checkpoint, dtype=dtype, seed=seed, **limits)

    def run(self, requests: Sequence[Request], seed: int) -> tuple[list[Result], list[Step]]:
        """Run requests to their end."""
        return self.engine.run(requests, seed=seed), self.engine.steps

    def reload(self, path: str) -> None:
        """Load other weights into the live engine."""
        self.engine.reload(path)

    def trace(self, token_ids: Sequence[int], decode: bool) -> dict[str, str]:
        """Hash of every operation's output at the last of `token_ids`, by prefill or by decode."""
        return self.engine.trace(token_ids, decode=decode)

    def close(self) -> None:
        """Stop the engine."""
        self.engine.close()
