"""Which experts the engine sent each token to, as a trainer's replay or a comparison wants it."""

from collections.abc import Iterable
from dataclasses import dataclass
from functools import partial

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor, nn

from isomodels.batch import Batch
from isomodels.layers.routes import routers
from isomodels.vllm.results import Result

# Key of vLLM's `additional_config` that makes the model keep routes.
RECORD_ROUTES = "isomodels_record_routes"


class RouteBuffer:
    """Routes of the last step, in tensors of the device: a CUDA graph that is replayed fills them.

    Attributes:
        ids: [max_tokens, layers with experts, k] int32.
        slots: [max_tokens] int64, the cache slot of each row, by which a row's token is known.
    """

    def __init__(self, core: nn.Module, max_tokens: int, device: torch.device):
        found = routers(core)
        shape = (max_tokens, len(found), found[0].routing.top_k)
        self.ids = torch.zeros(shape, dtype=torch.int32, device=device)
        self.slots = torch.zeros(max_tokens, dtype=torch.int64, device=device)
        for index, router in enumerate(found):
            router.capture_fn = partial(self._keep, index)

    def _keep(self, index: int, ids: Tensor) -> None:
        self.ids[: len(ids), index].copy_(ids)

    def keep_slots(self, batch: Batch) -> None:
        """Note where the step's tokens lie in the cache."""
        if batch.paged is not None:
            slots = batch.paged.slot_mapping
            self.slots[: len(slots)].copy_(slots)


@dataclass(frozen=True)
class Scheduled:
    """Tokens `first` to `first + len(slots)` of a sequence, computed in one step."""

    result: Result
    first: int
    slots: list[int]


def scheduled(
    result: Result, first: int, count: int, blocks: Iterable[int], size: int
) -> Scheduled:
    """The cache slots of a request's tokens in a step.

    Args:
        result: of the request.
        first, count: its tokens in this step.
        blocks: ids of its cache blocks.
        size: tokens a block.
    """
    blocks = list(blocks)
    slots = [blocks[p // size] * size + p % size for p in range(first, first + count)]
    return Scheduled(result, first, slots)


def collect(ids: npt.NDArray[np.int32], slots: Iterable[int], step: Iterable[Scheduled]) -> None:
    """Give each result the routes of its tokens in the step that has just run.

    Args:
        ids: [rows, layers with experts, k], of the step's rows.
        slots: the cache slot of each row.
        step: the tokens that were computed.
    """
    row_of = {slot: i for i, slot in enumerate(slots)}
    for one in step:
        rows = [row_of[slot] for slot in one.slots]
        one.result.routes.append((one.first, np.ascontiguousarray(ids[rows])))
