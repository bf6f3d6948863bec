"""Error against the definition in fp64, beside the error of transformers' fp32 and bf16 models."""

import json

import pytest
import torch
from safetensors.torch import load_file

from tests.hybrid import reference
from tests.hybrid.models import DENSE, WITH_EXPERTS, load_ours, load_theirs, run_packed, tokens
from tests.kernel.battery import relative_rms

LENGTH = 2000


@pytest.fixture(scope="module")
def exact(checkpoint):
    """exact(name, dtype) -> fp64 logits [LENGTH, V] of tokens(LENGTH); made once."""
    made = {}

    def get(name, dtype):
        if (name, dtype) not in made:
            made[name, dtype] = reference.logits(checkpoint(name, dtype), tokens(LENGTH))
        return made[name, dtype]

    return get


@torch.no_grad()
@pytest.mark.parametrize("name", ["qwen3_5", pytest.param("qwen3_5-tied", marks=pytest.mark.slow)])
@pytest.mark.parametrize(("dtype", "factor"), [(torch.float32, 1.2), (torch.bfloat16, 1.1)])
def test_logits_and_logprobs_at_every_position(checkpoint, ours, exact, name, dtype, factor):
    folder, ids, model = checkpoint(name, dtype), tokens(LENGTH), ours(name, dtype)
    hidden = run_packed(model, ids)
    theirs = load_theirs(folder, dtype)(ids[None], use_cache=False).logits[0]
    right = exact(name, dtype)
    pairs = {
        "logits": (model.logits(hidden), theirs, right),
        "logprobs": (
            model.logprobs(hidden),
            theirs.log_softmax(-1, dtype=torch.float32),
            right.log_softmax(-1),
        ),
    }
    for what, (mine, other, true) in pairs.items():
        one, two = relative_rms(mine, true), relative_rms(other, true)
        assert one <= factor * two, f"{what}: {one:.3g} against {two:.3g}"
        # nowhere does a long history make it worse; a window's error is that of a few tokens
        for start in range(0, LENGTH, 250):
            part = slice(start, start + 250)
            one, two = (relative_rms(x[part], true[part]) for x in (mine, other))
            assert one <= 2 * two, f"{what} from {start}: {one:.3g} against {two:.3g}"


@torch.no_grad()
def test_row_53_of_the_field_reports_the_definition_is_that_of_transformers(checkpoint, exact):
    # so that the reference above is no reading of ours: query scale, gates, norms, order of heads
    theirs = load_theirs(checkpoint("qwen3_5"), torch.float64)(tokens(LENGTH)[None]).logits[0]
    assert relative_rms(theirs, exact("qwen3_5", torch.float32)) < 2e-5


@torch.no_grad()
@pytest.mark.parametrize(("dtype", "limit"), [(torch.float32, 2e-5), (torch.bfloat16, 0.1)])
@pytest.mark.parametrize("name", [*WITH_EXPERTS, "multimodal"])
def test_the_others_compute_their_definition(checkpoint, ours, name, dtype, limit):
    ids, model = tokens(200), ours(name, dtype)
    mine = model.logits(run_packed(model, ids))
    right = reference.logits(checkpoint(name, dtype), ids)
    # of the median token: where two experts score alike, fp64 may choose another
    errors = (mine - right).norm(dim=1) / right.norm(dim=1)
    assert errors.median() < limit


