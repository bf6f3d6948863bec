"""Error against transformers' own model in fp64, beside the error of its fp32 and bf16 runs.

The configs state 1e-6 for the norms of the latents, which transformers takes in any case.
"""

import json

import pytest
import torch

from isomodels.layers.routes import record_routes
from tests.dense.models import run_packed, tokens
from tests.kernel.battery import relative_rms
from tests.moe.mla.models import ARCHITECTURES, YARN, load_ours, load_theirs, make, their_routes

LENGTH = 300
dtypes = pytest.mark.parametrize(("dtype", "factor"), [(torch.float32, 1.2), (torch.bfloat16, 1.1)])
names = pytest.mark.parametrize("name", ARCHITECTURES)


def errors(ours, theirs, exact):
    return relative_rms(ours, exact), relative_rms(theirs, exact)


def same_route(ids, others):
    """[T, layers, k] twice -> [T, layers], whether the experts are the same set."""
    return (ids.long().sort(2).values == others.long().sort(2).values).all(2)


@torch.no_grad()
@dtypes
@names
def test_logits_and_logprobs(checkpoint, ours, name, dtype, factor):
    """Of the tokens whose experts are those of fp64 on both sides; and how many others there are.

    A token that takes another way is off by the size of its logits, whoever is nearer otherwise.
    """
    folder, ids, model = checkpoint(name, dtype), tokens(LENGTH), ours(name, dtype)
    with record_routes(model) as recorded:
        hidden = run_packed(model, ids)
    right, _, exact, _ = their_routes(load_theirs(folder, torch.float64), ids)
    theirs, _, low, _ = their_routes(load_theirs(folder, dtype), ids)
    mine_on, theirs_on = (same_route(x, exact).all(1) for x in (recorded.take(), low))
    mine_off, theirs_off = ((~on).float().mean() for on in (mine_on, theirs_on))
    assert mine_off <= 1.5 * theirs_off + 0.005, f"{mine_off:.2%} of ways against {theirs_off:.2%}"
    rows = mine_on & theirs_on
    assert rows.float().mean() > 0.8
    mine, other = errors(model.logits(hidden)[rows], theirs[rows], right[rows])
    assert mine <= factor * other, f"logits: {mine:.3g} against {other:.3g}"
    mine, other = errors(
        model.logprobs(hidden)[rows],
        theirs[rows].log_softmax(-1, dtype=torch.float32),
        right[rows].log_softmax(-1),
    )
    assert mine <= factor * other, f"logprobs: {mine:.3g} against {other:.3g}"


@torch.no_grad()
@names
def test_row_35_the_experts_of_fp64_outside_ties(checkpoint, ours, name):
    """Biases are below -1: a masked group whose scores were 0 would win every place."""
    folder, ids, model = checkpoint(name), tokens(LENGTH), ours(name)
    with record_routes(model) as recorded:
        run_packed(model, ids)
    mine, config = recorded.take(), model.config
    _, gates, chosen, biases = their_routes(load_theirs(folder, torch.float64), ids)
    different = ~same_route(mine, chosen)
    choice = gates.double().sigmoid() + biases
    groups = choice.unflatten(2, (config.n_group, -1))
    best = groups.topk(2, 3).values.sum(3).sort(2, descending=True)
    # how near fp64 is to another choice of groups, and of experts within the chosen groups
    near = torch.full(different.shape, torch.inf, dtype=torch.float64)
    if config.topk_group < config.n_group:
        edge = config.topk_group
        near = best.values[..., edge - 1] - best.values[..., edge]
    kept = torch.zeros_like(best.values, dtype=torch.bool)
    kept.scatter_(2, best.indices[..., : config.topk_group], True)
    inside = groups.masked_fill(~kept[..., None], -torch.inf).flatten(2)
    ranked, k = inside.sort(2, descending=True).values, config.num_experts_per_tok
    near = torch.minimum(near, ranked[..., k - 1] - ranked[..., k])
    assert (near[different] < 1e-5).all()
    assert different.float().mean() < 0.002
    assert (near < 0.01).sum() > 10  # what was not different was no accident of wide margins
    of_groups = mine.long() // (config.num_experts // config.n_group)
    for slot in of_groups.unbind(2):
        assert kept.gather(2, slot[..., None])[~different].all()


def gradients_of_ours(model, ids):
    model.zero_grad()
    hidden = run_packed(model, ids)
    model.token_logprobs(hidden[:-1], ids[1:]).mean().neg().backward()
    config, grads = model.config, {}
    for name, value in model.named_parameters():
        grad = value.grad
        if "qkv_a_proj" in name:
            rank = config.q_lora_rank
            first = "q_proj" if rank is None else "q_a_proj"
            sizes = (len(grad) - config.latent_width, config.latent_width)
            for part, one in zip((first, "kv_a_proj_with_mqa"), grad.split(sizes), strict=True):
                grads[name.replace("qkv_a_proj", part)] = one
        elif name.endswith("gate_up_proj.weight"):
            for part, one in zip(("gate_proj", "up_proj"), grad.chunk(2), strict=True):
                grads[name.replace("gate_up_proj", part)] = one
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


