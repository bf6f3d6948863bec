"""The norm of the gradients counts every element once, however many ranks hold it.

Megatron decides by whole parameters: one that is cut counts on each rank of tensor parallelism,
another on the first alone. But of a fused weight some rows may lie on several ranks: key heads that
ranks share, latents that all need, beside rows that are cut.

Checked on megatron-core 0.16.1, 0.17.1, 0.18.2 and 0.19.2.
"""

from collections.abc import Iterator, Sequence
from itertools import chain, pairwise
from typing import Any

from torch import Tensor

from isomodels.errors import HostError
from isomodels.layers.parallel import Shard, shards

Ranges = list[tuple[int, int]]  # of a parameter's elements, flat
# The optimizer's method that picks the gradients of the norm: from 0.19 on, and before.
_METHODS = ("get_grads_for_grad_norm", "get_main_grads_for_grad_norm")


def count_rows_once(optimizer: Any, models: Sequence[Any]) -> None:
    """Changes the norm of one optimizer object; call it once, after `get_megatron_optimizer`.

    Args:
        optimizer: what `get_megatron_optimizer` returned (chained ones included).
        models: the `IsoLanguageModel`s of this rank, without their wrappers.

    Raises:
        HostError: for an optimizer of a version that was not checked.
    """
    repeated: dict[Tensor, Ranges] = {}
    for model in models:
        parts = shards(model.core)
        for name, parameter in model.core.named_parameters():
            if name in parts and (ranges := _repeated(parts[name], parameter)):
                repeated[parameter] = ranges
    if repeated:
        for one in getattr(optimizer, "chained_optimizers", [optimizer]):
            _count_once(one, repeated)


def _repeated(shard: Shard, parameter: Tensor) -> Ranges:
    """The rows of a parameter that an earlier rank holds too."""
    ranges, first = [], 0
    for part in shard.parts:
        size = part.length * (parameter.numel() // shard.length if shard.length else 0)
        if part.copy:
            ranges.append((first, first + size))
        first += size
    return ranges


def _count_once(optimizer: Any, repeated: dict[Tensor, Ranges]) -> None:
    method = next((name for name in _METHODS if hasattr(optimizer, name)), None)
    if method is None:
        raise HostError(
            f"this megatron-core's {type(optimizer).__name__} has none of {', '.join(_METHODS)}, "
            "where isomodels counts rows that ranks share: install a version that was checked"
        )
    counted = getattr(optimizer, method)

    def counted_once(*group: Any) -> list[Tensor]:
        left_out = {
            id(main.grad): (first, repeated[parameter])
            for parameter, main, first in _parameters(optimizer)
            if parameter in repeated and main is not None and main.grad is not None
        }
        found: list[Tensor] = []
        for grad in counted(*group):
            if id(grad) in left_out:
                found += _others(grad.view(-1), *left_out[id(grad)])
            else:
                found.append(grad)
        return found

    setattr(optimizer, method, counted_once)


def _parameters(optimizer: Any) -> Iterator[tuple[Tensor, Tensor | None, int]]:
    """(the model's parameter, the optimizer's, its first element in the model's)."""
    from megatron.core.optimizer.distrib_optimizer import DistributedOptimizer

    if isinstance(optimizer, DistributedOptimizer):
        models = chain(optimizer.model_float16_groups, optimizer.model_fp32_groups)
        mains = chain(optimizer.shard_fp32_from_float16_groups, optimizer.shard_fp32_groups)
        for one, other in zip(models, mains, strict=True):
            for parameter, main in zip(one, other, strict=True):
                # which elements this data parallel rank updates
                owned = optimizer._get_model_param_range_map(parameter)["param"]
                yield parameter, main, owned.start
        return
    for main in optimizer.get_parameters():
        yield main, main, 0
    halves = zip(
        chain.from_iterable(getattr(optimizer, "float16_groups", [])),
        chain.from_iterable(getattr(optimizer, "fp32_from_float16_groups", [])),
        strict=True,
    )
    for parameter, main in halves:
        yield parameter, main, 0


def _others(grad: Tensor, first: int, ranges: Ranges) -> list[Tensor]:
    """What lies outside of the ranges, of a flat gradient that begins at element `first`."""
    clipped = [tuple(min(max(i - first, 0), len(grad)) for i in bounds) for bounds in ranges]
    bounds = [0, *chain.from_iterable(clipped), len(grad)]
    kept = list(pairwise(bounds))[::2]
    return [grad[start:end] for start, end in kept if start < end]
