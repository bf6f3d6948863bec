"""What `dist_checkpointing` needs to know: which part of which whole tensor a rank holds.

The whole tensors are those of the model in one process, so a checkpoint of any layout loads into
any other: a fused weight is stored as the parts that lie in the whole one, not as a rank's own.
"""

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from megatron.core.dist_checkpointing.mapping import ShardedTensor, ShardedTensorFactory
from torch import Tensor

from isomodels.layers.parallel import Part, Shard, shards
from isomodels.layers.pieces import Piece, pieces


def sharded_state(core: Any, prefix: str, groups: Any) -> dict[str, Any]:
    """Every tensor of a core under its name in the whole model.

    Args:
        core: the part of the model that this rank holds.
        prefix: of the names.
        groups: Megatron's process groups.

    Returns:
        Name -> `ShardedTensor`, or a factory of several.
    """
    parts = shards(core)
    tied = core.config.tie_word_embeddings
    state: dict[str, Any] = {}
    # vars, not copies: the optimizer finds its parameters by identity
    for name, tensor in core.state_dict(keep_vars=True).items():
        key = name
        copy = _copy(name, parts.get(name), groups)
        if name == "lm_head.weight" and tied:  # the second copy of a tied weight, on a last stage
            key, copy = "model.embed_tokens.weight", (1, *copy[1:])
        state[prefix + name] = _sharded(prefix + key, tensor, parts.get(name), copy)
    return state


def own_pieces(models: Sequence[Any]) -> list[Piece]:
    """The blocks of the whole model that this rank is to send: all ranks together, each bit once.

    Args:
        models: the `IsoLanguageModel`s of this rank; the blocks are views of their parameters.
    """
    found = []
    for model in models:
        groups = model.pg_collection
        for one in pieces(model.core):
            replicas = groups.expt_dp if ".experts." in one.name else groups.dp_cp
            if not one.copy and _rank(replicas) == 0:
                found.append(one)
    return found


def _copy(name: str, shard: Shard | None, groups: Any) -> tuple[int, int, int]:
    """Which of the copies of a tensor this is; all zeros are the one that is written."""
    if ".experts." in name:
        return 0, 0, _rank(groups.expt_dp)
    return 0, 0 if shard is not None else _rank(groups.tp), _rank(groups.dp_cp)


def _rank(group: Any) -> int:
    return 0 if group is None else dist.get_rank(group)


def _sharded(key: str, tensor: Tensor, shard: Shard | None, copy: tuple[int, int, int]) -> Any:
    if shard is None:
        return _whole_axis(key, tensor, 0, Part(0, len(tensor)), len(tensor), copy)
    if len(shard.parts) == 1:
        return _whole_axis(key, tensor, shard.dim, shard.parts[0], shard.whole, copy)

    def build(key: str, tensor: Tensor, copy: Any, flattened_range: Any) -> list[ShardedTensor]:
        pieces = tensor.split([part.length for part in shard.parts], shard.dim)
        return [
            _whole_axis(key, piece, shard.dim, part, shard.whole, copy)
            for piece, part in zip(pieces, shard.parts, strict=True)
        ]

    def merge(pieces: list[Tensor]) -> Tensor:

        return torch.cat(pieces, shard.dim)

    return ShardedTensorFactory(key, tensor, build, merge, copy)


def _whole_axis(
    key: str, tensor: Tensor, dim: int, part: Part, size: int, copy: tuple[int, int, int]
) -> ShardedTensor:
    shape, offset = list(tensor.shape), [0] * tensor.dim()
    shape[dim], offset[dim] = size, part.start
    return ShardedTensor(
        key=key,
        data=tensor,
        dtype=tensor.dtype,
        local_shape=tuple(tensor.shape),
        global_shape=tuple(shape),
        global_offset=tuple(offset),
        axis_fragmentations=None,  # pieces of any length at any place
        replica_id=(copy[0], copy[1] + part.copy, copy[2]),
    )