@pytest.mark.parametrize("name", DENSE)
def test_gradients(checkpoint, name):
    folder, ids = checkpoint(name), tokens(130)
    targets = tokens(130, seed=1)[:, None]
    config = json.loads((folder / "config.json").read_text())
    leaves = {
        n: t.double().requires_grad_()
        for n, t in load_file(folder / "model.safetensors").items()
        if not n.startswith("mtp.")
    }
    logprobs = reference.forward(config, leaves, ids).log_softmax(-1).gather(1, targets)
    exact = dict(zip(leaves, torch.autograd.grad(logprobs.sum(), leaves.values()), strict=True))

    theirs = load_theirs(folder, torch.float32)
    logprobs = theirs(ids[None], use_cache=False).logits[0].log_softmax(-1).gather(1, targets)
    logprobs.sum().backward()
    model = load_ours(folder)
    model.token_logprobs(run_packed(model, ids, [130]), targets[:, 0]).sum().backward()
    other = {n: p.grad for n, p in theirs.named_parameters()}
    mine = {n: p.grad for n, p in model.named_parameters()}
    for n, grad in mine.items():
        assert grad.abs().sum() > 0, f"{n} has no gradient"
    for n in exact:
        own = n.replace("linear_attn.A_log", "linear_attn.gates.A_log")
        own = own.replace("linear_attn.dt_bias", "linear_attn.gates.dt_bias")
        if own not in mine:  # one of several that are one parameter of ours
            continue
        one, two = relative_rms(mine[own], exact[n]), relative_rms(other[n], exact[n])
        assert one <= max(3 * two, 5e-5), f"{n}: {one:.3g} against {two:.3g}"
    fused = mine["model.layers.0.linear_attn.in_proj.weight"]
    parts = ("qkv", "z", "b", "a")
    right = torch.cat([exact[f"model.layers.0.linear_attn.in_proj_{p}.weight"] for p in parts])
    assert relative_rms(fused, right) < 1e-4


@pytest.mark.slow
def test_gradients_at_every_position(checkpoint):
    """Of a long sequence's logprobs, in each embedded token, beside transformers' error.

    By medians and a quantile: where a token is ill-conditioned, either is worse by chance.
    """
    folder, ids = checkpoint("qwen3_5"), tokens(LENGTH)
    targets = tokens(LENGTH, seed=1)[:, None]
    config = json.loads((folder / "config.json").read_text())
    tensors = {n: t.double() for n, t in load_file(folder / "model.safetensors").items()}
    rows = tensors["model.embed_tokens.weight"][ids].requires_grad_()
    logprobs = reference.forward(config, tensors, ids, rows).log_softmax(-1).gather(1, targets)
    (exact,) = torch.autograd.grad(logprobs.sum(), rows)

    def embedded(model):
        kept = []

        def keep(module, given, out):
            kept.append(out.retain_grad() or out)

        model.model.embed_tokens.register_forward_hook(keep)
        return kept

    theirs, model = load_theirs(folder, torch.float32), load_ours(folder)
    other, mine = embedded(theirs), embedded(model)
    logprobs = theirs(ids[None], use_cache=False).logits[0].log_softmax(-1).gather(1, targets)
    logprobs.sum().backward()
    model.token_logprobs(run_packed(model, ids), targets[:, 0]).sum().backward()
    one, two = (
        (x.grad.view(LENGTH, -1) - exact).norm(dim=1) / exact.norm(dim=1) for x in (*mine, *other)
    )
    for start in range(0, LENGTH, 250):
        part = slice(start, start + 250)
        assert one[part].median() <= 1.5 * two[part].median(), f"from {start}"
    assert one.quantile(0.95) <= 1.5 * two.quantile(0.95)


@torch.no_grad()
@pytest.mark.parametrize("fault", ["scale", "gate", "shift", "heads"])
def test_rows_50_53_and_57_of_the_field_reports_a_fault_is_far_outside(
    checkpoint, exact, monkeypatch, fault
):
    model, ids = load_ours(checkpoint("qwen3_5")), tokens(300)
    layer = model.model.layers[0].linear_attn
    if fault == "scale":  # row 53: a query without its scale
        rule = layer.rule.forward
        monkeypatch.setattr(layer.rule, "forward", lambda q, *rest: rule(q * 0 + q, *rest) * 4.0)
    elif fault == "gate":  # row 57: gates of all heads behind all queries
        weight = model.model.layers[3].self_attn.qkv_proj.weight
        queries = weight[: 2 * 4 * 64].view(4, 2, 64, -1)
        weight[: 2 * 4 * 64] = queries.transpose(0, 1).reshape(2 * 4 * 64, -1)
    elif fault == "shift":  # row 50: the gated norm's weight is no distance from one
        layer.norm.weight += 1.0
    else:  # value heads of the wrong key head
        rule = layer.rule.forward
        monkeypatch.setattr(
            layer.rule, "forward", lambda q, k, *rest: rule(q.flip(1), k.flip(1), *rest)
        )
    wrong = model.logits(run_packed(model, ids))
    assert relative_rms(wrong, exact("qwen3_5", torch.float32)[:300]) > 1e-3
