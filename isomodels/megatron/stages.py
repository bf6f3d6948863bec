"""A model in parts: results of the last pipeline stage for all, and all parts put together."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
import torch.distributed as dist
from megatron.core import parallel_state
from torch import Tensor, nn

from isomodels.layers.parallel import shards
from isomodels.layers.routes import Routes, routers
from isomodels.megatron.packing import Pack

# What each layer of this rank gave, run by run: (output, residual stream).
LayerOutputs = dict[nn.Module, list[tuple[Tensor, Tensor]]]


def unwrap(model: Any) -> Any:
    """The model below Megatron's wrappers."""
    while hasattr(model, "module"):
        model = model.module
    return model


@contextmanager
def record_layers(models: Sequence[Any]) -> Iterator[LayerOutputs]:
    """Keep what every layer gives while the context is open."""
    layers = [layer for model in models for layer in model.core.model.layers]
    outputs: LayerOutputs = {layer: [] for layer in layers}

    def keep(layer: nn.Module, args: Any, output: tuple[Tensor, Tensor]) -> None:
        outputs[layer].append(output)

    hooks = [layer.register_forward_hook(keep) for layer in layers]
    try:
        yield outputs
    finally:
        for hook in hooks:
            hook.remove()


def from_last_stage(rows: list[Tensor], packs: list[Pack]) -> list[Tensor]:
    """The logprobs [T] fp32 of each microbatch, which the last stage has, on every stage."""
    if parallel_state.get_pipeline_model_parallel_world_size() == 1:
        return rows
    sizes = [one.input_ids.numel() for one in packs]
    device = packs[0].input_ids.device
    flat = torch.cat(rows) if rows else torch.empty(sum(sizes), device=device)
    source = parallel_state.get_pipeline_model_parallel_last_rank()
    group = parallel_state.get_pipeline_model_parallel_group()
    dist.broadcast(flat, source, group=group)
    return list(flat.split(sizes))


def routes_by_layer(
    models: Sequence[Any], recorded: Sequence[Routes]
) -> list[npt.NDArray[np.int32]]:
    """Routes [tokens, k] of each layer with experts of the whole model, on every stage.

    Args:
        models: the `IsoLanguageModel`s of this rank.
        recorded: what `record_routes` kept of each.
    """
    own: dict[int, npt.NDArray[np.int32]] = {}
    for model, routes in zip(models, recorded, strict=True):
        if found := routers(model.core):
            ids = routes.take().cpu().numpy()
            own |= {router.layer_id: ids[:, i] for i, router in enumerate(found)}
    stages: list[Any] = [own]
    if parallel_state.get_pipeline_model_parallel_world_size() > 1:
        group = parallel_state.get_pipeline_model_parallel_group()
        stages = [None] * group.size()
        dist.all_gather_object(stages, own, group=group)
    whole = {layer: ids for stage in stages for layer, ids in stage.items()}
    return [whole[layer] for layer in sorted(whole)]


@dataclass(frozen=True)
class WholeModel:
    """The tensors of all ranks under their names, and the config: what a save reads."""

    config: Any
    tensors: dict[str, Tensor]

    def state_dict(self) -> dict[str, Tensor]:
        """Name -> tensor of the whole model."""
        return self.tensors


def gather_model(models: Sequence[Any]) -> Any:
    """Puts the model together on the first process; None elsewhere. All ranks call it.

    Args:
        models: the `IsoLanguageModel`s of this rank.
    """
    if all(model.layout.whole for model in models):
        return models[0].core if dist.get_rank() == 0 else None
    own = [
        (name, tensor.detach().cpu(), shards(model.core).get(name))
        for model in models
        for name, tensor in model.core.state_dict().items()
        if not (name == "lm_head.weight" and model.share_embeddings_and_output_weights)
    ]
    # one rank's part at a time: the first process holds the whole model and one part
    tensors: dict[str, Tensor] = {}
    for rank in range(dist.get_world_size()):
        for name, tensor, shard in _sent(own, rank):
            if shard is None:
                tensors[name] = tensor
                continue
            if name not in tensors:
                tensors[name] = tensor.new_empty(shard.whole_shape(tensor.shape))
            shard.put(tensors[name], tensor)
    return WholeModel(models[0].core.config, tensors) if dist.get_rank() == 0 else None


def _sent(own: list[Any], source: int) -> list[Any]:
    """What rank `source` has, on rank 0; nothing elsewhere."""
    if source == 0:
        return own if dist.get_rank() == 0 else []
    received: list[Any] = [None]
    if dist.get_rank() == source:
        dist.send_object_list([own], 0)
    elif dist.get_rank() == 0:
        dist.recv_object_list(received, source)
        return received[0]
    return []
