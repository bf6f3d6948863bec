"""Routes of a forward: which experts each token went to, recorded and replayed."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch
from torch import Tensor, nn

from isomodels.layers.moe import Router


def routers(core: nn.Module) -> list[Router]:
    """All routers, by layer."""
    return [module for module in core.modules() if isinstance(module, Router)]


class Routes:
    """Ids of the forwards since `record_routes`, call by call."""

    def __init__(self, layers: int):
        self._calls: list[list[Tensor]] = [[] for _ in range(layers)]

    def keep(self, index: int, ids: Tensor) -> None:
        """Note the ids [T, k] of one router."""
        self._calls[index].append(ids.detach().clone())

    def take(self) -> Tensor:
        """[tokens of all calls, layers with experts, k] int32; forgets them."""
        kept = [torch.cat(calls) for calls in self._calls]
        for calls in self._calls:
            calls.clear()
        return torch.stack(kept, 1)


@contextmanager
def record_routes(core: nn.Module) -> Iterator[Routes]:
    """Record every router's ids while the context is open.

    A core without experts has none to record, and `take` must not be called.

    Args:
        core: a model with experts.

    Yields:
        What was recorded, in the order of the calls.
    """
    found = routers(core)
    routes = Routes(len(found))
    before = [router.capture_fn for router in found]
    for index, router in enumerate(found):
        router.capture_fn = lambda ids, index=index: routes.keep(index, ids)
    try:
        yield routes
    finally:
        for router, capture in zip(found, before, strict=True):
            router.capture_fn = capture


@contextmanager
def replay_routes(core: nn.Module, routes: Tensor) -> Iterator[None]:
    """Send the tokens of one forward to given experts.

    The weights are still those of the core's own scores, so a replay of its own routes changes no
    bit. With activation recompute, keep the context open until the backward pass has ended.

    Args:
        core: a model with experts.
        routes: [T, layers with experts, k] int32, as `Routes.take` gives them.

    Raises:
        ValueError: for another number of layers.
    """
    found = routers(core)
    if routes.dim() != 3 or routes.shape[1] != len(found):
        raise ValueError(
            f"routes must be [T, {len(found)}, k], a row a layer with experts, "
            f"got {list(routes.shape)}"
        )
    layers: Sequence[Tensor] = routes.unbind(1)
    for router, ids in zip(found, layers, strict=True):
        router.replay = ids.contiguous()
    try:
        yield
    finally:
        for router in found:
            router.replay = None
