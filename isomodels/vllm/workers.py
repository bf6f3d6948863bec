"""What an `Engine` asks of its workers, which may be other processes: functions of their model."""

from typing import Any

import numpy as np
import numpy.typing as npt
import torch

Routes = tuple[npt.NDArray[np.int32], list[int]]


def model_class(model: Any) -> str:
    """Module and name of the class that vLLM built."""
    return f"{type(model).__module__}.{type(model).__qualname__}"


def keys_layer(model: Any) -> str | None:
    """Name of the first layer that has pages of keys; None for a model of vLLM's own."""
    layers = getattr(model, "layers", None)
    return getattr(layers[0], "name", None) if layers else None


def records_routes(model: Any) -> bool:
    """Whether the model keeps the routes of its last step."""
    return getattr(model, "routes", None) is not None


class Seed:
    """Starts a worker's generators anew."""

    def __init__(self, seed: int):
        self.seed = seed

    def __call__(self, model: Any) -> None:
        """In one worker."""
        torch.manual_seed(self.seed)
        np.random.seed(self.seed)  # the V2 runner draws each request's seed from here


class TakeRoutes:
    """The ids [count, layers with experts, k] and the slots of a step's first `count` rows."""

    def __init__(self, count: int):
        self.count = count

    def __call__(self, model: Any) -> Routes:
        """Of one worker."""
        buffer = model.routes
        return buffer.ids[: self.count].cpu().numpy(), buffer.slots[: self.count].tolist()
