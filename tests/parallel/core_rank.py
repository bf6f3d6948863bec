"""One rank that runs the module itself over gloo; see test_core.py."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from isomodels.batch import Batch
from isomodels.checkpoint import load_into, open_checkpoint
from isomodels.layers import collectives
from isomodels.layers.linear import Embedding
from isomodels.layers.parallel import ExpertParallel, Layout, TensorParallel, shards, split_leaves
from isomodels.registry import load_object

TREE = collectives.tree
SMALL_MESSAGE = collectives.SMALL_MESSAGE


class CoreRank:
    """Runs a checkpoint's module in any layout of at most as many ranks as there are."""

    def __init__(self) -> None:
        torch.set_num_threads(1)
        dist.init_process_group("gloo")
        self.rank, self.size = dist.get_rank(), dist.get_world_size()
        self.groups = {n: dist.new_group(list(range(n))) for n in range(1, self.size + 1)}

    def layout(self, ranks: int, sequence: bool, experts: int, replicated: bool) -> Layout:
        group = self.groups[ranks]
        tensor = TensorParallel(self.rank, ranks, group, sequence)
        expert = ExpertParallel(self.rank, ranks, group, replicated)
        if experts == 1:
            expert = replace(expert, rank=0, size=1, group=None)
        return Layout(tensor, expert)

    def outside(self, path: str) -> tuple[str, str]:
        """What an id, and a target, outside the vocabulary give on two ranks."""
        checkpoint = open_checkpoint(Path(path))
        core = load_object(checkpoint.spec.model)(
            checkpoint.config,
            dtype=checkpoint.dtype,
            layout=self.layout(2, False, 1, False),
        )
        load_into(core, path)
        ids, positions, batch = tokens([4], checkpoint.config.vocab_size)
        seen = []
        for wrong in (-1, checkpoint.config.vocab_size):
            outside = ids.clone()
            outside[2] = wrong
            with pytest.raises(IndexError) as error:
                core(outside, positions, batch)
            hidden = core(ids, positions, batch)
            with pytest.raises(IndexError) as error:
                core.token_logprobs(hidden, outside)
            seen.append(error.type.__name__)
        return tuple(seen)

    def negative_zeros(self, ranks: int, sequence: bool) -> bool | None:
        """Whether rows of -0 come out of a cut embedding as they are."""
        if self.rank >= ranks:
            return None
        layout = self.layout(ranks, sequence, 1, False)
        table = Embedding(1003, 8, dtype=torch.bfloat16, layout=layout).requires_grad_(False)
        table.weight.fill_(-0.0)
        return bool(table(tokens([12], 1003)[0]).signbit().all())

    def traffic(self, ranks: int, rows: int, columns: int) -> int | None:
        """Bytes that this rank receives in a product [rows, columns] x [columns, columns]."""
        if self.rank >= ranks:
            return None
        collectives.SMALL_MESSAGE = SMALL_MESSAGE
        parallel = TensorParallel(self.rank, ranks, self.groups[ranks])
        shard = split_leaves(columns, columns, self.rank, ranks)
        weight = shard.take(torch.ones(columns, columns, dtype=torch.bfloat16))
        x = torch.ones(rows, columns // ranks, dtype=torch.bfloat16)
        received, gather, exchange = [0], dist.all_gather_into_tensor, dist.all_to_all_single

        def counted_gather(out: Tensor, x: Tensor, group: Any) -> None:
            received[0] += out.nbytes - x.nbytes
            gather(out, x, group=group)

        def counted_exchange(
            out: Tensor, x: Tensor, come: Any = None, to: Any = None, *, group: Any
        ) -> None:
            own = len(x) // ranks if to is None else to[self.rank]  # of bytes
            received[0] += len(out) - own
            exchange(out, x, come, to, group=group)

        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(dist, "all_gather_into_tensor", counted_gather)
            patch.setattr(dist, "all_to_all_single", counted_exchange)
            collectives.row_parallel(x, weight, parallel)
        return received[0]

    def run(
        self,
        path: str,
        lengths: list[int],
        ranks: int = 1,
        *,
        sequence: bool = False,
        experts: int = 1,
        replicated: bool = False,
        small: int | None = None,
        gradients: bool = False,
        fault: bool = False,
    ) -> dict[str, Any] | None:
        """Bits of every result, as this rank sees them; gradients as whole tensors.

        `fault`: partial sums are added from the first rank to the last, not by the tree.
        """
        if self.rank >= ranks:
            return None
        collectives.tree = collectives.in_rank_order if fault else TREE
        collectives.SMALL_MESSAGE = SMALL_MESSAGE if small is None else small
        checkpoint = open_checkpoint(Path(path))
        layout = self.layout(ranks, sequence, experts, replicated)
        core = load_object(checkpoint.spec.model)(
            checkpoint.config, dtype=checkpoint.dtype, **({"layout": layout} if ranks > 1 else {})
        )
        load_into(core, path)
        ids, positions, batch = tokens(lengths, checkpoint.config.vocab_size)
        targets = ids.roll(-1)
        with torch.set_grad_enabled(gradients):
            hidden = core(ids, positions, batch)
            out: dict[str, Any] = {
                "hidden": hidden,
                "logits": core.logits(hidden),
                "logprobs": core.logprobs(hidden, 0.7),
                "token_logprobs": core.token_logprobs(hidden, targets, 0.7),
            }
            if gradients:
                # a weight for each token: none may be lost, none counted twice
                weights = torch.linspace(0.5, 1.5, len(ids))
                (core.token_logprobs(hidden, targets) * weights).sum().backward()
        dumped = {name: value.detach().clone() for name, value in out.items()}
        if gradients:
            dumped["gradients"] = whole_gradients(core, ranks, self.groups[ranks])  # type: ignore
        return dumped


def tokens(
    lengths: list[int], vocab_size: int, device: str = "cpu"
) -> tuple[Tensor, Tensor, Batch]:
    generator = torch.Generator().manual_seed(3)
    bounds = torch.tensor([0, *torch.tensor(lengths).cumsum(0).tolist()], dtype=torch.int32)
    ids = torch.randint(vocab_size, (sum(lengths),), generator=generator).to(device)
    bounds = bounds.to(device)
    return ids, Batch.positions(bounds), Batch.packed(bounds)


def whole_gradients(core: nn.Module, ranks: int, group: Any) -> dict[str, Tensor]:
    """Gradients put together from all ranks; what every rank has must be the same on all."""
    own = {name: p.grad for name, p in core.named_parameters() if p.grad is not None}
    if ranks == 1:
        return own
    gathered: list[Any] = [None] * ranks
    dist.all_gather_object(gathered, (own, shards(core)), group=group)
    whole = {}
    for name, grad in own.items():
        shard = gathered[0][1].get(name)
        if shard is None:
            norms = name.endswith(("input_layernorm.weight", "post_attention_layernorm.weight"))
            summed = (norms or name == "model.norm.weight") and core.layout.tensor.sequence
            # an expert that is whole on each rank sees its slice of the tokens
            if summed or ".experts." in name:  # Megatron adds them; see the host
                whole[name] = sum(one[name].float() for one, _ in gathered).to(grad.dtype)
                continue
            for other, _ in gathered:
                assert torch.equal(other[name], grad), f"{name} differs among the ranks"
            whole[name] = grad
            continue
        whole[name] = grad.new_zeros(shard.whole_shape(grad.shape))
        for other, parts in gathered:
            parts[name].put(whole[name], other[name])
    return whole
