"""The bricks of every family with experts: hazards, shared experts, the load-balancing loss."""

from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from isomodels.config import Routing
from isomodels.layers.load_balancing import load_balancing_loss
from isomodels.layers.moe import MoE
from tests.kernel.battery import DTYPES, assert_same_bits, hard, relative_rms

HIDDEN, WIDTH, EXPERTS, TOKENS = 64, 48, 8, 37
SOFTMAX = Routing(EXPERTS, 3, "softmax", normalize=True)
SIGMOID = Routing(
    EXPERTS, 3, "sigmoid", True, scale=2.5, correction_bias=True, n_group=4, topk_group=2
)
KINDS = {
    "plain": (SOFTMAX, {}),
    "raw": (Routing(EXPERTS, 2, "softmax", normalize=False), {}),
    "shared": (SIGMOID, {"shared_size": 96}),
    "gated": (SOFTMAX, {"shared_size": 32, "gated": True}),
}
kinds = pytest.mark.parametrize("kind", KINDS)
dtypes = pytest.mark.parametrize("dtype", DTYPES)


def build(kind, dtype=torch.float32, hidden=HIDDEN, width=WIDTH) -> MoE:
    routing, shared = KINDS[kind]
    layer = MoE(hidden, width, routing, 1, dtype=dtype, **shared)
    for i, (name, tensor) in enumerate(layer.state_dict().items()):
        spread = 1.0 if tensor.dim() == 1 else tensor.shape[-1] ** -0.5
        if name == "gate.weight":
            spread *= 3  # so that the experts of bf16 are mostly those of fp64
        tensor.copy_(spread * hard(*tensor.shape, kind="normal", seed=i, dtype=torch.float32))
    return layer


def draw(dtype=torch.float32, tokens=TOKENS, hidden=HIDDEN, seed=9) -> Tensor:
    return hard(tokens, hidden, kind="normal", seed=seed, dtype=dtype)


def exact(layer: MoE, x: Tensor, ids: Tensor) -> Tensor:
    """The layer in fp64 from its definition, with given experts."""
    state = {name: t.double() for name, t in layer.state_dict().items()}
    x, ids, routing = x.double(), ids.long(), layer.gate.routing
    logits = x @ state["gate.weight"].t()
    scores = logits.softmax(1) if routing.scoring == "softmax" else logits.sigmoid()
    weights = scores.gather(1, ids)
    if routing.normalize:
        weights = weights / weights.sum(1, keepdim=True)

    def swiglu(x, gate_up, down):
        gate, up = (x @ gate_up.t()).chunk(2, -1)
        return (F.silu(gate) * up) @ down.t()

    out = torch.zeros_like(x)
    for t, chosen in enumerate(ids.tolist()):
        for slot, expert in enumerate(chosen):
            both = state["experts.gate_up_proj"][expert], state["experts.down_proj"][expert]
            out[t] += routing.scale * weights[t, slot] * swiglu(x[t], *both)
    if layer.shared_experts is not None:
        both = (state[f"shared_experts.{n}_proj.weight"] for n in ("gate_up", "down"))
        shared = swiglu(x, *both)
        if layer.shared_expert_gate is not None:
            shared = (x @ state["shared_expert_gate.weight"].t()).sigmoid() * shared
        out += shared
    return out


@dtypes
@kinds
def test_accuracy(kind, dtype):
    layer, x = build(kind, dtype), draw(dtype)
    ids, _ = layer.gate(x)
    bound = 4 * torch.finfo(dtype).eps  # three roundings: gate_up, its activation, down
    assert relative_rms(layer(x), exact(layer, x, ids)) < max(bound, 2e-6)


@dtypes
@kinds
def test_row_42_tokens_stand_alone(kind, dtype):
    """With a shared expert and its gate, and without."""
    layer, x = build(kind, dtype), draw(dtype)
    together = layer(x)
    assert_same_bits(torch.cat([layer(row) for row in x.split(1)]), together, "alone")
    assert_same_bits(layer(x.flip(0)).flip(0), together, "reversed")
    assert layer(x[:0]).shape == (0, HIDDEN)
    parts = set(layer.state_dict())
    assert ("shared_expert_gate.weight" in parts) == (kind == "gated")
    if kind == "gated":
        layer.shared_expert_gate = None
        assert relative_rms(layer(x), together) > 0.01


@dtypes
@kinds
def test_nan_in_rows_of_padding_reaches_no_other_row(kind, dtype):
    layer, x = build(kind, dtype), draw(dtype)
    expected, padded = layer(x), x.clone()
    padding = torch.arange(TOKENS) % 5 == 2
    for filler in (torch.nan, torch.inf, 1e30):
        padded[padding] = filler
        out = layer(padded)
        assert_same_bits(out[~padding], expected[~padding], f"rows beside {filler}")
    padded[padding] = torch.nan
    assert layer(padded)[padding].isnan().all()


@kinds
def test_row_40_tied_scores_go_to_the_lowest_index(kind):
    layer, x = build(kind), draw()
    layer.gate.weight.data[:] = layer.gate.weight.data[0]
    if layer.gate.e_score_correction_bias is not None:
        layer.gate.e_score_correction_bias.zero_()
    ids, weights = layer.gate(x)
    assert ids.tolist() == [list(range(ids.shape[1]))] * TOKENS
    assert (weights == weights[:, :1]).all()
    assert_same_bits(torch.cat([layer(row) for row in x.split(1)]), layer(x))


