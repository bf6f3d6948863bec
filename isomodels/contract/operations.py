"""Which operations the module runs in which case, read from a run of the module itself.

The run is on the meta device: shapes only, no values, no memory.
"""

from collections import Counter
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from isomodels.batch import Batch, PagedKV, PagedStates
from isomodels.layers.gated_delta import state_layout
from isomodels.layers.hybrid_config import HybridConfig
from isomodels.registry import ArchSpec, load_object

# Where the past lies is all that cases differ in before the hosts; "Words" of docs/design.md.
CASES = {
    "trainer_forward": "packed",
    "trainer_score": "packed",
    "trainer_recompute": "packed",
    "engine_prefill": "paged",
    "engine_chunked_prefill": "paged",
    "engine_prefix_hit": "paged",
    "engine_decode": "paged",
    "engine_decode_graph": "paged",
    "engine_resume": "paged",
}
_TOKENS = 8
_BLOCK_SIZE = 16
_NAMESPACE = "isomodels"


class OperationCount(TorchDispatchMode):
    """Counts the isomodels operators that run while it is open.

    Attributes:
        counts: {operator: calls}.
    """

    def __init__(self) -> None:
        super().__init__()
        self.counts: Counter[str] = Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Count and go on."""
        if func.namespace == _NAMESPACE:
            self.counts[func._opname] += 1
        return func(*args, **(kwargs or {}))


def operations_of(core: Any, device_type: str) -> dict[str, dict[str, dict[str, int]]]:
    """The operators of every case.

    Args:
        core: an architecture's module, on the meta device.
        device_type: "cpu" or "cuda", whose form the recurrent states have.

    Returns:
        {"packed" or "paged": {"forward", "logprobs" or "processed_logprobs": {operator: calls}}};
        `CASES` says which case is which.
    """
    ids = torch.zeros(_TOKENS, dtype=torch.int64, device="meta")
    scores = {
        "packed": {"logprobs": lambda hidden: core.token_logprobs(hidden, ids)},
        "paged": {
            "logprobs": core.logprobs,
            "processed_logprobs": lambda hidden: _processed(core, hidden),
        },
    }
    found: dict[str, dict[str, dict[str, int]]] = {}
    with torch.no_grad():
        for form, ways in scores.items():
            with OperationCount() as forward:
                hidden = core(ids, ids, _batch(core, device_type, paged=form == "paged"))
            found[form] = {"forward": dict(forward.counts)}
            for name, score in ways.items():
                with OperationCount() as scoring:
                    score(hidden)
                found[form][name] = dict(scoring.counts)
    return found


def operators_of(
    spec: ArchSpec, config: Any, dtype: torch.dtype, device: torch.device, form: str
) -> set[str]:
    """The operators that one host runs, in either mode of its logprobs.

    Args:
        spec, config: as `read_config` gives them.
        dtype: of the model.
        device: where it runs.
        form: "packed" for a trainer, "paged" for an engine.
    """
    core = load_object(spec.model)(config, dtype=dtype, device=torch.device("meta"))
    return {name for part in operations_of(core, device.type)[form].values() for name in part}


def _processed(core: Any, hidden: torch.Tensor) -> torch.Tensor:
    from isomodels.kernels.logprob import log_normalize

    return log_normalize(core.logits(hidden), 1.0)


def _batch(core: Any, device_type: str, *, paged: bool) -> Batch:
    bounds = torch.zeros(2, dtype=torch.int32, device="meta")
    lengths = torch.zeros(1, dtype=torch.int32, device="meta")
    if not paged:
        return Batch(bounds, lengths, _TOKENS, _TOKENS)
    config, dtype = core.config, core.model.embed_tokens.weight.dtype
    table = torch.zeros(1, 1, dtype=torch.int32, device="meta")
    slots = torch.zeros(_TOKENS, dtype=torch.int64, device="meta")
    caches = [_pages(config, dtype) for _ in range(config.num_hidden_layers)]
    pages = PagedKV(caches, table, slots)
    states = _states(config, dtype, device_type)
    return Batch(bounds, lengths, _TOKENS, _TOKENS, pages, states)


def _pages(config: Any, dtype: torch.dtype) -> torch.Tensor:
    heads, width = config.page_shape
    return torch.empty(1, heads, _BLOCK_SIZE, width, dtype=dtype, device="meta")


def _states(config: Any, dtype: torch.dtype, device_type: str) -> PagedStates | None:
    if not isinstance(config, HybridConfig):
        return None
    layers = len(config.layers_of("linear_attention"))
    layout = state_layout(config, dtype, device_type)
    tensors = [
        [torch.empty(1, *shape, dtype=of, device="meta") for shape, of in layout]
        for _ in range(layers)
    ]
    return PagedStates(tensors, [torch.zeros(1, dtype=torch.int32, device="meta")] * layers)
