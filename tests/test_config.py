"""Strict reading of config.json: what is not stated or not implemented is named, never guessed."""

import json
from pathlib import Path

import pytest
import torch

from isomodels.config import read_config
from isomodels.errors import ConfigError, UnsupportedError
from isomodels.parity.checkpoints import tiny_config

QWEN3_06B = {
    "architectures": ["Qwen3ForCausalLM"],
    "attention_bias": False,
    "attention_dropout": 0.0,
    "bos_token_id": 151643,
    "eos_token_id": 151645,
    "head_dim": 128,
    "hidden_act": "silu",
    "hidden_size": 1024,
    "initializer_range": 0.02,
    "intermediate_size": 3072,
    "max_position_embeddings": 40960,
    "max_window_layers": 28,
    "model_type": "qwen3",
    "num_attention_heads": 16,
    "num_hidden_layers": 28,
    "num_key_value_heads": 8,
    "rms_norm_eps": 1e-06,
    "rope_scaling": None,
    "rope_theta": 1000000,
    "sliding_window": None,
    "tie_word_embeddings": True,
    "torch_dtype": "bfloat16",
    "transformers_version": "4.51.0",
    "use_cache": True,
    "use_sliding_window": False,
    "vocab_size": 151936,
}
QWEN3_8B = QWEN3_06B | {
    "hidden_size": 4096,
    "intermediate_size": 12288,
    "max_window_layers": 36,
    "num_attention_heads": 32,
    "num_hidden_layers": 36,
    "tie_word_embeddings": False,
}
MIMO_7B = {
    "architectures": ["MiMoForCausalLM"],
    "attention_bias": True,
    "attention_dropout": 0.0,
    "auto_map": {
        "AutoConfig": "configuration_mimo.MiMoConfig",
        "AutoModel": "modeling_mimo.MiMoModel",
        "AutoModelForCausalLM": "modeling_mimo.MiMoForCausalLM",
    },
    "bos_token_id": 151643,
    "eos_token_id": 151643,
    "head_dim": 128,
    "hidden_act": "silu",
    "hidden_size": 4096,
    "initializer_range": 0.02,
    "intermediate_size": 11008,
    "max_position_embeddings": 32768,
    "max_window_layers": 36,
    "model_type": "mimo",
    "num_attention_heads": 32,
    "num_hidden_layers": 36,
    "num_key_value_heads": 8,
    "num_nextn_predict_layers": 1,
    "rms_norm_eps": 1e-05,
    "rope_scaling": None,
    "rope_theta": 640000,
    "tie_word_embeddings": False,
    "torch_dtype": "bfloat16",
    "transformers_version": "4.40.1",
    "use_cache": True,
    "use_sliding_window": False,
    "vocab_size": 151680,
}
RELEASED = {"qwen3-0.6b": QWEN3_06B, "qwen3-8b": QWEN3_8B, "mimo-7b": MIMO_7B}
released = pytest.mark.parametrize("raw", RELEASED.values(), ids=RELEASED)

# Remove each mark with its fault: a test that passes is then an error.


def v5(raw):
    """The same config as transformers 5 writes it."""
    moved = ("rope_theta", "rope_scaling", "torch_dtype")
    rest = {k: v for k, v in raw.items() if k not in moved}
    rope = {"rope_type": "default", "rope_theta": raw["rope_theta"]}
    layers = ["full_attention"] * raw["num_hidden_layers"]
    return rest | {
        "rope_parameters": rope,
        "dtype": raw["torch_dtype"],
        "layer_types": layers,
        "pad_token_id": None,
        "transformers_version": "5.18.0",
    }


def without(raw, *names):
    return {k: v for k, v in raw.items() if k not in names}


@released
def test_released_configs_are_accepted(raw):
    spec, config = read_config(raw)
    assert spec.architecture == raw["architectures"][0]
    assert config.rope_theta == raw["rope_theta"]
    assert config.head_dim == 128
    assert config.torch_dtype == torch.bfloat16
    for field in ("vocab_size", "hidden_size", "rms_norm_eps", "tie_word_embeddings"):
        assert getattr(config, field) == raw[field]
    assert getattr(config, "num_nextn_predict_layers", None) == raw.get("num_nextn_predict_layers")


