"""`torch.compile` over a whole model, forward and backward: one graph, and the bits of eager."""

import pytest
import torch
from torch import Tensor

from isomodels.batch import Batch
from tests.dense.models import bounds, load_ours, tokens
from tests.kernel.battery import assert_same_bits

LENGTHS = [1, 17, 64, 5, 70]
NAMES = ["qwen3-tied", "mimo"]  # qk-norm and a head that is the embedding; biases and neither


def results(forward, model, device: str) -> dict[str, Tensor]:
    """Logprobs of targets and the gradient of each parameter."""
    cu_seqlens = bounds(LENGTHS).to(device)
    ids, targets = (tokens(sum(LENGTHS), seed=seed).to(device) for seed in (1, 2))
    # What a step's batch is, the host reads once, outside the graph.
    logprobs = forward(ids, Batch.positions(cu_seqlens), Batch.packed(cu_seqlens), targets)
    weights = torch.linspace(-1, 1, len(logprobs), device=device)
    names, parameters = zip(*model.named_parameters(), strict=True)
    gradients = torch.autograd.grad((logprobs * weights).sum(), parameters, allow_unused=True)
    named = {n: g for n, g in zip(names, gradients, strict=True) if g is not None}
    return {"logprobs": logprobs.detach(), **named}


def check(folder, device: str, backend: str) -> None:
    model = load_ours(folder, device=torch.device(device))

    def forward(ids: Tensor, positions: Tensor, batch: Batch, targets: Tensor) -> Tensor:
        return model.token_logprobs(model(ids, positions, batch), targets)

    eager = results(forward, model, device)
    torch._dynamo.reset()
    compiled = results(torch.compile(forward, fullgraph=True, backend=backend), model, device)
    assert compiled.keys() == eager.keys()
    assert {name for name, _ in model.named_parameters()} - eager.keys() <= {"lm_head.weight"}
    for name, value in eager.items():
        if name.endswith(".bias") and backend == "inductor":
            # A sum of torch's own over the rows, and of no promised order.
            torch.testing.assert_close(compiled[name], value, rtol=2**-7, atol=1e-6)
        else:
            assert_same_bits(compiled[name], value, name)


@pytest.mark.parametrize("name", NAMES)
def test_one_graph_with_the_bits_of_eager(checkpoint, name):
    check(checkpoint(name, torch.bfloat16), "cpu", "aot_eager")


@pytest.mark.gpu
@pytest.mark.parametrize("name", NAMES)
def test_one_graph_with_the_bits_of_eager_on_a_gpu(checkpoint, name):
    check(checkpoint(name, torch.bfloat16), "cuda", "inductor")
