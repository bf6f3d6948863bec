"""What ranks exchange, over NCCL and in a CUDA graph.

One GPU will do: a group of one rank takes the same calls, and one that a capture does not allow, or
that waits for the device, is seen.
"""

from collections.abc import Callable, Iterator

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch._C._distributed_c10d import HashStore

from isomodels.kernels.moe_sort import moe_sort
from isomodels.layers import collectives
from isomodels.layers.expert_parallel import own_offsets, share_rows
from isomodels.layers.parallel import ExpertParallel, TensorParallel

ON_GPU = torch.cuda.is_available()
DEVICE = "cuda" if ON_GPU else "cpu"
EXPERTS, TOP_K = 8, 2


@pytest.fixture(scope="module")
def group() -> Iterator[dist.ProcessGroup]:
    backend = "nccl" if ON_GPU else "gloo"
    dist.init_process_group(backend, store=HashStore(), rank=0, world_size=1)
    yield dist.group.WORLD
    dist.destroy_process_group()


def twice(call: Callable[[Tensor], Tensor], x: Tensor) -> Iterator[tuple[Tensor, Tensor]]:
    """(result of a replay, of an eager call) for two inputs of one graph."""
    other = x.flip(0).clone()
    if not ON_GPU:
        yield from ((call(one), call(one)) for one in (x, other))
        return
    held = x.clone()
    call(held)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = call(held)
    for one in (x, other):
        held.copy_(one)
        graph.replay()
        yield captured.clone(), call(one)


# The same over gloo, without a graph, keeps the test itself working where there is no GPU.
pytestmark = pytest.mark.parametrize("rows", [3, 300])


def check(call: Callable[[Tensor], Tensor], x: Tensor) -> None:
    for replayed, eager in twice(call, x):
        assert replayed.dtype == eager.dtype
        assert torch.equal(replayed.view(torch.uint8), eager.view(torch.uint8))


def draw(rows: int, columns: int, dtype: torch.dtype) -> Tensor:
    generator = torch.Generator().manual_seed(rows)
    return torch.randn(rows, columns, generator=generator).to(DEVICE, dtype)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("small", [0, 1 << 30])
def test_sums_and_rows(group, monkeypatch, rows, small, dtype):
    monkeypatch.setattr(collectives, "SMALL_MESSAGE", small)
    parallel = TensorParallel(0, 1, group)
    x = draw(rows, 512, dtype)
    fold = collectives.in_rank_order
    check(lambda x: collectives.combine(x, parallel, fold, torch.bfloat16), x)
    owner = torch.zeros(rows, dtype=torch.int64, device=DEVICE)
    check(lambda x: collectives.select_rows(x, owner, parallel), x)


@pytest.mark.gpu
def test_experts_rows(group, rows):
    """The ids change from replay to replay, and with them who has how many rows."""
    parallel = ExpertParallel(0, 1, group, replicated=True)
    y = draw(rows * TOP_K, 256, torch.bfloat16)

    def call(ids: Tensor) -> Tensor:
        offsets, _, places = moe_sort(ids, EXPERTS)
        assert len(own_offsets(offsets, parallel)) == EXPERTS + 1
        return share_rows(y, offsets, parallel)[places.view(-1).long()]

    generator = torch.Generator().manual_seed(1)
    ids = torch.rand(rows, EXPERTS, generator=generator).topk(TOP_K, 1).indices.int()
    check(call, ids.to(DEVICE))
