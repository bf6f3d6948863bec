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

from isomodels.layers.parallel import Block, Shard, shards
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
    shape = tuple(tensor.shape)
    if shard is None:
        return _stored(key, Block((0,) * len(shape), tensor, 0), shape, copy)
    whole = shard.whole_shape(shape)
    if len(shard.parts) == 1:
        (block,) = shard.blocks(tensor)
        own = block._replace(tensor=tensor)  # the parameter itself, by which the optimizer finds it
        return _stored(key, own, whole, copy)

    def build(key: str, tensor: Tensor, copy: Any, flattened_range: Any) -> list[ShardedTensor]:
        return [_stored(key, block, whole, copy) for block in shard.blocks(tensor)]

    def merge(pieces: list[Tensor]) -> Tensor:
        return torch.cat(pieces, shard.dim)

    return ShardedTensorFactory(key, tensor, build, merge, copy)


def _stored(
    key: str, block: Block, whole: tuple[int, ...], copy: tuple[int, int, int]
) -> ShardedTensor:
    return ShardedTensor(
        key=key,
        data=block.tensor,
        dtype=block.tensor.dtype,
        local_shape=tuple(block.tensor.shape),
        global_shape=whole,
        global_offset=block.offset,
        axis_fragmentations=None,  # pieces of any length at any place
        replica_id=(copy[0], copy[1] + block.copy, copy[2]),
    )
