"""Configs and weights of the hybrids: what is read, refused, kept and written back."""

import json

import pytest
import torch
from safetensors.torch import load_file, save_file

from isomodels.checkpoint import (
    load_checkpoint,
    open_checkpoint,
    save_checkpoint,
)
from isomodels.config import read_config
from isomodels.conversion import convert_checkpoint
from isomodels.errors import CheckpointError, ConfigError
from isomodels.registry import load_object
from isomodels.weights_conv.bits import same_bits
from isomodels.weights_conv.rules import Carried, Tied, resolve
from tests.hybrid.models import ARCHITECTURES, load_ours, load_theirs
from tests.kernel.battery import DTYPES, assert_same_bits
from tests.weights.support import assert_round_trip

FLOAT32 = ("A_log", "dt_bias", "linear_attn.norm.weight")


def raw_config(folder):
    return json.loads((folder / "config.json").read_text())


def tensors_of(folder):
    return load_file(folder / "model.safetensors")


def assert_same_tensors(mine, theirs, what, widened=()):
    assert mine.keys() == theirs.keys(), what
    for name in mine:
        expected = theirs[name].float() if name.endswith(tuple(widened)) else theirs[name]
        assert same_bits(mine[name], expected), f"{what}: {name}"


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", ARCHITECTURES)
def test_row_54_of_the_field_reports_every_tensor_finds_its_place(checkpoint, name, dtype):
    folder = checkpoint(name, dtype)
    assert_round_trip(open_checkpoint(folder))
    loaded = load_checkpoint(folder, carry_mtp=True).state_dict()
    by_hand = load_ours(folder, carry_mtp=True).state_dict()
    assert loaded.keys() == by_hand.keys()
    for key, tensor in by_hand.items():
        assert_same_bits(loaded[key], tensor, key)


def test_mtp_tensors_that_the_config_does_not_mention_have_a_remedy(checkpoint, tmp_path):
    folder = checkpoint("qwen3_5", torch.bfloat16)
    save_file(tensors_of(folder), tmp_path / "model.safetensors", metadata={"format": "pt"})
    raw = json.loads((folder / "config.json").read_text())
    del raw["mtp_num_hidden_layers"]
    (tmp_path / "config.json").write_text(json.dumps(raw))
    with pytest.raises(CheckpointError, match=r"left over: mtp.*say mtp_num_hidden_layers in"):
        open_checkpoint(tmp_path)
    (tmp_path / "config.json").write_text(json.dumps(raw | {"mtp_num_hidden_layers": 1}))
    open_checkpoint(tmp_path)


@pytest.mark.parametrize("name", ARCHITECTURES)
@pytest.mark.parametrize("change", ["missing", "left over", "misshapen"])
def test_row_54_of_the_field_reports_a_wrong_tensor_is_named(checkpoint, tmp_path, name, change):
    folder = checkpoint(name, torch.bfloat16)
    tensors = tensors_of(folder)
    victim = next(n for n in tensors if "linear_attn.in_proj_b" in n)
    if change == "missing":
        del tensors[victim]
    elif change == "left over":
        tensors[victim.replace("layers.0", "layers.3")] = tensors[victim].clone()
    else:
        tensors[victim] = tensors[victim][:-1]
    save_file(tensors, tmp_path / "model.safetensors", metadata={"format": "pt"})
    (tmp_path / "config.json").write_text((folder / "config.json").read_text())
    named = victim.replace("layers.0", "layers.3") if change == "left over" else victim
    with pytest.raises(CheckpointError, match=rf"(?s){change.split()[0]}.*{named}|{named}.* is "):
        open_checkpoint(tmp_path)


@pytest.mark.parametrize("name", ARCHITECTURES)
def test_row_51_of_the_field_reports_ten_saves_in_a_row(checkpoint, tmp_path, name):
    folder = checkpoint(name, torch.bfloat16)
    source = tensors_of(folder)
    module = load_checkpoint(folder, carry_mtp=True)
    before = {n: t.clone() for n, t in module.state_dict().items()}
    for turn in range(10 if name == "qwen3_5" else 2):
        save_checkpoint(module, tmp_path / str(turn), like=folder)
        saved = tensors_of(tmp_path / str(turn))
        assert_same_tensors(saved, source, f"save {turn}", widened=FLOAT32)
    for key, tensor in module.state_dict().items():
        assert_same_bits(tensor, before[key], key)
    again = load_checkpoint(tmp_path / "1", carry_mtp=True).state_dict()
    assert all(same_bits(again[n], t) for n, t in before.items())


