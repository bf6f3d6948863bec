"""Which part of a model this process holds: the layout, stated by the host at construction.

Nothing here can move a bit: a rank holds whole columns of a product, whole leaves of K, whole
leaves of the vocabulary, whole heads, whole experts and whole layers.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from isomodels.errors import UnsupportedError
from isomodels.kernels.logprob import VOCAB_LEAVES
from isomodels.kernels.row_linear import LEAVES
from isomodels.kernels.vocab_parallel import VocabShard


@dataclass(frozen=True)
class TensorParallel:
    """Ranks that share every layer.

    Attributes:
        rank, size: of `group`; 1 is no parallelism.
        group: torch.distributed's group of the host.
        sequence: whether the residual stream is cut into slices of tokens, one a rank
            (Megatron's sequence parallelism); the number of tokens must then be a multiple of
            `size`.
    """

    rank: int = 0
    size: int = 1
    group: Any = None
    sequence: bool = False


@dataclass(frozen=True)
class ExpertParallel:
    """Ranks that share the experts of a layer, each whole on one of them.

    Attributes:
        rank, size: of `group`.
        group: torch.distributed's group of the host.
        replicated: whether the ranks hold the same tokens (an engine's) or each its own.
    """

    rank: int = 0
    size: int = 1
    group: Any = None
    replicated: bool = False


@dataclass(frozen=True)
class Stage:
    """A pipeline stage: layers `first` to `end` (all, if None), and what stands before and after.

    Attributes:
        embeds: whether the embedding belongs to it.
        heads: whether the final norm and the head do.
    """

    first: int = 0
    end: int | None = None
    embeds: bool = True
    heads: bool = True

    def layers(self, count: int) -> range:
        """Indices of its layers in a model of `count`."""
        return range(self.first, count if self.end is None else self.end)


@dataclass(frozen=True)
class Layout:
    """What one process holds; the default is everything."""

    tensor: TensorParallel = field(default_factory=TensorParallel)
    experts: ExpertParallel = field(default_factory=ExpertParallel)
    stage: Stage = field(default_factory=Stage)

    @property
    def whole(self) -> bool:
        """Whether the process holds all parameters."""
        return self.tensor.size == self.experts.size == 1 and self.stage == Stage()


ALONE = Layout()


@dataclass(frozen=True)
class Part:
    """A contiguous part of a tensor's axis, cut into equal pieces, of which a rank holds one.

    Attributes:
        offset, size: of the part in the whole axis.
        index, pieces: which piece of how many; the last ones are shorter where `width` is given.
        copies, copy: how many ranks hold this piece, and which of them this rank is.
        width: length of a piece, where they are not equal.
    """

    offset: int
    size: int
    index: int = 0
    pieces: int = 1
    copies: int = 1
    copy: int = 0
    width: int | None = None

    @property
    def start(self) -> int:
        """Of the piece in the whole axis."""
        return self.offset + min(self.index * self._width, self.size)

    @property
    def length(self) -> int:
        """Of the piece."""
        return min(self._width, self.size - min(self.index * self._width, self.size))

    @property
    def _width(self) -> int:
        return self.width or self.size // self.pieces


class Block(NamedTuple):
    """A contiguous block of a whole tensor.

    Attributes:
        offset: where it begins, one index an axis.
        tensor: its values: a view of the rank's tensor.
        copy: which of the ranks that hold the block this one is.
    """

    offset: tuple[int, ...]
    tensor: Tensor
    copy: int

    def of(self, whole: Tensor) -> Tensor:
        """The block's place in the whole tensor."""
        sizes = self.tensor.shape
        return whole[tuple(slice(o, o + n) for o, n in zip(self.offset, sizes, strict=True))]


@dataclass(frozen=True)
class Shard:
    """What a rank holds of a tensor: a piece of each part of axis `dim`, one after another.

    Attributes:
        dim: the axis.
        parts: which pieces.
        across: what the rank holds of another axis, where that is cut too.
    """

    dim: int
    parts: tuple[Part, ...]
    across: "Shard | None" = None

    @property
    def length(self) -> int:
        """Size of axis `dim` on this rank."""
        return sum(part.length for part in self.parts)

    def whole_shape(self, own: Sequence[int]) -> tuple[int, ...]:
        """Shape of the rank's tensor -> that of the whole one."""
        shape = list(own)
        shape[self.dim] = sum(part.size for part in self.parts)
        return tuple(shape) if self.across is None else self.across.whole_shape(shape)

    def take(self, tensor: Tensor) -> Tensor:
        """The whole tensor -> this rank's."""
        pieces = [tensor.narrow(self.dim, part.start, part.length) for part in self.parts]
        taken = pieces[0] if len(pieces) == 1 else torch.cat(pieces, self.dim)
        return taken if self.across is None else self.across.take(taken)

    def blocks(self, own: Tensor) -> list[Block]:
        """This rank's tensor in blocks of the whole one, in the order of its parts."""
        first, found = 0, []
        for part in self.parts:
            piece = own.narrow(self.dim, first, part.length)
            first += part.length
            inner = [Block((0,) * own.dim(), piece, 0)]
            for offset, tensor, copy in self.across.blocks(piece) if self.across else inner:
                start = (*offset[: self.dim], part.start, *offset[self.dim + 1 :])
                found.append(Block(start, tensor, copy or part.copy))
        return found

    def put(self, whole: Tensor, own: Tensor) -> None:
        """Write this rank's tensor to its places in the whole one."""
        for block in self.blocks(own):
            block.of(whole).copy_(block.tensor)


def split(sizes: Sequence[int], rank: int, ranks: int, dim: int = 0) -> Shard:
    """Every part of an axis cut evenly among the ranks."""
    return Shard(dim, tuple(_parts(sizes, [(rank, ranks, 1, 0)] * len(sizes))))


def split_shared(sizes: Sequence[int], cut: Sequence[bool], rank: int, ranks: int) -> Shard:
    """Rows of which some parts are cut evenly, and the others are whole on every rank."""
    cuts = [(rank, ranks, 1, 0) if one else (0, 1, ranks, rank) for one in cut]
    return Shard(0, tuple(_parts(sizes, cuts)))


def split_kv(queries: int, kv_heads: int, head_dim: int, rank: int, ranks: int) -> Shard:
    """Rows [q | k | v]: ranks beyond the number of key heads share them.

    Args:
        queries: rows of all queries (and of what lies with them).
        kv_heads, head_dim: of keys, and of values.
        rank, ranks: of tensor parallelism.
    """
    copies = max(1, ranks // kv_heads)
    own = (rank // copies, ranks // copies, copies, rank % copies)
    sizes = (queries, kv_heads * head_dim, kv_heads * head_dim)
    return Shard(0, tuple(_parts(sizes, [(rank, ranks, 1, 0), own, own])))


def _parts(sizes: Sequence[int], cuts: Sequence[tuple[int, int, int, int]]) -> Iterator[Part]:
    offset = 0
    for size, (index, pieces, copies, copy) in zip(sizes, cuts, strict=True):
        yield Part(offset, size, index, pieces, copies, copy)
        offset += size


def split_leaves(in_features: int, out_features: int, rank: int, ranks: int) -> Shard:
    """A weight [N, K] whose K is summed in leaves: whole leaves of K, or a leaf's share of N."""
    sharing = ranks_of_leaf(ranks)
    across = split([out_features], rank % sharing, sharing) if sharing > 1 else None
    cut = _parts([in_features], [(rank // sharing, ranks // sharing, 1, 0)])
    return Shard(1, tuple(cut), across)


def ranks_of_leaf(ranks: int) -> int:
    """How many neighbours share a leaf of K, each with some columns of the product: 1 while there
    are as many leaves as ranks."""
    return max(1, ranks // LEAVES)


def split_vocab(vocab: VocabShard) -> Shard:
    """Whole leaves of the vocabulary; the last ranks hold fewer rows, or none."""
    part = Part(0, vocab.vocab_size, vocab.rank, vocab.ranks, width=vocab.width)
    return Shard(0, (part,))


def shards(core: nn.Module) -> dict[str, Shard]:
    """Name of each parameter that this process holds a part of -> which part."""
    return {
        f"{prefix}.{name}" if prefix else name: shard
        for prefix, module in core.named_modules()
        for name, shard in getattr(module, "shards", {}).items()
    }


class LayerStack(nn.ModuleList):
    """Layers under their index in the whole model, of which this may hold a stage only."""

    def __init__(self, modules: Sequence[nn.Module], first: int = 0):
        super().__init__()
        for index, module in enumerate(modules):
            self.add_module(str(first + index), module)

    def __getitem__(self, index: Any) -> Any:
        return list(self._modules.values())[index]


def check_layout(config: Any, layout: Layout) -> None:
    """Refuse a degree that does not divide the model, naming the degrees that do.

    Args:
        config: the architecture's config.
        layout: the host's.

    Raises:
        UnsupportedError: one sentence.
    """
    _check_tensor(config, layout.tensor.size)
    ranks = layout.experts.size
    experts = config.routing.num_experts if config.routing is not None else 1
    if ranks > 1 and experts == 1:
        raise UnsupportedError(f"expert parallelism of {ranks}: the model has no experts, use 1")
    if experts % ranks:
        raise UnsupportedError(
            f"expert parallelism of {ranks} does not divide the {experts} experts: "
            f"use {_either(expert_degrees(config))}"
        )


def named_tensors(core: nn.Module) -> dict[str, Tensor]:
    """Every parameter and buffer of a module by its name: what a checkpoint or a sync must hold."""
    return {**dict(core.named_parameters()), **dict(core.named_buffers())}


def tensor_degrees(config: Any) -> list[int]:
    """The degrees of tensor parallelism that divide a model."""
    return [n for n in range(1, VOCAB_LEAVES + 1) if _obstacle(config, n) is None]


def expert_degrees(config: Any) -> list[int]:
    """The degrees of expert parallelism that divide a model's experts."""
    experts = config.routing.num_experts if config.routing is not None else 1
    return [n for n in range(1, experts + 1) if experts % n == 0]


def _check_tensor(config: Any, ranks: int) -> None:
    obstacle = _obstacle(config, ranks)
    if obstacle is not None:
        fitting = _either(tensor_degrees(config))
        raise UnsupportedError(
            f"tensor parallelism of {ranks} does not divide {obstacle}: use {fitting}"
        )


def _obstacle(config: Any, ranks: int) -> str | None:
    """What tensor parallelism of this degree does not divide, or None."""
    heads, kv_heads = config.num_attention_heads, config.num_key_value_heads
    if ranks < 1 or (LEAVES % ranks and ranks % LEAVES):
        return f"the {LEAVES} leaves in which row-parallel products are summed"
    if config.hidden_size % ranks_of_leaf(ranks):
        return f"the hidden size of {config.hidden_size}"
    for name in _WIDTHS:  # in leaves they are cut in any case
        width = getattr(config, name, None)
        if ranks > LEAVES and width is not None and width % ranks:
            return f"the {name} of {width}"
    if VOCAB_LEAVES % ranks:
        return f"the {VOCAB_LEAVES} leaves in which the vocabulary is summed"
    if heads % ranks:
        return f"the {heads} attention heads"
    if kv_heads % ranks and ranks % kv_heads:
        return f"the {kv_heads} key-value heads"
    linear_heads = getattr(config, "linear_num_key_heads", ranks)
    if linear_heads % ranks:
        return f"the {linear_heads} key heads of the recurrent layers"
    if VocabShard(config.vocab_size, ranks - 1, ranks).count == 0:
        return f"the leaves of a vocabulary of {config.vocab_size}"
    return None


_WIDTHS = ("intermediate_size", "moe_intermediate_size", "shared_expert_intermediate_size")


def _either(degrees: Sequence[int]) -> str:
    *others, last = map(str, degrees)
    return f"{', '.join(others)} or {last}" if others else last
