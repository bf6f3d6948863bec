"""What the engine benchmark asks of vLLM's worker, mixed into it by `worker_extension_cls`.

It notes when each step begins and which kernels Triton compiles while requests wait, says which
backends vLLM chose, and profiles single steps. vLLM calls these methods by name; each returns JSON.
"""

import json
import time
from typing import Any

import torch

from benchmarks.harness import kernels_of


class StepWatch:
    """Methods that vLLM adds to its worker."""

    def watch_steps(self) -> None:
        """From now on note tokens, requests and time of each step, and compilations."""
        self.watched_steps: list[tuple[int, int, float]] = []
        self.compiled_kernels: list[str] = []
        _tell_compilations(self.compiled_kernels)
        self.step_profile = StepProfile()
        runner: Any = self.model_runner  # type: ignore[attr-defined]
        execute = runner.execute_model

        def watched(output: Any, *args: Any, **kwargs: Any) -> Any:
            if tokens := output.total_num_scheduled_tokens:
                requests = len(output.num_scheduled_tokens)
                self.step_profile.before(tokens, requests)
                self.watched_steps.append((tokens, requests, time.perf_counter()))
            return execute(output, *args, **kwargs)

        runner.execute_model = watched

    def take_steps(self) -> str:
        """The steps noted since the last call: (tokens, requests, begin in seconds)."""
        steps, self.watched_steps = self.watched_steps, []
        return json.dumps(steps)

    def take_compilations(self) -> str:
        """Names of the kernels that Triton compiled since the last call, one a compilation."""
        names = list(self.compiled_kernels)
        self.compiled_kernels.clear()
        return json.dumps(names)

    def profile_steps(self, min_tokens: int, requests: int, skip: int, count: int) -> None:
        """Profile `count` steps after `skip`, of at least so many tokens and of so many requests.

        `requests` 0: of any number.
        """
        self.step_profile = StepProfile(min_tokens, requests, skip, count)

    def take_profile(self) -> str:
        """What `profile_steps` collected."""
        return json.dumps(self.step_profile.result)

    def chosen(self) -> str:
        """What vLLM chose for this model, as it is after start."""
        config: Any = self.vllm_config  # type: ignore[attr-defined]
        runner: Any = self.model_runner  # type: ignore[attr-defined]
        layers = config.compilation_config.static_forward_context.values()
        backends = {_backend(layer) for layer in layers if hasattr(layer, "get_attn_backend")}
        compilation, scheduler = config.compilation_config, config.scheduler_config
        sizes = compilation.cudagraph_capture_sizes or [0]
        return json.dumps(
            {
                "model": f"{type(runner.model).__module__}.{type(runner.model).__name__}",
                "runner": type(runner).__module__,
                "attention": " and ".join(sorted(backends)),
                "compilation": str(compilation.mode and compilation.mode.name),
                "cudagraphs": str(compilation.cudagraph_mode and compilation.cudagraph_mode.name),
                "capture_sizes": f"{len(sizes)} up to {max(sizes)}",
                "custom_ops": list(compilation.custom_ops),
                "async_scheduling": scheduler.async_scheduling,
                "max_num_seqs": scheduler.max_num_seqs,
                "max_num_batched_tokens": scheduler.max_num_batched_tokens,
                "prefix_caching": config.cache_config.enable_prefix_caching,
                "block_size": config.cache_config.block_size,
                "gpu_memory_utilization": config.cache_config.gpu_memory_utilization,
                "logprobs_mode": config.model_config.logprobs_mode,
            }
        )


def _tell_compilations(names: list[str]) -> None:
    """Has Triton append the name of each kernel that it compiles from now on."""
    try:
        from triton import knobs
    except ImportError:
        return
    before = knobs.runtime.jit_post_compile_hook

    def tell(**event: Any) -> Any:
        names.append(getattr(event.get("fn"), "name", "?").rpartition(".")[2])
        return before(**event) if before is not None else None

    knobs.runtime.jit_post_compile_hook = tell


def _backend(layer: Any) -> str:
    """Name of an attention or recurrent layer's backend, with the kernels that it chose."""
    name = layer.get_attn_backend().get_name()
    if name == "FLASH_ATTN":
        from vllm.v1.attention.backends.fa_utils import get_flash_attn_version

        return f"{name} version {get_flash_attn_version()}"
    if hasattr(layer, "gdn_prefill_backend"):
        return f"{name} {layer.gdn_prefill_backend}"
    return name


class StepProfile:
    """Kernels of some steps and their time."""

    def __init__(self, min_tokens: int = 0, requests: int = 0, skip: int = 0, count: int = 0):
        self.min_tokens, self.requests = min_tokens, requests
        self.skip, self.count = skip, count
        self.profiler: Any = None
        self.result: dict[str, Any] = {}

    def before(self, tokens: int, requests: int) -> None:
        """Called before each step."""
        if self.profiler is not None:
            self.left -= 1
            if not self.left:
                self._stop()
        elif self.count and tokens >= self.min_tokens and self.requests in (0, requests):
            if self.skip:
                self.skip -= 1
            else:
                self._start()

    def _start(self) -> None:
        torch.cuda.synchronize()
        self.left = self.count
        self.profiler = torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA])
        self.profiler.__enter__()

    def _stop(self) -> None:
        torch.cuda.synchronize()
        self.profiler.__exit__(None, None, None)
        self.result = kernels_of(self.profiler, self.count)
        self.profiler, self.count = None, 0