def test_row_46_of_the_field_reports_a_trained_dt_bias_survives_a_save(checkpoint, tmp_path):
    # The file has it in bf16; what training makes of it does not fit into that.
    folder = checkpoint("qwen3_5", torch.bfloat16)
    name = "model.layers.1.linear_attn.dt_bias"
    assert tensors_of(folder)[name].dtype == torch.bfloat16
    module = load_checkpoint(folder, carry_mtp=True)
    bias = module.model.layers[1].linear_attn.gates.dt_bias
    with torch.no_grad():
        bias += 1e-4
    save_checkpoint(module, tmp_path / "out", like=folder)
    assert_same_bits(tensors_of(tmp_path / "out")[name], bias.detach())
    again = load_checkpoint(tmp_path / "out").model.layers[1].linear_attn.gates.dt_bias
    assert_same_bits(again, bias)


@pytest.mark.parametrize("name", ["qwen3_5", "qwen3_next", "multimodal"])
def test_conversion_keeps_float32_where_it_is(checkpoint, tmp_path, name):
    source = checkpoint(name)
    convert_checkpoint(source, tmp_path / "bf16", dtype=torch.bfloat16)
    theirs, mine = tensors_of(source), tensors_of(tmp_path / "bf16")
    for key, tensor in mine.items():
        expected = theirs[key] if key.endswith(FLOAT32) else theirs[key].bfloat16()
        assert same_bits(tensor, expected), key
    convert_checkpoint(tmp_path / "bf16", tmp_path / "fp32", dtype=torch.float32)
    assert read_config(tmp_path / "bf16")[1].dtype == "bfloat16"
    wide = tensors_of(tmp_path / "fp32")
    assert all(tensor.dtype == torch.float32 for tensor in wide.values())
    assert all(same_bits(wide[key], tensor.float()) for key, tensor in mine.items())


@pytest.mark.parametrize("name", ["qwen3_5", "qwen3_5_moe", "qwen3_next"])
def test_what_we_save_transformers_loads(checkpoint, tmp_path, name):
    folder = checkpoint(name)
    save_checkpoint(load_checkpoint(folder, carry_mtp=True), tmp_path / "out", like=folder)
    import transformers

    model_class = getattr(transformers, raw_config(folder)["architectures"][0])
    loaded, report = model_class.from_pretrained(tmp_path / "out", output_loading_info=True)
    assert not report["missing_keys"]
    assert all(n.startswith("mtp.") for n in report["unexpected_keys"])
    if name == "qwen3_5":
        straight = load_theirs(folder, torch.float32).state_dict()
        assert all(same_bits(straight[n], t) for n, t in loaded.state_dict().items())
    # and the other way: what transformers saves, with its own config.json
    loaded.save_pretrained(tmp_path / "theirs")
    config = raw_config(tmp_path / "theirs")
    config["architectures"] = raw_config(folder)["architectures"]
    config.pop("mtp_num_hidden_layers", None)
    (tmp_path / "theirs" / "config.json").write_text(json.dumps(config))
    again = load_checkpoint(tmp_path / "theirs").state_dict()
    for key, tensor in load_checkpoint(folder).state_dict().items():
        assert same_bits(again[key], tensor), key


REFUSED = {
    "rope_theta is missing": {"rope_parameters": {"rope_type": "default"}},
    "partial_rotary_factor is missing": {
        "rope_parameters": {"rope_type": "default", "rope_theta": 1e7}
    },
    "rope_type 'yarn' is not implemented": {
        "rope_parameters": {"rope_type": "yarn", "rope_theta": 1e7, "partial_rotary_factor": 0.25}
    },
    "layer_types and full_attention_interval differ": {"full_attention_interval": 2},
    "layer_types must name both kinds": {
        "layer_types": ["full_attention"] * 4,
        "full_attention_interval": None,
    },
    "layer_types.1 = 'sliding_attention' is not supported": {
        "layer_types": ["linear_attention", "sliding_attention"] * 2
    },
    "attn_output_gate = False is not supported": {"attn_output_gate": False},
    "mamba_ssm_dtype = 'bfloat16' is not supported": {"mamba_ssm_dtype": "bfloat16"},
    "output_gate_type = 'sigmoid' is not supported": {"output_gate_type": "sigmoid"},
    "is no multiple of linear_num_key_heads": {"linear_num_value_heads": 3},
    "mlp_only_layers": {"mlp_only_layers": [1]},
    "is no even number of channels": {"head_dim": 20},
    "linear_conv_bias is unknown": {"linear_conv_bias": True},
    "mtp_use_dedicated_embeddings = True is not supported": {"mtp_use_dedicated_embeddings": True},
}