@names
def test_gradients(checkpoint, name):
    folder, ids = checkpoint(name), tokens(100)
    mine = gradients_of_ours(load_ours(folder), ids)
    right, theirs = (
        gradients_of_theirs(load_theirs(folder, d), ids) for d in (torch.float64, torch.float32)
    )
    assert set(mine) == set(right)
    worst = {n: errors(mine[n], theirs[n], right[n]) for n in right}
    name, (one, _) = max(worst.items(), key=lambda item: item[1][0])
    limit = 1.2 * max(other for _, other in worst.values())
    assert one <= limit, f"worst parameter {name}: {one:.3g} above {limit:.3g}"
    flat = [
        torch.cat([grads[n].flatten().double() for n in sorted(right)])
        for grads in (mine, theirs, right)
    ]
    one, other = errors(*flat)
    assert one <= 1.2 * other, f"all parameters: {one:.3g} against {other:.3g}"


@torch.no_grad()
@pytest.mark.parametrize("mscales", [(1.0, 1.0), (0.707, 0.707), (0.707, 1.0), (1.0, 0.0)])
def test_row_58_attention_with_yarn_far_from_the_start(tmp_path, mscales):
    """Right at position 0 and wrong further on is what a mixed-up mscale looks like."""
    yarn = {**YARN, "mscale": mscales[0], "mscale_all_dim": mscales[1]}
    folder = make("deepseek", tmp_path, rope_scaling=yarn)
    attention = load_ours(folder).model.layers[0].self_attn
    theirs, exact = (load_theirs(folder, d).model for d in (torch.float32, torch.float64))
    x = torch.randn(4, 128, generator=torch.Generator().manual_seed(1))
    for start in (0, 1, 100, 5000):
        positions = start + torch.tensor([0, 1, 40, 90])
        mine = attention(x, positions, run_batch(4))
        mask = torch.full((4, 4), -torch.inf).triu(1)[None, None]
        right, other = (
            model.layers[0].self_attn(
                x[None].to(model.norm.weight.dtype),
                model.rotary_emb(x[None].to(model.norm.weight.dtype), positions[None]),
                mask,
            )[0][0]
            for model in (exact, theirs)
        )
        one, two = errors(mine, other, right)
        assert one <= 1.5 * two + 1e-7, f"position {start}: {one:.3g} against {two:.3g}"


def run_batch(length):
    from isomodels.batch import Batch

    return Batch.packed(torch.tensor([0, length], dtype=torch.int32))


@torch.no_grad()
def test_row_60_the_epsilon_of_the_latent_norms(tmp_path):
    """Latents near 1e-3, where 1e-5 and 1e-6 are far apart. None: rms_norm_eps, as in engines."""
    folder = make("glm", tmp_path)
    raw, ids = json.loads((folder / "config.json").read_text()), tokens(50)
    small = load_ours(folder)
    outputs = {}
    for stated, eps in ((None, 1e-5), (1e-5, 1e-5), (1e-6, 1e-6)):
        fields = {k: v for k, v in raw.items() if k != "latent_norm_eps"}
        fields |= {} if stated is None else {"latent_norm_eps": stated}
        (folder / "config.json").write_text(json.dumps(fields))
        ours, theirs = load_ours(folder), load_theirs(folder, torch.float64)
        for layer in (*ours.model.layers, *theirs.model.layers):
            attention = layer.self_attn
            for norm in (attention.q_a_layernorm, attention.kv_a_layernorm):
                if hasattr(norm, "variance_epsilon"):
                    norm.variance_epsilon = eps
                else:
                    assert norm.eps == eps
            for name in ("qkv_a_proj", "q_a_proj", "kv_a_proj_with_mqa"):
                if hasattr(attention, name):
                    getattr(attention, name).weight *= 1e-3
        outputs[stated] = ours.logits(run_packed(ours, ids))
        right = theirs(ids[None]).logits[0]
        assert relative_rms(outputs[stated], right) < 1e-4
    assert relative_rms(outputs[None], outputs[1e-5]) == 0.0
    assert relative_rms(outputs[1e-6], outputs[1e-5]) > 0.1
    assert small.config.norm_eps_of_latents == 1e-6


@torch.no_grad()
def test_the_comparison_can_fail(checkpoint):
    # half-split rope on interleaved weights is far outside
    folder, ids = checkpoint("deepseek"), tokens(60)
    model = load_ours(folder)
    right, theirs = (
        load_theirs(folder, d)(ids[None]).logits[0] for d in (torch.float64, torch.float32)
    )
    model.model.layers[0].self_attn.k_rope.interleaved = False
    mine, other = errors(model.logits(run_packed(model, ids)), theirs, right)
    assert mine > 100 * other
