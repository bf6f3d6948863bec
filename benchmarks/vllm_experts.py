"""vLLM's fused experts (Triton), tuned: the baseline of the row "experts".

vLLM ships no configuration for the shapes of that row on an H200, where its engine would use its
default. Here it gets the fastest, timed on the device at hand, of that default and of the
configurations that vLLM ships for an H100 or H200 at so many tokens: those of exactly these shapes
(for the H100) and those of sizes near them.
"""

import threading
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor

import torch
from torch import Tensor

from benchmarks.harness import time_ms

# Rows of a tile, columns, K of a step, tiles of rows that share columns, warps, stages.
Config = tuple[int, int, int, int, int, int]
_NAMES = ("BLOCK_SIZE_M", "BLOCK_SIZE_N", "BLOCK_SIZE_K", "GROUP_SIZE_M", "num_warps", "num_stages")
CONFIGS: dict[int, tuple[Config, ...]] = {  # by tokens
    16: (
        (16, 32, 128, 16, 4, 5),  # of E=64, N=1536 on an H100
        (16, 64, 64, 64, 4, 5),  # of E=256, N=512 on an H100
        (16, 32, 256, 16, 4, 5),
        (16, 64, 64, 1, 4, 4),
        (16, 64, 64, 16, 4, 3),
        (16, 64, 128, 16, 4, 2),
        (16, 64, 256, 1, 4, 2),
        (16, 64, 256, 16, 4, 3),
        (16, 128, 64, 1, 4, 4),
        (16, 128, 64, 1, 8, 3),
        (16, 128, 128, 1, 4, 4),
        (16, 128, 128, 16, 4, 5),
    ),
    256: (
        (64, 64, 64, 1, 4, 3),  # of E=64, N=1536 on an H100
        (16, 256, 128, 1, 8, 2),  # of E=256, N=512 on an H100
        (16, 64, 64, 1, 4, 4),
        (16, 128, 64, 1, 8, 3),
        (16, 128, 128, 1, 8, 3),
        (16, 128, 256, 1, 4, 3),
        (32, 64, 128, 1, 4, 5),
        (32, 128, 64, 16, 4, 4),
        (32, 128, 128, 32, 4, 2),
        (32, 256, 128, 1, 8, 3),
        (32, 256, 128, 16, 4, 2),
        (64, 128, 64, 1, 4, 3),
    ),
    8192: (
        (128, 256, 64, 1, 8, 4),  # of E=64, N=1536 on an H100
        (128, 256, 64, 16, 8, 4),  # of E=256, N=512 on an H100
        (128, 256, 64, 32, 8, 4),
        (128, 256, 64, 16, 8, 3),
        (128, 128, 64, 1, 8, 3),
        (128, 128, 64, 16, 4, 3),
        (256, 128, 64, 1, 8, 4),
        (64, 128, 128, 1, 4, 2),
    ),
}
_COMPILERS = 12
_Run = Callable[[], object]

_chosen = threading.local()


def _config_of_thread() -> dict[str, int] | None:
    return getattr(_chosen, "config", None)


class TunedExperts:
    """vLLM's fused experts with any of `CONFIGS`; None stands for vLLM's default.

    vLLM's own `override_config` sets one configuration for all threads, and compiling one after
    another would take minutes.
    """

    def __init__(self) -> None:
        from vllm.model_executor.layers import fused_moe

        fused_moe.get_config = _config_of_thread
        # registers the operator
        from vllm.model_executor.layers.fused_moe.fused_moe import fused_experts

        self._operator: Callable[..., object] = fused_experts

    def call(self, arguments: tuple[Tensor, ...], config: Config | None) -> _Run:
        """A call with a configuration."""
        named = config and {**dict(zip(_NAMES, config, strict=True)), "SPLIT_K": 1}

        def run() -> object:
            _chosen.config = named
            return self._operator(*arguments)

        return run

    def compile(self, all_arguments: Iterable[tuple[Tensor, ...]]) -> None:
        """Compile what `fastest` will try for these arguments, side by side."""
        runs = [
            self.call(arguments, config)
            for arguments in all_arguments
            for config in (None, *CONFIGS[len(arguments[0])])
        ]
        with ThreadPoolExecutor(_COMPILERS) as pool:
            list(pool.map(_works, runs))
        torch.cuda.synchronize()

    def fastest(self, arguments: tuple[Tensor, ...]) -> tuple[str, _Run]:
        """Name of the fastest configuration for (x, up, down, weights, ids), and the call."""
        configs: tuple[Config | None, ...] = (None, *CONFIGS[len(arguments[0])])
        runs = {config: self.call(arguments, config) for config in configs}
        usable = {config: run for config, run in runs.items() if _works(run)}
        times = {config: time_ms([run], replays=5)[0][0] for config, run in usable.items()}
        best = min(times, key=times.__getitem__)
        name = "default" if best is None else "x".join(map(str, best))
        return f"{name}, the fastest of {len(times)}", runs[best]


def _works(run: _Run) -> bool:
    """Whether the configuration fits the chip."""
    from triton import TritonError

    try:
        run()
    except (TritonError, RuntimeError) as error:
        print(f"vLLM's fused experts with {_config_of_thread()}: {error}")
        return False
    return True