@pytest.mark.parametrize("sentence", REFUSED)
def test_what_the_config_must_not_say(checkpoint, sentence):
    raw = raw_config(checkpoint("qwen3_5"))
    with pytest.raises(ConfigError, match=sentence.replace("(", r"\(")):
        read_config(raw | REFUSED[sentence])


def test_layer_types_may_be_told_by_the_interval(checkpoint):
    raw = raw_config(checkpoint("qwen3_5"))
    _, stated = read_config(raw)
    del raw["layer_types"]
    _, told = read_config(raw)
    assert told.layer_types == stated.layer_types
    assert told.rotary_dim == 16


@pytest.mark.parametrize(
    ("change", "sentence"),
    [
        ({"text_config": None}, "text_config is missing"),
        ({"tie_word_embeddings": True}, "tie_word_embeddings and that of text_config differ"),
        ({"dtype": "bfloat16"}, "dtype and that of text_config differ"),
        ({"vision_config": None}, "vision_config"),
        ({"audio_config": {}}, "audio_config is unknown"),
    ],
)
def test_what_a_multimodal_config_must_not_say(checkpoint, change, sentence):
    raw = raw_config(checkpoint("multimodal"))
    with pytest.raises(ConfigError, match=sentence):
        read_config(raw | change)


def test_qwen3_next_needs_normalised_scores(checkpoint):
    raw = raw_config(checkpoint("qwen3_next"))
    with pytest.raises(ConfigError, match="norm_topk_prob = False is not supported"):
        read_config(raw | {"norm_topk_prob": False})


@pytest.mark.parametrize(
    ("arch", "text"),
    [
        ("Qwen3_5ForCausalLM", {}),
        ("Qwen3_5ForConditionalGeneration", {"hidden_size": 5120, "intermediate_size": 17408}),
        ("Qwen3_5MoeForCausalLM", {}),
        ("Qwen3_5MoeForConditionalGeneration", {"num_experts": 16}),
        ("Qwen3NextForCausalLM", {"num_experts": 16}),
    ],
)
def test_names_and_shapes_of_the_released_sizes(arch, text):
    """Against transformers' own classes with their default sizes, without memory for them."""
    import transformers

    model_class = getattr(transformers, arch)
    rope = {"rope_type": "default", "rope_theta": 1e7, "partial_rotary_factor": 0.25}
    text = {"num_hidden_layers": 4, "rope_parameters": rope, **text}
    nested = {"text_config": text, "vision_config": {"depth": 2}}
    config = model_class.config_class(**(nested if "Conditional" in arch else text))
    with torch.device("meta"):
        theirs = model_class(config).state_dict()
    raw = config.to_dict()
    clutter = {"output_hidden_states", "return_dict", "chunk_size_feed_forward", "id2label"}
    clutter |= {"is_encoder_decoder", "label2id", "problem_type", "output_attentions"}

    def told(fields):
        # what save_pretrained writes: nothing that is a default of every model
        return {k: v for k, v in fields.items() if k not in clutter}

    raw = told(raw) | {"architectures": [arch], "dtype": "bfloat16"}
    if "text_config" in raw:
        raw["text_config"] = told(raw["text_config"])
        del raw["text_config"]["dtype"]
    spec, ours = read_config(raw)
    table = resolve(load_object(spec.weights)(ours), theirs)
    expected = {s.name: s.shape for rule in table for s in rule.sources}
    assert expected == {name: tuple(tensor.shape) for name, tensor in theirs.items()}
    model = load_object(spec.model)(ours, dtype=torch.bfloat16, device=torch.device("meta"))
    shapes = {r.name: r.shape for r in table if not isinstance(r, Tied | Carried)}
    assert {n: tuple(p.shape) for n, p in model.named_parameters()} == shapes
