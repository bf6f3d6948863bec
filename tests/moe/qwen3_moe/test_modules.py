"""What hosts rely on: names, operators, recomputed layers, recorded and replayed routes."""

import pytest
import torch
from torch.utils.checkpoint import checkpoint as recompute

from isomodels.batch import Batch
from isomodels.layers.routes import record_routes, replay_routes, routers
from tests.dense.models import Engine, bounds, run_packed, tokens
from tests.dense.test_compile import results
from tests.dense.test_operations import OnlyOurs
from tests.kernel.battery import DTYPES, assert_same_bits
from tests.moe.qwen3_moe.models import KINDS, load_ours

ATTENTION = {
    "input_layernorm.weight": (128,),
    "self_attn.qkv_proj.weight": (256, 128),
    "self_attn.q_norm.weight": (32,),
    "self_attn.k_norm.weight": (32,),
    "self_attn.o_proj.weight": (128, 128),
    "post_attention_layernorm.weight": (128,),
}
DENSE = {"mlp.gate_up_proj.weight": (512, 128), "mlp.down_proj.weight": (128, 256)}
SPARSE = {
    "mlp.gate.weight": (8, 128),
    "mlp.experts.gate_up_proj": (8, 96, 128),
    "mlp.experts.down_proj": (8, 128, 48),
}
SPARSE_LAYERS = {"qwen3-moe": (1, 2), "qwen3-moe-tied": (1, 3)}
names = pytest.mark.parametrize("name", KINDS)


@names
def test_names_and_shapes(ours, name):
    model, sparse = ours(name), SPARSE_LAYERS[name]
    expected = {"model.embed_tokens.weight": (512, 128), "model.norm.weight": (128,)}
    if name != "qwen3-moe-tied":
        expected["lm_head.weight"] = (512, 128)
    for i in range(model.config.num_hidden_layers):
        layer = ATTENTION | (SPARSE if i in sparse else DENSE)
        expected |= {f"model.layers.{i}.{k}": v for k, v in layer.items()}
    assert {n: tuple(p.shape) for n, p in model.named_parameters()} == expected
    assert not list(model.buffers())
    assert [router.layer_id for router in routers(model)] == list(sparse)
    # the walk of Megatron's router helpers
    found = [layer.mlp.router for layer in model.model.layers if hasattr(layer.mlp, "router")]
    assert found == routers(model)


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
    assert mode.seen >= {
        f"isomodels::{op}"
        for op in ("router_logits", "route", "moe_sort", "grouped_linear", "moe_combine")
    }
    engine, call = Engine(model, [20]), model.forward
    engine.step({0: ids[:19]})

    def watched(*args, **kwargs):
        with OnlyOurs(model):
            return call(*args, **kwargs)

    engine.model = watched
    assert engine.step({0: ids[19:20]}).shape == (1, 128)


@pytest.mark.parametrize("dtype", DTYPES)
@names
def test_recomputed_layers_have_the_same_bits_and_gradients(checkpoint, name, dtype):
    model, ids = load_ours(checkpoint(name, dtype)), tokens(50)
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


@names
def test_row_33_routes_are_recorded_and_their_replay_changes_nothing(checkpoint, name):
    model, ids = load_ours(checkpoint(name)), tokens(40)

    def run():
        model.zero_grad()
        logprobs = model.token_logprobs(run_packed(model, ids), ids)
        logprobs.sum().backward()
        return [logprobs, *(p.grad.clone() for p in model.parameters())]

    with record_routes(model) as recorded:
        plain = run()
        routes = recorded.take()
    top_k = model.config.num_experts_per_tok
    assert routes.shape == (40, 2, top_k)
    assert routes.dtype == torch.int32
    with replay_routes(model, routes):
        for one, two in zip(run(), plain, strict=True):
            assert_same_bits(one, two, "replayed")
    other = (routes + 1) % 8
    with replay_routes(model, other), record_routes(model) as recorded:
        changed = run()
        assert torch.equal(recorded.take(), other)
    assert not torch.equal(changed[0], plain[0])
    for one, two in zip(run(), plain, strict=True):
        assert_same_bits(one, two, "after a replay")
    with (
        pytest.raises(ValueError, match=r"\[T, 2, k\].*got \[40, 1, "),
        replay_routes(model, routes[:, :1]),
    ):
        pass


def test_routes_of_several_forwards_follow_each_other(ours):
    model, ids = ours("qwen3-moe"), tokens(30)
    with record_routes(model) as recorded:
        run_packed(model, ids)
        at_once = recorded.take()
        for part in ids.split(10):
            run_packed(model, part, [len(part)])
        assert recorded.take().shape == at_once.shape
    assert all(router.capture_fn is None for router in routers(model))


def test_one_graph_with_the_bits_of_eager(checkpoint):
    """Forward and backward: nothing between router and combination waits for a number."""
    model = load_ours(checkpoint("qwen3-moe", torch.bfloat16))

    def forward(ids, positions, batch, targets):
        return model.token_logprobs(model(ids, positions, batch), targets)

    eager = results(forward, model, "cpu")
    torch._dynamo.reset()
    compiled = torch.compile(forward, fullgraph=True, backend="aot_eager")
    for name, value in results(compiled, model, "cpu").items():
        assert_same_bits(value, eager[name], name)
    assert {name for name, _ in model.named_parameters()} < eager.keys()
