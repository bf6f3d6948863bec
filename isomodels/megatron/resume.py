"""Saves and resumes a training with `dist_checkpointing`, also under torch's AdamW.

Without Transformer Engine and Apex, megatron-core uses `torch.optim.AdamW`. Its distributed
optimizer then cannot be resumed, for five reasons:

* `state_dict` needs a step count, which AdamW has only after its first step, so a fresh optimizer
  can neither save nor load;
* the loader looks for a per-parameter `step` that the checkpoint does not hold, and for fp32
  models writes into views of leaves that require a gradient;
* the parameters of a group are numbered in the order of their buffers, and held with those of
  float32 first: in a bfloat16 model with float32 parameters a number names another one;
* an optimizer without parameters, that of the experts on a stage without any, cannot be saved;
* the loader gives all parameters one shared `step` tensor, which AdamW then advances once per
  parameter: training goes on, silently, with a wrong bias correction.

Checked on megatron-core 0.16.1, 0.17.1, 0.18.2 and 0.19.2 with torch 2.13.0+cpu.
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from itertools import chain
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.checkpoint.api import CheckpointException

from isomodels.errors import CheckpointError, IsoError, UnsupportedError
from isomodels.megatron.saved_files import finish, require_digests
from isomodels.megatron.writers import bound_writers
from isomodels.weights_conv.write import place

# fully_sharded_model_space, Megatron's default, raises on save. Names without the number of an
# optimizer among several: other layouts have others.
_OPTIMIZER_FORMAT = {
    "distrib_optim_sharding_type": "fully_reshardable",
    "chained_optim_avoid_prefix": True,
}
# Bytes of a tensor's zip archive and of its entry in .metadata, beside its data: measured 2,080.
_AROUND = 2000
# Of torch's zip writer, whose errors are plain RuntimeErrors without the system's reason.
_OF_WRITER = ("basic_ios", "inline_container", "PytorchStreamWriter")


def save(
    path: str | Path,
    models: Sequence[Any],
    optimizer: Any,
    steps: int,
    contract: str | None = None,
) -> None:
    """Saves a training into a folder, which takes its place when it is whole; every rank calls it.

    Args:
        path: the folder; a save that is there is replaced. All ranks see the same file system.
        models: the `IsoLanguageModel`s of this rank, without their wrappers.
        optimizer: what `get_megatron_optimizer` returned.
        steps: number of steps done.
        contract: what the folder states of its weights, as JSON.

    Raises:
        CheckpointError: if the folder cannot be written, lies on a disk without the room, or holds
            something else than a save. A save that was there is still there.
        LostRankError: where the first rank alone cannot write, on the others (from `Trainer.save`).
        UnsupportedError: for a bfloat16 model with float32 parameters without the distributed
            optimizer.
    """
    state = _sharded_state(models, optimizer, steps, is_loading=False)
    size = _nbytes(state)
    places: list[Any] = [None]
    outcome: list[Any] = [None]
    own: IsoError | None = None
    is_torn = False  # the others are still in Megatron's exchanges

    def fill(folder: Path) -> None:
        nonlocal is_torn
        places[0] = folder
        dist.broadcast_object_list(places)
        is_torn = True
        try:
            _write(folder, path, state)
        except CheckpointError as error:  # Megatron tells all ranks of one that cannot write shards
            is_torn = not isinstance(error.__cause__, CheckpointException)
            raise
        is_torn = False
        finish(folder, path, contract)

    try:
        if dist.get_rank() == 0:
            place(path, fill, size=size, distributed=True)
        else:
            dist.broadcast_object_list(places)
            if places[0] is not None:
                _write(places[0], path, state)
                finish(places[0], path, contract)
    except IsoError as error:
        own = outcome[0] = error
    finally:  # whatever becomes of one rank, none waits for it
        if dist.get_rank() == 0 and places[0] is None:
            dist.broadcast_object_list(places)
        if not is_torn:
            dist.broadcast_object_list(outcome)
    if (failure := outcome[0] or own) is not None:  # the first rank knows the reason
        raise failure


def _nbytes(state: dict[str, Any]) -> int:
    """Bytes of the files that all ranks save together, nearly and at least."""
    from megatron.core.dist_checkpointing.dict_utils import nested_values
    from megatron.core.dist_checkpointing.mapping import ShardedTensor, is_main_replica

    own = sum(
        value.data.nbytes + _AROUND
        for value in nested_values(state)
        if isinstance(value, ShardedTensor) and is_main_replica(value.replica_id)
        if value.data is not None
    )
    sizes: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(sizes, own)
    return sum(sizes)


def _write(folder: Path, path: str | Path, state: dict[str, Any]) -> None:
    from megatron.core import dist_checkpointing

    try:
        with bound_writers():
            dist_checkpointing.save(state, str(folder))
    except (OSError, CheckpointException) as error:
        raise CheckpointError(f"cannot write {path}: {_reason(error)}") from error
    except RuntimeError as error:
        if not any(words in str(error) for words in _OF_WRITER):
            raise
        raise CheckpointError(f"cannot write {path}: {_reason(error)}") from error


def load(path: str | Path, models: Sequence[Any], optimizer: Any) -> int:
    """Loads what `save` saved into a model and its optimizer.

    Returns:
        The number of steps done.

    Raises:
        CheckpointError: if the folder holds no training, one with a file that is missing or not as
            it was saved, or another model's.
    """
    from megatron.core import dist_checkpointing
    from megatron.core.dist_checkpointing.core import CheckpointingException

    require_digests(Path(path))
    state = _sharded_state(models, optimizer, 0, is_loading=True)
    try:
        loaded = dist_checkpointing.load(state, str(path))
    except (OSError, CheckpointingException, CheckpointException) as error:
        raise CheckpointError(
            f"cannot load {path}: {_reason(error)}; give a folder that Trainer.save wrote"
        ) from error
    for model in models:
        own = model.state_dict().keys()
        model.load_state_dict({k: v for k, v in loaded["model"].items() if k in own})
    optimizer.load_state_dict(loaded["optimizer"])
    return loaded["steps"]


def _reason(error: BaseException) -> str:
    """What went wrong, in one line."""
    if isinstance(error, CheckpointException):  # its own text is a traceback of every rank
        if not error.failures:  # told to the first rank alone
            return "another rank could not write"
        error = next(iter(error.failures.values()))[0]
    text = str(getattr(error, "strerror", None) or error)
    if any(words in text for words in _OF_WRITER):
        return (
            "a file could not be written to its end: make room on the disk, or raise the quota or "
            "the limit on the size of files"
        )
    lines = text.splitlines()
    return lines[0].rstrip(".") if lines else type(error).__name__


def _sharded_state(
    models: Sequence[Any], optimizer: Any, steps: int, is_loading: bool
) -> dict[str, Any]:
    for one in getattr(optimizer, "chained_optimizers", [optimizer]):
        if getattr(one, "float16_groups", None) and any(one.fp32_from_fp32_groups):
            raise UnsupportedError(
                "Megatron's plain optimizer cannot save a bfloat16 model with float32 parameters: "
                "use the distributed optimizer"
            )
    # stages number their layers as the whole model does: no name is there twice
    weights = {k: v for model in models for k, v in model.sharded_state_dict().items()}
    states = optimizer.sharded_state_dict(
        weights, is_loading=is_loading, metadata=_OPTIMIZER_FORMAT
    )
    return {"model": weights, "optimizer": states, "steps": steps}


def repair_torch_adam_resume(optimizer: Any) -> None:
    """Repairs one optimizer object; call it once, after `get_megatron_optimizer`.

    Changes only methods of the given object, and only where the fault exists: another optimizer,
    or one over Transformer Engine's or Apex's Adam, is left as it is.

    Args:
        optimizer: what `get_megatron_optimizer` returned (chained ones included).
    """
    from megatron.core.optimizer.distrib_optimizer import DistributedOptimizer

    chained = getattr(optimizer, "chained_optimizers", [optimizer])
    repaired = [
        one
        for one in chained
        if isinstance(one, DistributedOptimizer)
        and isinstance(getattr(one, "optimizer", None), torch.optim.Adam)
    ]
    for one in repaired:
        _repair(one, [other.optimizer for other in repaired])


def _repair(optimizer: Any, chained: Sequence[torch.optim.Optimizer]) -> None:
    halves, wholes = optimizer.model_float16_groups, optimizer.model_fp32_groups
    for group, params in enumerate(zip(wholes, halves, strict=True)):
        for order, param in enumerate([*params[0], *params[1]]):
            optimizer.model_param_group_index_map[param] = (group, order)

    state_dict = optimizer.state_dict
    load_state_dict = optimizer.load_state_dict
    set_states = optimizer._set_main_param_and_optimizer_states

    def state_dict_of_started(*args: Any, **kwargs: Any) -> Any:
        _start(optimizer.optimizer)
        with _steps_of_others(optimizer.optimizer, chained):
            return state_dict(*args, **kwargs)

    def load_with_own_steps(*args: Any, **kwargs: Any) -> None:
        _start(optimizer.optimizer)
        load_state_dict(*args, **kwargs)
        for state in optimizer.optimizer.state.values():
            state["step"] = state["step"].clone()

    @torch.no_grad()
    def set_states_with_step(model_param: Tensor, tensors: dict[str, Tensor]) -> None:
        group, order = optimizer.model_param_group_index_map[model_param]
        main_param = optimizer.optimizer.param_groups[group]["params"][order]
        step = optimizer.optimizer.state[main_param]["step"]
        set_states(model_param, {"step": step, **tensors})

    optimizer.state_dict = state_dict_of_started
    optimizer.load_state_dict = load_with_own_steps
    optimizer._set_main_param_and_optimizer_states = set_states_with_step


@contextmanager
def _steps_of_others(
    adam: torch.optim.Optimizer, chained: Sequence[torch.optim.Optimizer]
) -> Iterator[None]:
    """An optimizer without parameters tells the step count of another of this rank.

    That of the experts is one, on a pipeline stage without experts; where that is the first rank,
    what it tells is what all ranks load.
    """
    if adam.state:
        yield
        return
    for other in chained:
        _start(other)
    state: Any = adam.state  # a key that is no parameter is kept as it is
    state["none"] = next(iter(chain.from_iterable(one.state.values() for one in chained)), {})
    try:
        yield
    finally:
        del state["none"]


def _start(adam: torch.optim.Optimizer) -> None:
    """Gives each parameter the state that AdamW would give it at its first step."""
    for group in adam.param_groups:
        for param in group["params"]:
            state = adam.state[param]
            if not state:
                state["step"] = torch.tensor(0.0, dtype=torch.float32)
                state["exp_avg"] = torch.zeros_like(param)
                state["exp_avg_sq"] = torch.zeros_like(param)
