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


def watch_forwards(model: Any) -> None:
    """Count the model's forward passes from now on: a replay of a CUDA graph is none."""
    model.forwards = 0

    def count(model: Any, *_: Any) -> None:
        model.forwards += 1

    model.register_forward_pre_hook(count)


def take_forwards(model: Any) -> int:
    """Forward passes since the last call."""
    count, model.forwards = model.forwards, 0
    return count


class UseGraphs:
    """Has a worker replay its CUDA graphs, or run every step eagerly, as under `enforce_eager`.

    Each model runner asks one object, by one flag, whether there are graphs to replay.
    """

    _kept = "isomodels_had_graphs"

    def __init__(self, use: bool):
        self.use = use

    def __call__(self, worker: Any) -> None:
        """In one worker. `use` comes after a call without it."""
        if worker.vllm_config.use_v2_model_runner:
            owner, flag = worker.model_runner.cudagraph_manager, "_graphs_captured"
        else:
            owner, flag = worker.model_runner.cudagraph_dispatcher, "keys_initialized"
        if self.use:
            setattr(owner, flag, vars(owner).pop(self._kept))
        else:
            setattr(owner, self._kept, getattr(owner, flag))
            setattr(owner, flag, False)


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