@released
def test_row_70_of_the_field_reports_both_forms_say_the_same(raw):
    old, new = read_config(raw)[1], read_config(v5(raw))[1]
    assert old.model_dump(exclude={"layer_types"}) == new.model_dump(exclude={"layer_types"})


@released
@pytest.mark.parametrize("form", [lambda raw: raw, v5], ids=["v4", "v5"])
def test_row_70_of_the_field_reports_absent_rope_theta(raw, form):
    raw = form(raw)
    raw = without(raw, "rope_theta")
    if "rope_parameters" in raw:
        raw["rope_parameters"] = {"rope_type": "default"}
    with pytest.raises(ConfigError, match="rope_theta is missing"):
        read_config(raw)
    with pytest.raises(ConfigError, match="rope_theta is missing"):
        read_config(without(raw, "rope_parameters") | {"rope_theta": None})


def test_transformers_itself_is_silent_about_it():
    # What the strict reading is for; should this change, so may the comment in config.py.
    from transformers import Qwen3Config

    assert Qwen3Config().rope_parameters["rope_theta"] == 10000.0


REQUIRED = [
    "vocab_size",
    "hidden_size",
    "intermediate_size",
    "num_hidden_layers",
    "num_attention_heads",
    "num_key_value_heads",
    "rms_norm_eps",
    "max_position_embeddings",
    "tie_word_embeddings",
    "hidden_act",
]


@released
@pytest.mark.parametrize("field", REQUIRED)
def test_a_missing_field_is_named(raw, field):
    with pytest.raises(ConfigError, match=rf"\b{field} is missing"):
        read_config(without(raw, field))


@pytest.mark.parametrize("field", ["head_dim", "attention_bias"])
def test_fields_that_qwen3_must_state(field):
    with pytest.raises(ConfigError, match=f"{field} is missing"):
        read_config(without(QWEN3_8B, field))


def test_fields_that_mimo_must_state():
    with pytest.raises(ConfigError, match="num_nextn_predict_layers is missing"):
        read_config(without(MIMO_7B, "num_nextn_predict_layers"))


@released
def test_a_missing_dtype(raw):
    with pytest.raises(ConfigError, match="dtype is missing"):
        read_config(without(raw, "torch_dtype"))


def test_all_faults_are_named_at_once():
    with pytest.raises(ConfigError) as error:
        read_config(without(QWEN3_8B, "hidden_size", "vocab_size") | {"surprise": 1})
    for name in ("hidden_size", "vocab_size", "surprise"):
        assert name in str(error.value)
    assert len(str(error.value).splitlines()) <= 2


@released
@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("quantization_config", {"quant_method": "fp8"}),
        ("made_up_field", 1),
        ("made_up_field", None),
        ("rope_interleave", True),
        ("partial_rotary_factor", 0.5),
        ("logit_scale", 1.0),
        ("num_experts", 8),
        ("text_config", {}),
        ("attn_logit_softcapping", 30.0),
    ],
)
def test_an_unknown_field_is_named(raw, field, value):
    with pytest.raises(ConfigError, match=f"{field} is unknown"):
        read_config(raw | {field: value})


@released
@pytest.mark.parametrize(
    "rope",
    [
        {"rope_scaling": {"type": "yarn", "factor": 4.0}},
        {"rope_scaling": {"rope_type": "yarn", "factor": 4.0}},
        {"rope_scaling": {"rope_type": "linear", "factor": 2.0}},
        {"rope_scaling": {"rope_type": "dynamic", "factor": 2.0}},
        {"rope_parameters": {"rope_type": "llama3", "rope_theta": 1e6}},
        {"rope_parameters": {"rope_type": "longrope", "rope_theta": 1e6}},
        {"rope_scaling": {"rope_type": None}},
    ],
)
def test_other_rope_types_are_refused(raw, rope):
    with pytest.raises(ConfigError, match=r"rope_type .* is not implemented"):
        read_config(raw | rope)


@pytest.mark.parametrize(
    ("rope", "message"),
    [
        ({"rope_parameters": {"rope_theta": 1e6, "partial_rotary_factor": 0.5}}, "partial_rotary"),
        ({"rope_parameters": {"rope_theta": 1e6, "mrope_section": [1]}}, "mrope_section"),
        ({"rope_scaling": {"factor": 4.0}}, "factor"),
        ({"rope_parameters": {"rope_theta": 5.0}}, "differ"),
        ({"rope_parameters": [1]}, "no object"),
        ({"rope_parameters": {"full_attention": {"rope_theta": 1e6}}}, "full_attention"),
    ],
)
def test_other_rope_fields_are_refused(rope, message):
    with pytest.raises(ConfigError, match=message):
        read_config(QWEN3_8B | rope)


