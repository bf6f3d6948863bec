"""What hosts rely on: names, operators, views of kv_b, recomputed layers, carried tensors."""

import pytest
import torch
from torch.utils.checkpoint import checkpoint as recompute

from isomodels.batch import Batch
from isomodels.layers.pinned import pinned_tensors
from isomodels.layers.routes import record_routes, replay_routes, routers
from tests.dense.models import bounds, run_packed, tokens
from tests.dense.test_operations import OnlyOurs
from tests.kernel.battery import DTYPES, assert_same_bits
from tests.moe.mla.models import ARCHITECTURES, LatentEngine, load_ours

names = pytest.mark.parametrize("name", ARCHITECTURES)
ATTENTION = {
    "deepseek": {
        "qkv_a_proj.weight": (48 + 40 + 16, 128),
        "q_a_layernorm.weight": (48,),
        "q_b_proj.weight": (4 * 40, 48),
        "kv_a_layernorm.weight": (40,),
        "kv_b_proj.weight": (4 * 56, 40),
        "o_proj.weight": (128, 128),
    },
    "moonlight": {
        "qkv_a_proj.weight": (4 * 40 + 40 + 16, 128),
        "kv_a_layernorm.weight": (40,),
        "kv_b_proj.weight": (4 * 56, 40),
        "o_proj.weight": (128, 128),
    },
    "glm": {
        "qkv_a_proj.weight": (48 + 40 + 8, 128),
        "q_a_layernorm.weight": (48,),
        "q_b_proj.weight": (4 * 24, 48),
        "kv_a_layernorm.weight": (40,),
        "kv_b_proj.weight": (4 * 56, 40),
        "o_proj.weight": (128, 160),
    },
}


@names
def test_names_and_shapes(ours, name):
    model = ours(name)
    attention = {n: tuple(p.shape) for n, p in model.model.layers[1].self_attn.named_parameters()}
    assert attention == ATTENTION[name]
    experts, shared = model.config.num_experts, 32 * model.config.n_shared_experts
    mlp = {n: tuple(p.shape) for n, p in model.model.layers[2].mlp.named_parameters()}
    assert mlp == {
        "gate.weight": (experts, 128),
        "experts.gate_up_proj": (experts, 64, 128),
        "experts.down_proj": (experts, 128, 32),
        "shared_experts.gate_up_proj.weight": (2 * shared, 128),
        "shared_experts.down_proj.weight": (128, shared),
    }
    bias = "mlp.gate.e_score_correction_bias"
    assert [n for n, _ in model.named_buffers()] == [f"model.layers.{i}.{bias}" for i in (1, 2)]
    assert [router.layer_id for router in routers(model)] == [1, 2]


@pytest.mark.parametrize("dtype", DTYPES)
@names
def test_only_our_operators_compute(ours, name, dtype):
    model, ids = ours(name, dtype), tokens(33)
    batch, positions = Batch.packed(bounds([20, 13])), Batch.positions(bounds([20, 13]))
    for grad in (False, True):
        model.requires_grad_(grad)
        try:
            with torch.set_grad_enabled(grad), OnlyOurs(model) as mode:
                model.token_logprobs(model(ids, positions, batch), ids)
        finally:
            model.requires_grad_(False)
        assert "isomodels::mla_attention" in mode.seen
    engine, call = LatentEngine(model, [20]), model.forward
    engine.step({0: ids[:19]})

    def watched(*args):
        with OnlyOurs(model) as mode:
            out = call(*args)
        assert {"isomodels::paged_mla_attention", "isomodels::write_latent_cache"} <= mode.seen
        return out

    engine.model = watched
    assert engine.step({0: ids[19:20]}).shape == (1, 128)


@torch.no_grad()
@names
def test_weights_of_kv_b_are_read_anew(checkpoint, name):
    """No copy of W_UK or W_UV stays behind when a host sends new weights."""
    model, ids = load_ours(checkpoint(name)), tokens(40)
    before = run_packed(model, ids)
    weight = model.model.layers[1].self_attn.kv_b_proj.weight
    for rows in (slice(0, 3), slice(-3, None)):  # of W_UK of the first head, of W_UV of the last
        old = weight[rows].clone()
        weight[rows] *= 2
        assert not torch.equal(run_packed(model, ids), before)
        weight[rows] = old
    assert_same_bits(run_packed(model, ids), before)


