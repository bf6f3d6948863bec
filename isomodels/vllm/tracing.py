"""Recording a running engine's operations: see `isomodels.trace`.

Asked through `collective_rpc("isomodels_trace_start")` and `("isomodels_trace_stop")`, in process
or over HTTP. A replayed CUDA graph runs no Python, so an engine with graphs must have captured them
with the digests inside: it is started with `additional_config={"isomodels_trace": true}`.
"""

from pathlib import Path
from typing import Any

from torch import Tensor

from isomodels.errors import TraceError
from isomodels.trace.choice import Choice
from isomodels.trace.collect import Collector, Span
from isomodels.trace.recorder import Recorder
from isomodels.vllm.versions import vllm_version

# Key of vLLM's `additional_config` that puts the digests into captured CUDA graphs.
TRACE = "isomodels_trace"


class EngineTrace:
    """The recording of one worker.

    Args:
        core: its module.
        most: rows of its largest step.
        captured: put the digests into CUDA graphs.
    """

    def __init__(self, core: Any, most: int, *, captured: bool = False):
        self.recorder = Recorder(core, most, captures=captured)
        self.recorder.tolerant = True  # a fault of a recording must not end the engine
        self.collector: Collector | None = None
        self._replaced: Any = None

    def start(self, runner: Any, choice: Choice) -> None:
        """Collect the chosen tokens of every step from now on.

        Args:
            runner: vLLM's model runner, V1 or V2.
            choice: which tokens; a sequence's name is vLLM's id of its request.

        Raises:
            TraceError: a recording is under way.
        """
        if self.collector is not None:
            raise TraceError("a recording is under way: stop it first")
        self.recorder.arm()
        self.recorder.armed = False
        collector = self.collector = Collector(self.recorder, choice)
        execute = runner.execute_model
        self._replaced = vars(runner).get("execute_model")

        def traced(scheduler_output: Any, *args: Any, **kwargs: Any) -> Any:
            starts = _starts(scheduler_output)
            wanted = any(map(choice.has_sequence, starts))
            if not self.recorder.failed:
                self.recorder.armed = wanted
                collector.begin()
            result = execute(scheduler_output, *args, **kwargs)
            if wanted and not self.recorder.failed:
                with self.recorder.watched():
                    self._collect(runner, scheduler_output, starts)
            return result

        runner.execute_model = traced

    def _collect(self, runner: Any, scheduler_output: Any, starts: dict[str, int]) -> None:
        assert self.collector is not None
        for new in scheduler_output.scheduled_new_reqs:
            if self.collector.choice.has_sequence(new.req_id):
                self.collector.know(new.req_id, new.prompt_token_ids)
        names, ids = _rows(runner)
        spans, row = [], 0
        for name in names:
            count = scheduler_output.num_scheduled_tokens[name]
            spans.append(Span(name, starts[name], row, count))
            row += count
        self.collector.add(spans, ids)

    def stop(self, runner: Any, path: Path | str, about: dict[str, str]) -> dict[str, int]:
        """End the recording and write it.

        Args:
            runner: that of `start`.
            path: of the file.
            about: what it says of this side.

        Returns:
            {"tokens": how many it holds, "sequences": of how many}.

        Raises:
            TraceError: none is under way, or as `Collector.finish`.
        """
        if self.collector is None:
            raise TraceError("no recording is under way: call isomodels_trace_start first")
        collector, self.collector = self.collector, None
        del runner.execute_model  # the class's own again, or another watcher's
        if self._replaced is not None:
            runner.execute_model = self._replaced
        self.recorder.armed = False
        recording = collector.finish(about)
        recording.save(path)
        return {"tokens": len(recording.position), "sequences": len(recording.sequences)}


def _starts(scheduler_output: Any) -> dict[str, int]:
    """How many tokens of each request of a step were computed before it."""
    cached = scheduler_output.scheduled_cached_reqs
    starts = dict(zip(cached.req_ids, cached.num_computed_tokens, strict=True))
    return starts | {n.req_id: n.num_computed_tokens for n in scheduler_output.scheduled_new_reqs}


def _rows(runner: Any) -> tuple[list[str], Tensor]:
    """The requests of the step that has just run, in the order of their rows, and its ids [T].

    The V1 runner keeps a batch from step to step, the V2 runner one for each step.
    """
    state = runner.execute_model_state
    if hasattr(state, "input_batch"):
        batch = state.input_batch
        return list(batch.req_ids), batch.input_ids
    return list(runner.input_batch.req_ids), runner.input_ids.gpu


def start_on_worker(worker: Any, requests: str | None = None, positions: str | None = None) -> None:
    """`collective_rpc("isomodels_trace_start")`: all arguments are text, as HTTP wants them.

    Args:
        worker: vLLM's.
        requests: "ID,ID": parts of request ids; by default every request.
        positions: "3,10:20"; by default every token.

    Raises:
        TraceError: several workers, or graphs that were captured without digests.
    """
    choice = Choice.parse(requests, positions)
    config, model = worker.vllm_config, worker.get_model()
    if config.parallel_config.world_size > 1:
        raise TraceError("an engine of several workers cannot be traced: use one")
    if model.trace is None:
        if has_graphs(config):
            raise TraceError(
                "this engine's CUDA graphs were captured without digests: start it with "
                f"--additional-config '{{\"{TRACE}\": true}}', or with --enforce-eager"
            )
        most = config.scheduler_config.max_num_batched_tokens
        model.trace = EngineTrace(model.core, most)
    model.trace.start(worker.model_runner, choice)


def stop_on_worker(worker: Any, path: str) -> dict[str, int]:
    """`collective_rpc("isomodels_trace_stop")`: write the recording to a file of this host."""
    model = worker.get_model()
    if model.trace is None:
        raise TraceError("no recording is under way: call isomodels_trace_start first")
    contract = model.contract()
    about = {"host": f"vllm {vllm_version()}", "architecture": model.spec.architecture}
    return model.trace.stop(worker.model_runner, path, about | contract.digests)


def has_graphs(vllm_config: Any) -> bool:
    """Whether an engine replays CUDA graphs."""
    from vllm.config import CUDAGraphMode

    mode = vllm_config.compilation_config.cudagraph_mode
    eager = vllm_config.model_config.enforce_eager
    return not eager and mode not in (None, CUDAGraphMode.NONE)
