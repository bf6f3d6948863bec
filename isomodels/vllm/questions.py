"""What a running engine may be asked beside vLLM's own calls: one function of a worker each.

By `llm.collective_rpc(NAME)`, or over HTTP by vLLM's `POST /collective_rpc` with
`{"method": NAME, "kwargs": {...}}` under VLLM_SERVER_DEV_MODE=1.
"""

from collections.abc import Callable
from typing import Any

from isomodels.registry import load_object

QUESTIONS = {
    # the contract of each worker, as canonical JSON
    "isomodels_contract": "isomodels.vllm.questions:contract",
    # the operators that each worker has run
    "isomodels_served": "isomodels.vllm.questions:served",
    # begin to record operations; end it and write the file
    "isomodels_trace_start": "isomodels.vllm.tracing:start_on_worker",
    "isomodels_trace_stop": "isomodels.vllm.tracing:stop_on_worker",
}


def question(method: Any) -> Callable[..., Any] | None:
    """The function behind a method's name; None where it is none of ours."""
    name = QUESTIONS.get(method) if isinstance(method, str) else None
    return None if name is None else load_object(name)


def contract(worker: Any) -> str:
    """Canonical JSON."""
    return worker.get_model().contract().to_json()


def served(worker: Any) -> list[dict[str, Any]]:
    """See `isomodels.contract.served`; empty for an engine that does not count."""
    counted = worker.get_model().served
    return [] if counted is None else counted.ran()
