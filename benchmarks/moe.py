"""Rows of a mixture of experts: the whole of it forward, the products' backward, what is around.

Routing is skewed: each expert has a popularity drawn from a normal distribution on the scale of the
router's logits, whose noise is Gumbel's. The note says how large the largest expert is.
"""

import statistics
from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

from benchmarks.harness import Timing, against, against_bandwidth, copies, row
from benchmarks.linear import BF16
from benchmarks.vllm_experts import TunedExperts
from isomodels.kernels.grouped_linear import grouped_linear, grouped_linear_backward
from isomodels.kernels.moe_combine import moe_combine
from isomodels.kernels.moe_combine_triton import spread
from isomodels.kernels.moe_sort import moe_sort
from isomodels.kernels.router import route
from isomodels.kernels.router_logits import router_logits
from isomodels.kernels.swiglu import swiglu

TEST = "tests/kernel/test_grouped_linear_triton.py"
ROUTING_TEST = "tests/kernel/test_routing_triton.py"
GROUPED_MM = "torch._grouped_mm"


@dataclass(frozen=True)
class Shape:
    """A model's experts: E, k, H, and I of one of them."""

    name: str
    experts: int
    top_k: int
    hidden: int
    width: int

    def ids(self, tokens: int) -> Tensor:
        """[T, k] int32: skewed routing, the same in each run."""
        generator = torch.Generator("cuda").manual_seed(0)
        uniform = torch.rand(tokens, self.experts, generator=generator, device="cuda")
        popularity = torch.randn(self.experts, generator=generator, device="cuda")
        noise = -torch.log(-torch.log(uniform))
        return (popularity + noise).topk(self.top_k, 1).indices.int()

    def weights(self) -> tuple[Tensor, Tensor]:
        """(gate_up [E, 2I, H], down [E, H, I])."""
        up = torch.randn(self.experts, 2 * self.width, self.hidden, **BF16) / self.hidden**0.5
        return up, torch.randn(self.experts, self.hidden, self.width, **BF16) / self.width**0.5


SHAPES = (
    Shape("GLM-4.7-Flash", 64, 4, 2048, 1536),
    Shape("Qwen3.5-35B-A3B", 256, 8, 2048, 512),
)


def experts(x: Tensor, up: Tensor, down: Tensor, weights: Tensor, ids: Tensor) -> Tensor:
    """What `layers.moe.Experts` runs."""
    offsets, order, places = moe_sort(ids, len(up))
    hidden = swiglu(grouped_linear(x, up, offsets, order, places))
    return moe_combine(grouped_linear(hidden, down, offsets), weights, places)


FLOORS = {8192: 1.0, 256: 0.95, 16: 0.95}  # by tokens


@row("experts", TEST)
def forward() -> Iterator[Timing]:
    """Sort, both products with the activation between them, combination."""
    theirs = TunedExperts()
    for shape in SHAPES:
        up, down = shape.weights()
        inputs = [
            (
                torch.randn(tokens, shape.hidden, **BF16),
                up,
                down,
                torch.rand(tokens, shape.top_k, device="cuda"),
                shape.ids(tokens),
            )
            for tokens in FLOORS
        ]
        theirs.compile(inputs)
        for arguments, (tokens, floor) in zip(inputs, FLOORS.items(), strict=True):
            config, baseline = theirs.fastest(arguments)
            largest = int(torch.bincount(arguments[-1].flatten().long()).max())
            share = largest / (tokens * shape.top_k / shape.experts)
            yield against(
                "experts",
                f"{shape.name}, {tokens} tokens, the largest expert {share:.1f} of the mean",
                f"vLLM's fused MoE (Triton), configuration {config}",
                [partial(experts, *arguments)],
                [baseline],
                floor,
            )
        del up, down, inputs


@row("experts backward", TEST)
def backward() -> Iterator[Timing]:
    """Both gradients of both products; neither side's rows are gathered."""
    timings = []
    for shape in SHAPES:
        tokens = 8192
        offsets, order, _ = moe_sort(shape.ids(tokens), shape.experts)
        ends = offsets[1:].contiguous()
        for name, weight in zip(("gate-up", "down"), shape.weights(), strict=True):
            n, k = weight.shape[1:]
            x, grad = torch.randn(len(order), k, **BF16), torch.randn(len(order), n, **BF16)
            ours = partial(grouped_linear_backward, grad, x, weight, offsets, None, None)
            theirs = partial(torch._grouped_mm, offs=ends)
            for what, one, other in (
                ("dgrad", partial(ours, True, False), partial(theirs, grad, weight)),
                ("wgrad", partial(ours, False, True), partial(theirs, grad.t(), x)),
            ):
                label = f"{shape.name} {name} {what}, {tokens} tokens"
                timings.append(against("experts backward", label, GROUPED_MM, [one], [other], 0.0))
    yield from timings
    ratio = statistics.geometric_mean(timing.ratio for timing in timings)
    yield Timing("experts backward", "geometric mean", GROUPED_MM, 1.0, ratio, 0.90, mean=True)


@row("routing", ROUTING_TEST)
def routing() -> Iterator[Timing]:
    """Router, sort, rows to their places, and combination.

    Bytes: the tokens twice and the router's weight in, a row a slot out and in, the sums out.
    """
    tokens = 8192
    for shape in SHAPES:
        slots = tokens * shape.top_k
        moved = 2 * (3 * tokens + shape.experts + 2 * slots) * shape.hidden

        def call(x: Tensor, gate: Tensor, y: Tensor, shape: Shape = shape) -> Tensor:
            weights, ids = route(router_logits(x, gate), shape.top_k, "softmax", True)
            _, _, places = moe_sort(ids, shape.experts)
            spread(x, places)
            return moe_combine(y, weights, places)

        calls = []
        for _ in range(copies(moved)):
            x, gate, y = (
                torch.randn(rows, shape.hidden, **BF16) for rows in (tokens, shape.experts, slots)
            )
            calls.append(partial(call, x, gate, y))
        yield against_bandwidth("routing", f"{shape.name}, {tokens} tokens", calls, moved, 0.60)