@released
@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"use_sliding_window": True}, "use_sliding_window"),
        ({"use_sliding_window": True, "sliding_window": 4096}, "sliding_window"),
        ({"layer_types": ["sliding_attention"]}, "layer_types"),
        ({"layer_types": ["full_attention"]}, "layer_types has not num_hidden_layers"),
        ({"layer_types": "full_attention"}, "layer_types"),
        ({"attention_dropout": 0.1}, "attention_dropout"),
        ({"hidden_act": "gelu"}, "hidden_act"),
        ({"torch_dtype": "float16"}, "dtype = 'float16'"),
        ({"torch_dtype": "auto"}, "dtype = 'auto'"),
        ({"torch_dtype": None}, "dtype"),
        ({"torch_dtype": "bfloat16", "dtype": "float32"}, "dtype and torch_dtype differ"),
        ({"num_attention_heads": 30, "num_key_value_heads": 8}, "no multiple"),
        ({"head_dim": 127}, "head_dim"),
    ],
)
def test_values_without_an_implementation_are_refused(raw, changes, message):
    with pytest.raises(ConfigError, match=message):
        read_config(raw | changes)


def test_sliding_window_without_its_switch():
    with pytest.raises(ConfigError, match="sliding_window"):
        read_config(without(QWEN3_8B, "use_sliding_window") | {"sliding_window": 4096})


def test_attention_bias():
    with pytest.raises(ConfigError, match="attention_bias = True is not supported"):
        read_config(QWEN3_8B | {"attention_bias": True})
    with pytest.raises(ConfigError, match="attention_bias = False is not supported"):
        read_config(MIMO_7B | {"attention_bias": False})


@released
@pytest.mark.parametrize("field", [*REQUIRED[:6], "head_dim", "max_position_embeddings"])
@pytest.mark.parametrize("value", ["8", 8.0, 8.5, True, None, -8, 0, [8], {}], ids=repr)
def test_sizes_of_a_wrong_type_or_sign(raw, field, value):
    if raw is MIMO_7B and field == "head_dim" and value is None:
        pytest.skip("MiMo may leave it out")
    with pytest.raises(ConfigError, match=field):
        read_config(raw | {field: value})


@released
@pytest.mark.parametrize("field", ["rms_norm_eps", "rope_theta"])
@pytest.mark.parametrize("value", ["1e-6", True, 0, -1.0, float("nan"), [1e-6]], ids=repr)
def test_numbers_of_a_wrong_type_or_sign(raw, field, value):
    with pytest.raises(ConfigError, match=field):
        read_config(raw | {field: value})


@released
@pytest.mark.parametrize("field", ["rms_norm_eps", "rope_theta"])
def test_infinity_is_no_number(raw, field):
    with pytest.raises(ConfigError, match=field):
        read_config(raw | {field: float("inf")})


@pytest.mark.parametrize("value", [0, 1, "false", None])
def test_flags_of_a_wrong_type(value):
    with pytest.raises(ConfigError, match="tie_word_embeddings"):
        read_config(QWEN3_8B | {"tie_word_embeddings": value})


@pytest.mark.parametrize("value", ["false", None])
def test_a_switch_of_a_wrong_type(value):
    with pytest.raises(ConfigError, match="use_sliding_window"):
        read_config(QWEN3_8B | {"use_sliding_window": value})


def test_head_dim_of_mimo_follows_from_the_sizes():
    assert read_config(without(MIMO_7B, "head_dim"))[1].head_dim == 128


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("hidden_size", "8"),
        ("hidden_size", None),
        ("hidden_size", [8]),
        ("hidden_size", 0),
        ("hidden_size", 8.5),
        ("num_attention_heads", "8"),
        ("num_attention_heads", 0),
        ("num_attention_heads", 8.5),
    ],
)
def test_head_dim_of_mimo_from_wrong_sizes(field, value):
    with pytest.raises(ConfigError, match=field):
        read_config(without(MIMO_7B, "head_dim") | {field: value})


