"""What hosts rely on: names, wrapped layers, the head's policy, refused dtypes."""

import json

import pytest
import torch
from torch.utils.checkpoint import checkpoint as recompute

from isomodels.config import read_config
from isomodels.errors import ConfigError
from isomodels.kernels.rope import rope_table
from isomodels.registry import load_object
from tests.dense.models import ARCHITECTURES, load_ours, run_packed, tokens
from tests.kernel.battery import DTYPES, assert_same_bits

LAYER = {
    "input_layernorm.weight": (128,),
    "self_attn.qkv_proj.weight": (256, 128),
    "self_attn.o_proj.weight": (128, 128),
    "post_attention_layernorm.weight": (128,),
    "mlp.gate_up_proj.weight": (512, 128),
    "mlp.down_proj.weight": (128, 256),
}
EXTRA = {
    "qwen3": {"self_attn.q_norm.weight": (32,), "self_attn.k_norm.weight": (32,)},
    "mimo": {"self_attn.qkv_proj.bias": (256,)},
}


@pytest.mark.parametrize("name", ARCHITECTURES)
def test_row_75_of_the_field_reports_names_and_shapes(ours, name):
    layer = LAYER | EXTRA[name.removesuffix("-tied")]
    expected = {f"model.layers.{i}.{k}": v for i in range(3) for k, v in layer.items()}
    expected |= {"model.embed_tokens.weight": (512, 128), "model.norm.weight": (128,)}
    if name != "qwen3-tied":
        expected["lm_head.weight"] = (512, 128)
    model = ours(name)
    assert {n: tuple(p.shape) for n, p in model.named_parameters()} == expected
    assert not list(model.buffers())


def test_mtp_tensors_are_carried_on_request(checkpoint, ours):
    folder = checkpoint("mimo")
    carrying, plain = load_ours(folder, carry_mtp=True), ours("mimo")
    extra = set(carrying.state_dict()) - set(plain.state_dict())
    assert extra == {n for n, _ in carrying.named_buffers()}
    assert "model.mtp_layers.0.input_proj.weight" in extra
    assert "model.mtp_layers.0.self_attn.q_proj.bias" in extra
    assert len(extra) == 16
    assert {n for n, _ in carrying.named_parameters()} == {n for n, _ in plain.named_parameters()}
    ids = tokens(20)
    expected = plain.logprobs(run_packed(plain, ids))
    assert_same_bits(carrying.logprobs(run_packed(carrying, ids)), expected)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", ARCHITECTURES)
@pytest.mark.parametrize("reentrant", [False, True])
def test_recomputed_layers_have_the_same_bits_and_gradients(checkpoint, name, dtype, reentrant):
    model, ids = load_ours(checkpoint(name, dtype)), tokens(50)
    runs = []
    for run_layer in (None, lambda layer, *args: recompute(layer, *args, use_reentrant=reentrant)):
        model.zero_grad()
        options = {} if run_layer is None else {"run_layer": run_layer}
        hidden = run_packed(model, ids, [20, 30], **options)
        logprobs = model.token_logprobs(hidden, ids)
        logprobs.sum().backward()
        runs.append([logprobs, *(p.grad for p in model.parameters())])
    names = ["logprobs", *(n for n, _ in model.named_parameters())]
    for part, one, two in zip(names, *runs, strict=True):
        assert_same_bits(two, one, part)
        assert one.abs().sum() > 0, f"{part} has no gradient"


@pytest.mark.parametrize("name", ARCHITECTURES)
def test_scoring_first_does_not_stop_training(checkpoint, name):
    rope_table.cache_clear()
    model, ids = load_ours(checkpoint(name)), tokens(20)
    with torch.inference_mode():
        scored = model.token_logprobs(run_packed(model, ids), ids).clone()
    trained = model.token_logprobs(run_packed(model, ids), ids)
    assert_same_bits(trained, scored)
    trained.sum().backward()


@pytest.mark.parametrize("name", ARCHITECTURES)
def test_row_29_of_the_field_reports_one_head_policy(checkpoint, name):
    model, ids = load_ours(checkpoint(name, torch.bfloat16)), tokens(10)
    model.requires_grad_(False)
    hidden = run_packed(model, ids)
    before = model.logits(hidden)
    assert before.dtype == torch.float32
    assert all(p.dtype == torch.bfloat16 for p in model.parameters())
    assert (model.head_weight is model.model.embed_tokens.weight) == (name == "qwen3-tied")
    # No copy of the head stays behind when a host sends new weights.
    model.head_weight[7] *= 2
    after = model.logits(hidden)
    assert_same_bits(after[:, 7], before[:, 7] * 2, "changed row")
    assert_same_bits(after[:, 8:].contiguous(), before[:, 8:].contiguous(), "other rows")


@pytest.mark.parametrize("name", ARCHITECTURES)
def test_row_28_of_the_field_reports_casting_leaves_the_rope_table(checkpoint, name):
    # A host casts parameters and buffers; the table is neither.
    model, ids = load_ours(checkpoint(name)).to(torch.bfloat16), tokens(30)
    core = model.model.layers[0].self_attn.rope
    assert rope_table(*core.table_key, torch.device("cpu")).dtype == torch.float32
    straight = load_ours(checkpoint(name, torch.bfloat16))
    straight.load_state_dict(model.state_dict())
    expected = straight.logprobs(run_packed(straight, ids))
    assert_same_bits(model.logprobs(run_packed(model, ids)), expected)


@pytest.mark.parametrize("name", ARCHITECTURES)
def test_row_31_of_the_field_reports_fp16_is_refused(checkpoint, name):
    raw = json.loads((checkpoint(name) / "config.json").read_text())
    with pytest.raises(ConfigError, match=r"dtype = 'float16' is not supported"):
        read_config(raw | {"torch_dtype": "float16"})
    spec, config = read_config(raw)
    model = load_object(spec.model)(config, dtype=torch.float16)
    for parameter in model.parameters():
        torch.nn.init.ones_(parameter)
    with pytest.raises(TypeError, match="float16"):
        run_packed(model, tokens(5))


def test_a_k_that_cannot_be_cut_into_leaves_is_refused(checkpoint):
    raw = json.loads((checkpoint("qwen3") / "config.json").read_text())
    spec, config = read_config(raw | {"intermediate_size": 102})
    with pytest.raises(Exception, match=r"divisible by \d, got 102"):
        load_object(spec.model)(config, dtype=torch.float32)