@names
def test_recomputed_layers_have_the_same_bits_and_gradients(checkpoint, name):
    model, ids = load_ours(checkpoint(name, torch.bfloat16)), tokens(50)
    runs = []
    for run_layer in (None, lambda layer, *args: recompute(layer, *args, use_reentrant=False)):
        model.zero_grad()
        options = {} if run_layer is None else {"run_layer": run_layer}
        logprobs = model.token_logprobs(run_packed(model, ids, [20, 30], **options), ids)
        logprobs.sum().backward()
        runs.append([logprobs, *(p.grad for p in model.parameters())])
    parts = ["logprobs", *(n for n, _ in model.named_parameters())]
    for part, one, two in zip(parts, *runs, strict=True):
        assert_same_bits(two, one, part)
        assert one.abs().sum() > 0, f"{part} has no gradient"


@torch.no_grad()
@names
def test_row_33_a_replay_of_the_own_routes_changes_no_bit(ours, name):
    model, ids = ours(name, torch.bfloat16), tokens(50)
    with record_routes(model) as recorded:
        free = run_packed(model, ids)
    routes = recorded.take()
    with replay_routes(model, routes):
        assert_same_bits(run_packed(model, ids), free, "replayed")
    with replay_routes(model, routes.roll(1, 0)):
        assert not torch.equal(run_packed(model, ids), free)


@torch.no_grad()
def test_row_36_weights_come_from_scores_without_the_bias(checkpoint):
    model, ids = load_ours(checkpoint("deepseek")), tokens(50)
    with record_routes(model) as recorded:
        before = run_packed(model, ids)
    routes = recorded.take()
    for router in routers(model):
        router.e_score_correction_bias.copy_(torch.linspace(-3, 5, 16))
    assert not torch.equal(run_packed(model, ids), before)
    with replay_routes(model, routes):
        assert_same_bits(run_packed(model, ids), before, "the same experts under another bias")


@pytest.mark.parametrize("name", ["deepseek", "glm"])
def test_mtp_tensors_are_carried_on_request(checkpoint, ours, name):
    folder = checkpoint(name, torch.bfloat16)
    carrying, plain = load_ours(folder, carry_mtp=True), ours(name, torch.bfloat16)
    extra = carrying.state_dict().keys() - plain.state_dict().keys()
    assert extra
    assert all(n.startswith("model.mtp_layers.0.") for n in extra)
    assert {n for n, _ in carrying.named_parameters()} == {n for n, _ in plain.named_parameters()}
    experts = carrying.config.num_experts
    assert len(extra) == 6 + 2 + 7 + 2 + 3 * (experts + 1)
    bias = carrying.state_dict()["model.mtp_layers.0.mlp.gate.e_score_correction_bias"]
    assert bias.dtype == torch.float32
    ids = tokens(20)
    assert_same_bits(run_packed(carrying, ids), run_packed(plain, ids))


@names
def test_row_37_the_correction_bias_survives_every_cast(checkpoint, name):
    """bfloat16 has 8 distinct values where these biases have hundreds."""
    model = load_ours(checkpoint(name), carry_mtp=True)
    pinned = pinned_tensors(model)
    assert set(pinned.values()) == {torch.float32}
    assert len(pinned) == 2 + (name != "moonlight")
    kept, generator = {}, torch.Generator().manual_seed(0)
    for key in pinned:
        bias = 7 + 0.25 * torch.rand(model.config.num_experts, generator=generator)
        model.get_buffer(key).copy_(bias)
        kept[key] = bias
    for cast in (
        lambda: model.bfloat16(),
        lambda: model.to(torch.bfloat16),
        lambda: model.half(),
        lambda: model.to(torch.bfloat16),
        lambda: model.double(),
        lambda: model.float(),
    ):
        cast()
        for key, bias in kept.items():
            assert_same_bits(model.get_buffer(key), bias, key)
    moved = model.to("meta")
    assert all(moved.get_buffer(key).is_meta for key in pinned)
