"""What hosts rely on: operators only, names, float32 parameters, recomputed layers, refusals."""

from pathlib import Path

import pytest
import torch
from torch.utils.checkpoint import checkpoint as recompute

from isomodels.batch import Batch
from isomodels.config import read_config
from isomodels.registry import load_object
from tests.dense.test_operations import OnlyOurs
from tests.hybrid.models import ARCHITECTURES, Engine, bounds, load_ours, run_packed, tokens
from tests.kernel.battery import DTYPES, assert_same_bits, relative_rms

CONFIGS = Path(__file__).parent.parent / "data" / "configs"
NAMES = {
    "input_layernorm.weight",
    "post_attention_layernorm.weight",
    "mlp.gate_up_proj.weight",
    "mlp.down_proj.weight",
}
DELTA = {
    "linear_attn.in_proj.weight": (192 + 128 + 4 + 4, 128),
    "linear_attn.conv1d.weight": (192, 1, 4),
    "linear_attn.gates.A_log": (4,),
    "linear_attn.gates.dt_bias": (4,),
    "linear_attn.norm.weight": (32,),
    "linear_attn.out_proj.weight": (128, 128),
}
ATTENTION = {
    "self_attn.qkv_proj.weight": ((8 + 4) * 64, 128),
    "self_attn.q_norm.weight": (64,),
    "self_attn.k_norm.weight": (64,),
    "self_attn.o_proj.weight": (128, 256),
}
FLOAT32 = ("A_log", "dt_bias", "linear_attn.norm.weight")


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", ARCHITECTURES)
def test_only_our_operators_compute(ours, name, dtype):
    model, ids = ours(name, dtype), tokens(33)
    batch, positions = Batch.packed(bounds([20, 13])), Batch.positions(bounds([20, 13]))
    with torch.no_grad(), OnlyOurs(model) as mode:
        model.token_logprobs(model(ids, positions, batch), ids)
    assert {"isomodels::gated_delta_rule", "isomodels::causal_conv"} <= mode.seen
    engine = Engine(model, [20])
    engine.step({0: ids[:19]})
    paged = {"paged_gated_delta_rule", "paged_causal_conv", "paged_attention", "write_kv_cache"}

    def watched(*args):
        with OnlyOurs(model) as mode:
            hidden = model(*args)
        assert {f"isomodels::{operation}" for operation in paged} <= mode.seen
        return hidden

    engine.model = watched
    assert engine.step({0: ids[19:20]}).shape == (1, 128)


def test_names_and_shapes(ours):
    shapes = {n: tuple(p.shape) for n, p in ours("qwen3_5").named_parameters()}
    for index in range(4):
        prefix = f"model.layers.{index}."
        own = {n.removeprefix(prefix): s for n, s in shapes.items() if n.startswith(prefix)}
        mixer = ATTENTION if index == 3 else DELTA
        assert own.keys() == NAMES | mixer.keys()
        assert own.items() >= mixer.items()


@pytest.mark.parametrize("name", ["qwen3_5", "qwen3_5_moe", "multimodal"])
def test_mtp_tensors_are_carried_on_request(checkpoint, ours, name):
    carrying, plain = load_ours(checkpoint(name), carry_mtp=True), ours(name)
    extra = set(carrying.state_dict()) - set(plain.state_dict())
    assert extra == {n for n, _ in carrying.named_buffers()}
    assert any(n.startswith("visual.") for n in extra) == (name == "multimodal")
    assert {"mtp.fc.weight", "mtp.layers.0.self_attn.q_proj.weight", "mtp.norm.weight"} <= extra
    ids = tokens(20)
    expected = plain.logprobs(run_packed(plain, ids))
    assert_same_bits(carrying.logprobs(run_packed(carrying, ids)), expected)


@pytest.mark.parametrize("cast", ["bfloat16", "to", "half and back"])
def test_row_46_of_the_field_reports_float32_parameters_survive_a_cast(checkpoint, cast):
    model = load_ours(checkpoint("qwen3_5"))
    kept = {n: p.detach().clone() for n, p in model.named_parameters() if n.endswith(FLOAT32)}
    assert len(kept) == 9
    # each would change
    assert all((p.bfloat16().float() != p).any() for p in kept.values())
    if cast == "bfloat16":
        model.bfloat16()
    elif cast == "to":
        model.to(torch.bfloat16)
    else:
        model.half().float()
    for n, p in model.named_parameters():
        if n in kept:
            assert_same_bits(p, kept[n], n)
        elif cast != "half and back":
            assert p.dtype == torch.bfloat16, n


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("reentrant", [False, True])
def test_recomputed_layers_have_the_same_bits_and_gradients(checkpoint, dtype, reentrant):
    model, ids = load_ours(checkpoint("qwen3_5", dtype)), tokens(80)
    runs = []
    for run_layer in (None, lambda layer, *args: recompute(layer, *args, use_reentrant=reentrant)):
        model.zero_grad()
        options = {} if run_layer is None else {"run_layer": run_layer}
        logprobs = model.token_logprobs(run_packed(model, ids, [10, 70], **options), ids)
        logprobs.sum().backward()
        runs.append([logprobs, *(p.grad for p in model.parameters())])
    names = ["logprobs", *(n for n, _ in model.named_parameters())]
    for part, one, two in zip(names, *runs, strict=True):
        assert_same_bits(two, one, part)
        assert one.abs().sum() > 0, f"{part} has no gradient"


def test_row_44_of_the_field_reports_no_gradient_crosses_documents(checkpoint):
    model, ids = load_ours(checkpoint("qwen3_5")), tokens(100)
    gradients = []
    for lengths, part in (([30, 70], slice(0, 100)), ([70], slice(30, 100))):
        model.zero_grad()
        embedded = []
        hook = model.model.embed_tokens.register_forward_hook(
            lambda *a, kept=embedded: a[-1].retain_grad() or kept.append(a[-1])
        )
        logprobs = model.token_logprobs(run_packed(model, ids[part], lengths), ids[part])
        logprobs[-70:].sum().backward()
        hook.remove()
        gradients.append(embedded[0].grad)
    assert not gradients[0][:30].any()
    assert relative_rms(gradients[0][30:], gradients[1]) < 1e-5


@pytest.mark.parametrize(
    ("name", "least", "most"),
    [
        ("qwen3.5-9b", 8.5e9, 9.5e9),
        ("qwen3.5-35b-a3b", 34e9, 35.5e9),
        ("qwen3-next-80b-a3b", 79e9, 80.5e9),
    ],
)
def test_released_models_have_the_parameters_of_their_names(name, least, most):
    spec, config = read_config(CONFIGS / name)
    model = load_object(spec.model)(config, dtype=config.torch_dtype, device=torch.device("meta"))
    assert least < sum(p.numel() for p in model.parameters()) < most
    counts = [len(config.layers_of(kind)) for kind in ("linear_attention", "full_attention")]
    assert counts == [3 * config.num_hidden_layers // 4, config.num_hidden_layers // 4]