@pytest.mark.parametrize("names", [None, [], "Qwen3ForCausalLM", ["Qwen3ForCausalLM"] * 2, [1], {}])
def test_architectures_must_name_one_class(names):
    with pytest.raises((ConfigError, UnsupportedError)) as error:
        read_config(QWEN3_8B | {"architectures": names})
    assert len(str(error.value).splitlines()) <= 2


def test_an_unknown_architecture_is_answered_with_the_known_ones():
    with pytest.raises(
        UnsupportedError, match=r"LlamaForCausalLM.*MiMoForCausalLM.*Qwen3ForCausal"
    ):
        read_config(QWEN3_8B | {"architectures": ["LlamaForCausalLM"]})


@pytest.mark.parametrize("model_type", ["qwen2", None, "mimo"])
def test_model_type_of_another_architecture(model_type):
    with pytest.raises(ConfigError, match="model_type"):
        read_config(QWEN3_8B | {"model_type": model_type})


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"", "cannot be read"),
        (b"{", "cannot be read"),
        (b"\xff\xfe{}", "cannot be read"),
        (b"[1]", "no JSON object"),
        (b"null", "no JSON object"),
    ],
)
def test_a_file_that_is_no_config(tmp_path, content, message):
    (tmp_path / "config.json").write_bytes(content)
    with pytest.raises(ConfigError, match=message):
        read_config(tmp_path)


def test_a_folder_without_a_config(tmp_path):
    with pytest.raises(ConfigError, match=r"has no config\.json"):
        read_config(tmp_path)
    (tmp_path / "config.json").mkdir()
    with pytest.raises(ConfigError, match="cannot be read"):
        read_config(tmp_path)


@released
def test_a_folder_and_its_content_say_the_same(tmp_path, raw):
    (tmp_path / "config.json").write_text(json.dumps(raw))
    assert read_config(tmp_path) == read_config(str(tmp_path)) == read_config(raw)


def test_a_config_cannot_be_changed():
    config = read_config(QWEN3_8B)[1]
    with pytest.raises(Exception, match="frozen"):
        config.rope_theta = 10000.0


OF_EVERY_KIND = [
    None, True, 0, -1, 1.5, float("nan"), float("inf"), "", "yarn", "default", [], ["yarn"], {},
    {"type": []},
]  # fmt: skip


@pytest.mark.parametrize(
    "folder", sorted((Path(__file__).parent / "data" / "configs").iterdir()), ids=lambda x: x.name
)
def test_a_field_of_any_kind_is_read_or_named(folder: Path) -> None:
    """Fields of config.json and of the objects in it, in place of theirs and beside them."""
    raw = json.loads((folder / "config.json").read_text())
    places = [(raw,), *((raw, key) for key, value in raw.items() if isinstance(value, dict))]
    refused = 0
    for _, *path in places:
        inside = raw[path[0]] if path else raw
        for name in {*inside, "type", "rope_type", "rope_theta", "rope_scaling"}:
            for value in OF_EVERY_KIND:
                changed = {**inside, name: value}
                try:
                    read_config({**raw, path[0]: changed} if path else changed)
                except (ConfigError, UnsupportedError):
                    refused += 1
    assert refused > 100


@pytest.mark.parametrize(
    ("architecture", "fields", "named"),
    [
        ("Qwen3ForCausalLM", {"num_hidden_layers": 4097}, "num_hidden_layers"),
        ("Glm4MoeLiteForCausalLM", {"n_routed_experts": 2**31 - 1}, "n_routed_experts"),
        ("Glm4MoeLiteForCausalLM", {"num_nextn_predict_layers": 10**6}, "num_nextn_predict_layers"),
        ("Qwen3_5MoeForCausalLM", {"mtp_num_hidden_layers": 10**6}, "mtp_num_hidden_layers"),
        (
            "Qwen3_5MoeForCausalLM",
            {"num_hidden_layers": 4000, "num_experts": 4000},
            "num_hidden_layers times num_experts",
        ),
    ],
)
def test_a_model_of_too_many_parts_is_refused_before_they_are_made(architecture, fields, named):
    raw = tiny_config(architecture) | fields
    with pytest.raises(ConfigError, match=f": {named} is larger than any size of a model"):
        read_config(raw)
