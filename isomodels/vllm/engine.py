"""A vLLM engine in this process that says how each token was computed.

The parity command and the tests need proof of the case a logprob came from (chunked prefill,
prefix hit, preemption, ...). It is read from the scheduler's own decisions.
"""

import contextlib
import gc
import os
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from isomodels.errors import HostError
from isomodels.trace import trace_rows
from isomodels.vllm import workers
from isomodels.vllm.plugin import MODEL_IMPL
from isomodels.vllm.results import Request, Result, Step, Token
from isomodels.vllm.routes import RECORD_ROUTES, Scheduled, collect, scheduled

__all__ = ["Engine", "Request", "Result", "Step", "Token"]

_ENVIRONMENT = {
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    "VLLM_CPU_KVCACHE_SPACE": "1",
    # vLLM compiles a helper of its sampler at the first logprob, for many seconds.
    "TORCHDYNAMO_DISABLE": "1",
    "VLLM_LOGGING_LEVEL": "ERROR",
    "VLLM_NO_USAGE_STATS": "1",
}


class Engine:
    """A `vllm.LLM` in this process.

    Args:
        checkpoint: folder of the checkpoint.
        dtype: "float32" or "bfloat16"; for our class that of the checkpoint.
        model_impl: "isomodels", or "vllm" for vLLM's own class.
        seed: of the sampler. (vLLM's CPU sampler takes no seed of a request whose prompt is
            prefilled in chunks.)
        record_routes: keep which experts each token went to, in a model that has any; see
            `Result.routes`.
        limits: further arguments of `vllm.LLM`: max_model_len, max_num_batched_tokens,
            num_gpu_blocks_override, block_size, logprobs_mode, ...

    Raises:
        HostError: no vLLM, an unchecked version, or vLLM built another class than asked for.
        UnsupportedError, ConfigError, CheckpointError: see `isomodels.vllm.checks`.
    """

    def __init__(
        self,
        checkpoint: Path | str,
        *,
        dtype: str,
        model_impl: str = MODEL_IMPL,
        seed: int = 0,
        record_routes: bool = False,
        **limits: Any,
    ):
        from isomodels.vllm.versions import check_vllm

        check_vllm()
        wanted = dict(_ENVIRONMENT)
        if limits.get("tensor_parallel_size", 1) > 1:
            # else vLLM's CPU workers want cores, and a NUMA node, of their own
            wanted["VLLM_CPU_OMP_THREADS_BIND"] = "nobind"
        self._environment = [name for name in wanted if name not in os.environ]
        os.environ.update({name: wanted[name] for name in self._environment})
        from vllm import LLM

        self.steps: list[Step] = []
        self._live: dict[str, Result] = {}
        limits.setdefault("async_scheduling", False)  # a step's output belongs to that step
        limits.setdefault("enforce_eager", True)
        if record_routes:
            limits["additional_config"] = {
                **limits.get("additional_config", {}),
                RECORD_ROUTES: True,
            }
        self.llm = LLM(
            model=str(checkpoint),
            dtype=dtype,
            model_impl=model_impl,
            seed=seed,
            use_tqdm_on_load=False,
            **limits,
        )
        self._engine = self.llm.llm_engine
        self._scheduler = self._engine.engine_core.engine_core.scheduler
        self.model_class: str = self.llm.apply_model(workers.model_class)[0]
        self._check_class(model_impl)
        self._keys_layer = self.llm.apply_model(workers.keys_layer)[0]
        self._records_routes = self.llm.apply_model(workers.records_routes)[0]
        self._scheduled: list[Scheduled] = []
        self._watch_scheduler()
        self._has_graphs = self._captures()
        if self._has_graphs:
            self.llm.apply_model(workers.watch_forwards)
        # of one worker, which is this process; several are others
        self._model: Any = None
        self._runner: Any = None
        if self._engine.vllm_config.parallel_config.world_size == 1:
            self._model = self.llm.apply_model(lambda model: model)[0]
            self._runner = self.llm.collective_rpc(lambda worker: worker.model_runner)[0]

    @property
    def model_runner(self) -> str:
        """Which of vLLM's two model runners runs here: "V1" or "V2"."""
        return "V2" if self._engine.vllm_config.use_v2_model_runner else "V1"

    def run(
        self, requests: Sequence[Request], seed: int | None = None, *, graphs: bool = True
    ) -> list[Result]:
        """Runs requests to their end, step by step.

        Args:
            requests: handed in when their `arrival` comes.
            seed: starts the sampler's generators anew.
            graphs: replay CUDA graphs where there are any; False runs every step eagerly.

        Returns:
            One result a sample, by request and sample. `steps` holds the steps of this run.

        Raises:
            vLLM's `VLLMValidationError`: for a request it refuses.
        """
        if seed is not None:
            self.llm.apply_model(workers.Seed(seed))
        self.steps, self._live = [], {}
        try:
            with contextlib.nullcontext() if graphs else self._without_graphs():
                results = list(self._steps_of(requests))
        except BaseException:
            self._engine.abort_request([str(i) for i in range(len(requests))])
            raise
        return sorted(results, key=lambda result: (result.request, result.sample))

    def trace(self, token_ids: Sequence[int], decode: bool = False) -> dict[str, str]:
        """Hash of what each operation gives for the last of `token_ids`.

        Args:
            token_ids: history and token.
            decode: compute the last token by a decode step after a prefill of the others; by
                default all are prefilled.

        Returns:
            See `isomodels.trace.trace_rows`; the names are those of the module.

        Raises:
            ValueError: `decode` and fewer than two tokens.
            HostError: vLLM replayed a CUDA graph, under which no Python runs, although it was
                told not to; or the engine has several workers.
        """
        if self._model is None:
            raise HostError("an engine of several workers cannot be traced: use one")
        request = Request(tuple(token_ids), temperature=0.0)
        if decode:
            if len(token_ids) < 2:
                raise ValueError("a decode needs a token before it: give two token ids or more")
            # The first sample can only be the last token; the step after it decodes that token.
            *prompt, last = token_ids
            request = replace(request, prompt=prompt, max_tokens=2, allowed_token_ids=[last])
        core = self._model.core
        with trace_rows(core, -1) as hashes:
            # Only the last step holds the row, be it a prompt's last chunk or the decode.
            handle = core.register_forward_pre_hook(lambda *_: hashes.clear())
            try:
                self.llm.reset_prefix_cache()
                self.run([request], graphs=False)
            finally:
                handle.remove()
        if self.steps[-1].replayed:
            raise HostError("vLLM replayed a CUDA graph, which Python cannot trace")
        return hashes

    def reload(self, path: Path | str) -> None:
        """Loads another checkpoint of the same config; see `isomodels.vllm.reload_weights`."""
        from isomodels.vllm.reload import reload_weights

        reload_weights(self.llm, path)

    def close(self) -> None:
        """Stops the engine, frees its memory, and takes back what vLLM changed in the process."""
        self._engine.engine_core.shutdown()
        with contextlib.suppress(AttributeError):
            del self._scheduler.schedule
        del self._model, self._runner, self._scheduler, self._engine, self.llm
        from vllm.distributed import cleanup_dist_env_and_memory

        cleanup_dist_env_and_memory()
        gc.collect()
        # vLLM's CPU worker replaces it by a function that does nothing.
        torch.set_num_threads = torch._C.set_num_threads
        for name in self._environment:
            os.environ.pop(name, None)

    def __enter__(self) -> "Engine":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _check_class(self, model_impl: str) -> None:
        ours = self.model_class.startswith("isomodels.vllm.")
        if ours != (model_impl == MODEL_IMPL):
            raise HostError(
                f"vLLM built {self.model_class} for model_impl={model_impl!r}: "
                "is isomodels installed (its entry point vllm.general_plugins)?"
            )

    def _steps_of(self, requests: Sequence[Request]) -> Iterator[Result]:
        waiting = sorted(enumerate(requests), key=lambda item: item[1].arrival)
        while waiting or self._engine.has_unfinished_requests():
            idle = not self._engine.has_unfinished_requests()
            while waiting and (waiting[0][1].arrival <= len(self.steps) or idle):
                self._add(*waiting.pop(0))
                idle = False
            for output in self._step():
                if output.finished:
                    yield from self._collect(output)

    def _add(self, index: int, request: Request) -> None:
        from vllm import SamplingParams
        from vllm.sampling_params import RequestOutputKind

        params = SamplingParams(
            max_tokens=request.max_tokens,
            temperature=request.temperature,
            top_p=request.top_p,
            n=request.n,
            allowed_token_ids=request.allowed_token_ids and list(request.allowed_token_ids),
            logprobs=0,
            prompt_logprobs=0 if request.prompt_logprobs else None,
            ignore_eos=True,
            detokenize=False,
            output_kind=RequestOutputKind.FINAL_ONLY,
        )
        prompt = {"prompt_token_ids": list(request.prompt)}
        engine_id = self._engine.add_request(str(index), prompt, params)
        for sample in range(request.n):
            name = engine_id if request.n == 1 else f"{sample}_{engine_id}"
            self._live[name] = Result(index, sample, tuple(request.prompt))

    def _collect(self, output: Any) -> Iterator[Result]:
        prompt_logprobs = None
        if output.prompt_logprobs:
            pairs = zip(output.prompt_logprobs, output.prompt_token_ids, strict=True)
            prompt_logprobs = [entry[token].logprob for entry, token in list(pairs)[1:]]
        own = {r.sample: r for r in self._live.values() if r.request == int(output.request_id)}
        for sample in output.outputs:
            result = own[sample.index]
            result.prompt_logprobs = prompt_logprobs
            ids = list(sample.token_ids)
            for i, (token, entry) in enumerate(zip(ids, sample.logprobs, strict=True)):
                made = result.tokens[i]
                replayed = self.steps[made.step].replayed
                result.tokens[i] = replace(
                    made, id=token, logprob=entry[token].logprob, replayed=replayed
                )
            del result.tokens[len(ids) :]
            yield result

    def _watch_scheduler(self) -> None:
        schedule = self._scheduler.schedule

        def watched(*args: Any, **kwargs: Any) -> Any:
            output = schedule(*args, **kwargs)
            if output.total_num_scheduled_tokens:
                self._note(output)
            return output

        self._scheduler.schedule = watched

    @contextlib.contextmanager
    def _without_graphs(self) -> Iterator[None]:
        """Steps that run eagerly, as under `enforce_eager`, in an engine that has graphs."""
        self.llm.collective_rpc(workers.UseGraphs(False))
        try:
            yield
        finally:
            self.llm.collective_rpc(workers.UseGraphs(True))

    def _captures(self) -> bool:
        """Whether there are CUDA graphs to replay."""
        from vllm.config import CUDAGraphMode

        mode = self._engine.vllm_config.compilation_config.cudagraph_mode
        return mode not in (None, CUDAGraphMode.NONE)

    def _step(self) -> list[Any]:
        """One step of the engine, and whether it was a replay."""
        number, self._scheduled = len(self.steps), []
        outputs = self._engine.step()
        if self._records_routes and self._scheduled:
            count = sum(len(one.slots) for one in self._scheduled)
            ids, slots = self.llm.apply_model(workers.TakeRoutes(count))[0]
            collect(ids, slots, self._scheduled)
        if self._has_graphs:
            ran = self.llm.apply_model(workers.take_forwards)[0]
            if len(self.steps) > number and not ran:
                self.steps[number] = replace(self.steps[number], replayed=True)
        return outputs

    def _note(self, output: Any) -> None:
        """Notes one step: `output` is the scheduler's decision."""
        cached, new = output.scheduled_cached_reqs, output.scheduled_new_reqs
        before = dict(zip(cached.req_ids, cached.num_computed_tokens, strict=True))
        before |= {one.req_id: one.num_computed_tokens for one in new}
        # The V2 runner is told of a resumed request as of a new one.
        resumed = len(cached.resumed_req_ids) + sum(
            self._scheduler.requests[one.req_id].num_preemptions > 0 for one in new
        )
        rows, prefills = {True: 0, False: 0}, 0  # rows by: is it a prefill?
        for name, count in output.num_scheduled_tokens.items():
            request, history = self._scheduler.requests[name], before[name]
            prefill = history < request.num_prompt_tokens or count > 1
            rows[prefill] += count
            prefills += prefill
            if (result := self._live.get(name)) is None:
                continue
            result.preemptions = request.num_preemptions
            if self._records_routes:
                self._scheduled.append(self._slots_of(name, result, history, count))
            if not result.tokens and not request.num_preemptions:
                if not result.chunks:
                    result.num_cached_tokens = history
                result.chunks.append((history, history + count))
            if history + count >= request.num_tokens:
                result.tokens.append(
                    Token(-1, 0.0, len(self.steps), count, history, request.num_preemptions)
                )
        self.steps.append(Step(rows[True], prefills, rows[False], resumed))

    def _slots_of(self, name: str, result: Result, first: int, count: int) -> Scheduled:
        # The slots that the step knows are those of keys, which a hybrid has beside its states.
        groups = self._scheduler.kv_cache_config.kv_cache_groups
        keys = self._keys_layer
        index = next(i for i, group in enumerate(groups) if keys in group.layer_names)
        # Now: a request that ends with this step gives its blocks back in it.
        blocks = self._scheduler.kv_cache_manager.get_block_ids(name)[index]
        size = groups[index].kv_cache_spec.block_size
        return scheduled(result, first, count, blocks, size)
