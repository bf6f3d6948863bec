"""Error against transformers' own model in fp64, beside the error of its fp32 and bf16 runs."""

import pytest
import torch

from isomodels.layers.routes import record_routes, routers
from tests.dense.models import run_packed, tokens
from tests.kernel.battery import relative_rms
from tests.moe.qwen3_moe.models import KINDS, load_ours, load_theirs, their_routes

LENGTH = 400
dtypes = pytest.mark.parametrize(("dtype", "factor"), [(torch.float32, 1.2), (torch.bfloat16, 1.1)])


def errors(ours, theirs, exact):
    return relative_rms(ours, exact), relative_rms(theirs, exact)


def same_route(ids, others):
    """[T, layers, k] twice -> [T], whether each layer's experts are the same set."""
    return (ids.long().sort(2).values == others.long().sort(2).values).all(2).all(1)


@torch.no_grad()
@dtypes
@pytest.mark.parametrize("name", KINDS)
def test_logits_and_logprobs(checkpoint, ours, name, dtype, factor):
    """Of the tokens whose experts are those of fp64 on both sides; and how many others there are.

    A token that takes another way is off by the size of its logits, whoever is nearer otherwise.
    """
    folder, ids, model = checkpoint(name, dtype), tokens(LENGTH), ours(name, dtype)
    with record_routes(model) as recorded:
        hidden = run_packed(model, ids)
    right, _, exact = their_routes(load_theirs(folder, torch.float64), ids)
    theirs, _, low = their_routes(load_theirs(folder, dtype), ids)
    mine_on, theirs_on = same_route(recorded.take(), exact), same_route(low, exact)
    mine_off, theirs_off = ((~on).float().mean() for on in (mine_on, theirs_on))
    assert mine_off <= 1.5 * theirs_off + 0.005, f"{mine_off:.2%} of ways against {theirs_off:.2%}"
    rows = mine_on & theirs_on
    assert rows.float().mean() > 0.9
    mine, other = errors(model.logits(hidden)[rows], theirs[rows], right[rows])
    assert mine <= factor * other, f"logits: {mine:.3g} against {other:.3g}"
    mine, other = errors(
        model.logprobs(hidden)[rows],
        theirs[rows].log_softmax(-1, dtype=torch.float32),
        right[rows].log_softmax(-1),
    )
    assert mine <= factor * other, f"logprobs: {mine:.3g} against {other:.3g}"


@torch.no_grad()
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("name", KINDS)
def test_row_32_the_experts_of_fp64_outside_ties(checkpoint, ours, name, dtype):
    """A route may differ only where fp64 has two experts as near as our logits are wrong."""
    folder, ids, model = checkpoint(name, dtype), tokens(LENGTH), ours(name, dtype)
    gates = []
    for router in routers(model):
        router.attach_loss = lambda logits, ids, weights: gates.append(logits) or weights
    try:
        with record_routes(model) as recorded:
            run_packed(model, ids)
    finally:
        for router in routers(model):
            router.attach_loss = None
    mine = recorded.take()  # [T, layers, k]
    _, exact, chosen = their_routes(load_theirs(folder, torch.float64), ids)
    top_k = mine.shape[2]
    ranked = exact.sort(2, descending=True).values
    margin = ranked[..., top_k - 1] - ranked[..., top_k]
    error = (torch.stack(gates, 1) - exact).abs().amax(2)
    different = (mine.long().sort(2).values != chosen.sort(2).values).any(2)
    assert (margin[different] <= 2 * error[different]).all()
    assert different.float().mean() < (0.001 if dtype == torch.float32 else 0.1)
    # The other way round: what was not different was no accident of wide margins.
    assert (margin < 0.1).sum() > 10


def gradients_of_ours(model, ids):
    model.zero_grad()
    hidden = run_packed(model, ids)
    model.token_logprobs(hidden[:-1], ids[1:]).mean().neg().backward()
    config, grads = model.config, {}
    heads, kv_heads = config.num_attention_heads, config.num_key_value_heads
    for name, value in model.named_parameters():
        grad = value.grad
        if name.endswith("qkv_proj.weight"):
            sizes = [n * config.head_dim for n in (heads, kv_heads, kv_heads)]
            grads |= {
                name.replace("qkv", p): g for p, g in zip("qkv", grad.split(sizes), strict=True)
            }
        elif name.endswith("mlp.gate_up_proj.weight"):
            parts = zip(("gate", "up"), grad.chunk(2), strict=True)
            grads |= {name.replace("gate_up", p): g for p, g in parts}
        else:
            grads[name] = grad
    return grads


def gradients_of_theirs(model, ids):
    model.zero_grad()
    logits = model(ids[None], use_cache=False).logits[0]
    low = torch.promote_types(logits.dtype, torch.float32)
    chosen = logits.log_softmax(-1, dtype=low)[:-1].gather(1, ids[1:, None])
    chosen.mean().neg().backward()
    return {n: p.grad for n, p in model.named_parameters()}


@dtypes
@pytest.mark.parametrize("name", KINDS)
def test_gradients(checkpoint, name, dtype, factor):
    folder, ids = checkpoint(name, dtype), tokens(200)
    mine = gradients_of_ours(load_ours(folder), ids)
    right, theirs = (
        gradients_of_theirs(load_theirs(folder, d), ids) for d in (torch.float64, dtype)
    )
    assert set(mine) == set(right)
    assert all(mine[n].dtype == dtype for n in mine)
    worst = {n: errors(mine[n], theirs[n], right[n]) for n in right}
    name, (one, _) = max(worst.items(), key=lambda item: item[1][0])
    limit = factor * max(other for _, other in worst.values())
    assert one <= limit, f"worst parameter {name}: {one:.3g} above {limit:.3g}"
    flat = [
        torch.cat([grads[n].flatten().double() for n in sorted(right)])
        for grads in (mine, theirs, right)
    ]
    one, other = errors(*flat)
    assert one <= factor * other, f"all parameters: {one:.3g} against {other:.3g}"


@torch.no_grad()
def test_the_comparison_can_fail(checkpoint):
    # weights that are not normalized where the config says so are far outside
    folder, ids = checkpoint("qwen3-moe"), tokens(100)
    model = load_ours(folder)
    right = their_routes(load_theirs(folder, torch.float64), ids)[0]
    theirs = their_routes(load_theirs(folder, torch.float32), ids)[0]
    model.config.__dict__["norm_topk_prob"] = False
    for router in routers(model):
        router.routing = model.config.routing
    mine, other = errors(model.logits(run_packed(model, ids)), theirs, right)
    assert mine > 100 * other