def test_an_expert_with_no_token_and_all_tokens_on_one():
    layer, x = build("raw"), draw()
    layer.gate.weight.data.zero_()
    layer.gate.weight.data[[2, 6], 0] = torch.tensor([500.0, 300.0])
    x[:, 0] = 1.0
    x.requires_grad_()
    ids, weights = layer.gate(x)
    assert ids.tolist() == [[2, 6]] * TOKENS
    assert weights.tolist() == [[1.0, 0.0]] * TOKENS
    assert_same_bits(torch.cat([layer(row) for row in x.split(1)]), layer(x))
    layer(x).square().sum().backward()
    assert x.grad.isfinite().all()
    used = [e for e in range(EXPERTS) if layer.experts.down_proj.grad[e].any()]
    assert used == [2]


@pytest.mark.parametrize(("hidden", "width"), [(64, 32), (64, 64)])
def test_row_64_square_weights(hidden, width):
    """2 * I == H and I == H: nothing but the definition tells rows from columns."""
    layer, x = build("plain", hidden=hidden, width=width), draw(hidden=hidden)
    ids, _ = layer.gate(x)
    assert relative_rms(layer(x), exact(layer, x, ids)) < 2e-6


@dtypes
@kinds
def test_gradients(kind, dtype):
    layer, x = build(kind, dtype), draw(dtype).requires_grad_()
    ids, _ = layer.gate(x)
    seed = draw(dtype, seed=10)
    mine = torch.autograd.grad(layer(x), [x, *layer.parameters()], seed)
    state = {n: t.double().requires_grad_() for n, t in layer.named_parameters()}
    right = reference_gradients(layer, state, x, ids, seed)
    for (name, one), other in zip(zip(["x", *state], mine, strict=True), right, strict=True):
        assert one.dtype == dtype
        assert relative_rms(one, other) < 8 * torch.finfo(dtype).eps + 1e-5, name


def reference_gradients(layer, state, x, ids, seed):
    """fp64 autograd of `exact` in x and all parameters."""

    class Double:
        gate, shared_experts = layer.gate, layer.shared_experts
        shared_expert_gate = layer.shared_expert_gate

        @staticmethod
        def state_dict():
            return state

    x = x.detach().double().requires_grad_()
    out = exact(Double, x, ids)
    return torch.autograd.grad(out, [x, *state.values()], seed.double())


# The load-balancing loss


def test_the_loss_is_that_of_transformers():
    from transformers.models.qwen3_moe.modeling_qwen3_moe import load_balancing_loss_func

    logits = draw(tokens=200)[:, :EXPERTS]
    ids = logits.topk(3, 1).indices.int()
    theirs = load_balancing_loss_func((logits,), EXPERTS, 3)
    # transformers sums the shares of k slots to k
    assert load_balancing_loss(logits, ids, SOFTMAX).item() == pytest.approx(theirs.item() / 3)


@pytest.mark.parametrize("routing", [SOFTMAX, SIGMOID])
def test_the_loss_is_that_of_megatron(routing):
    utils = pytest.importorskip("megatron.core.transformer.moe.moe_utils")
    logits = draw(tokens=200)[:, :EXPERTS].requires_grad_()
    ids = logits.topk(3, 1).indices.int()
    scores = logits.softmax(1)
    if routing.scoring == "sigmoid":
        scores = logits.sigmoid() / logits.sigmoid().sum(1, keepdim=True)
    counts = torch.bincount(ids.flatten().long(), minlength=EXPERTS)
    theirs = utils.switch_load_balancing_loss_func(scores, counts, 200, 3, EXPERTS, 1.0)
    mine = load_balancing_loss(logits, ids, routing)
    assert mine.item() == pytest.approx(theirs.item())
    (one,), (other,) = (torch.autograd.grad(loss, logits) for loss in (mine, theirs))
    torch.testing.assert_close(one, other)


def test_the_loss_of_an_even_router_is_1_and_of_a_lazy_one_more():
    even = torch.zeros(EXPERTS, EXPERTS)
    ids = (torch.arange(EXPERTS)[:, None] + torch.arange(3)).remainder(EXPERTS).int()
    assert load_balancing_loss(even, ids, SOFTMAX).item() == 1.0
    lazy = torch.zeros(EXPERTS, EXPERTS)
    lazy[:, 0] = 10.0
    one = torch.zeros(EXPERTS, 1, dtype=torch.int32)
    assert load_balancing_loss(lazy, one, SOFTMAX).item() > 7.9


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"top_k": 9}, "9 of 4 eligible"),
        ({"n_group": 3}, "8 experts cannot lie in 3"),
        ({"topk_group": 1}, "3 of 2 eligible"),
    ],
)
def test_numbers_that_route_no_token_are_refused(changes, message):
    with pytest.raises(ValueError, match=message):
        MoE(HIDDEN, WIDTH, replace(SIGMOID, **changes), 0, dtype=torch.float32)
