"""What config.json may say, and what is refused with one sentence."""

import math
from pathlib import Path

import pytest

from isomodels.config import read_config
from isomodels.errors import ConfigError
from isomodels.registry import load_object
from isomodels.weights_conv.rules import Carried, resolve
from tests.moe.mla.models import ARCHITECTURES, CONFIGS, YARN


def read(name, **changes):
    """The config of `name` with fields replaced; a value of ... removes one."""
    raw = {**CONFIGS[name], "torch_dtype": "bfloat16", **changes}
    return read_config({k: v for k, v in raw.items() if v is not ...})[1]


@pytest.mark.parametrize("name", ARCHITECTURES)
def test_the_released_layout_is_read(name):
    config, raw = read(name), CONFIGS[name]
    assert config.head_dim == raw["qk_nope_head_dim"] + raw["qk_rope_head_dim"]
    assert config.num_experts == raw["n_routed_experts"]
    assert config.mlp_layer_types == ["dense", "sparse", "sparse"]
    assert config.routing.correction_bias
    assert config.routing.scoring == "sigmoid"
    assert (config.yarn is None) == (name != "deepseek")
    assert config.rope_interleave


def test_real_scales():
    sizes = {"qk_nope_head_dim": 128, "qk_rope_head_dim": 64}
    yarn = {**YARN, "original_max_position_embeddings": 4096}
    config = read("deepseek", **sizes, rope_scaling=yarn, kv_lora_rank=512)
    assert config.latent_width == 576
    assert config.softmax_scale == pytest.approx(0.1352337788608801)  # as DeepSeek's own code
    assert read("glm", **sizes).softmax_scale == 192**-0.5


@pytest.mark.parametrize(
    ("name", "billions"), [("glm-4.7-flash", 30), ("deepseek-v3", 671), ("moonlight-16b-a3b", 16)]
)
def test_released_sizes(name, billions):
    spec, config = read_config(Path(__file__).parents[2] / "data" / "configs" / name)
    rules = resolve(load_object(spec.weights)(config), ())
    run = [rule for rule in rules if not isinstance(rule, Carried)]
    assert round(sum(math.prod(rule.shape) for rule in run) / 1e9) == billions


@pytest.mark.parametrize(
    "changes",
    [
        {"first_k_dense_replace": ..., "mlp_layer_types": ["dense", "sparse", "sparse"]},
        {"mlp_layer_types": ["dense", "sparse", "sparse"]},
        {"n_routed_experts": ..., "num_local_experts": 16},
        {"num_nextn_predict_layers": ..., "num_mtp_layers": 1},
        {"head_dim": 16, "qk_head_dim": 40},
        {
            "rope_theta": ...,
            "rope_scaling": ...,
            "rope_parameters": {
                **{k: v for k, v in YARN.items() if k != "type"},
                "rope_type": "yarn",
                "rope_theta": 10000,
                "partial_rotary_factor": 1.0,
            },
        },
    ],
)
def test_other_spellings_mean_the_same(changes):
    assert read("deepseek", **changes) == read("deepseek")


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"n_group": 3}, "16 experts cannot lie in 3 equal groups"),
        ({"topk_group": 5}, "topk_group must be from 1 to n_group = 4, got 5"),
        ({"num_experts_per_tok": 9}, "a token cannot go to 9 of 8 eligible experts"),
        ({"scoring_func": "softmax"}, "scoring_func = 'softmax' is not supported"),
        ({"topk_method": "greedy"}, "topk_method = 'greedy' is not supported"),
        ({"num_key_value_heads": 2}, "latent attention has no groups"),
        ({"q_lora_rank": ...}, "q_lora_rank is missing"),
        ({"kv_lora_rank": ...}, "kv_lora_rank is missing"),
        ({"qk_rope_head_dim": ...}, "qk_rope_head_dim is missing"),
        ({"n_routed_experts": ...}, "n_routed_experts is missing"),
        ({"norm_topk_prob": ...}, "norm_topk_prob is missing"),
        ({"num_nextn_predict_layers": ...}, "num_nextn_predict_layers is missing"),
        ({"num_mtp_layers": 2}, "num_mtp_layers and num_nextn_predict_layers differ"),
        ({"first_k_dense_replace": ...}, "first_k_dense_replace or mlp_layer_types is missing"),
        ({"first_k_dense_replace": -1}, "first_k_dense_replace = -1 is not supported"),
        ({"first_k_dense_replace": 1.0}, "first_k_dense_replace = 1.0 is not supported"),
        ({"first_k_dense_replace": True}, "first_k_dense_replace = True is not supported"),
        (
            {"first_k_dense_replace": "2", "mlp_layer_types": ["dense", "sparse", "sparse"]},
            "first_k_dense_replace = '2' is not supported",
        ),
        ({"num_hidden_layers": 0}, "num_hidden_layers = 0 is not supported"),
        ({"num_hidden_layers": "3"}, "num_hidden_layers = '3' is not supported"),
        ({"num_hidden_layers": 10**6}, "num_hidden_layers is larger than any size"),
        ({"mlp_layer_types": ["sparse"] * 3}, "mlp_layer_types and first_k_dense_replace differ"),
        ({"first_k_dense_replace": 3}, "no layer has experts"),
        ({"moe_layer_freq": 2}, "moe_layer_freq = 2 is not supported"),
        ({"head_dim": 40}, "head_dim is not qk_rope_head_dim"),
        ({"attention_bias": True}, "attention_bias = True is not supported"),
        ({"index_topk": 2048}, "index_topk is unknown, its meaning is not implemented"),
        ({"rope_theta": ...}, "rope_theta is missing"),
        ({"partial_rotary_factor": 0.5}, "partial_rotary_factor = 0.5 is not supported"),
        ({"rope_scaling": {**YARN, "mscale": ...}}, "rope_scaling.mscale is missing"),
        ({"rope_scaling": {**YARN, "truncate": False}}, "rope_scaling.truncate is unknown"),
        ({"rope_scaling": {**YARN, "factor": 0}}, "rope_scaling.factor = 0 is not supported"),
        ({"rope_scaling": {**YARN, "type": "linear"}}, "rope_type 'linear' is not implemented"),
        (
            {"rope_scaling": YARN, "rope_parameters": YARN},
            "rope_scaling and rope_parameters both state YaRN: leave one out",
        ),
        ({"rope_theta": 1.0}, "rope_theta 1.0 and the constants of rope_scaling"),
        ({"rope_scaling": {**YARN, "beta_fast": 1e308}}, "give no finite frequencies"),
        ({"rope_scaling": {**YARN, "factor": 1e-300}}, "give no finite frequencies"),
        ({"rope_scaling": {**YARN, "mscale": 1e308}}, "give no finite frequencies"),
        ({"rope_scaling": {**YARN, "mscale_all_dim": 1e308}}, "give no finite frequencies"),
        ({"yarn": {"factor": 40}}, "yarn is unknown: its constants are stated in rope_scaling"),
        ({"routed_scaling_factor": -1.0}, "routed_scaling_factor = -1.0 is not supported"),
        ({"latent_norm_eps": 0.0}, "latent_norm_eps = 0.0 is not supported"),
    ],
)
def test_refusals(changes, message):
    for key, value in changes.items():
        if isinstance(value, dict):
            changes[key] = {k: v for k, v in value.items() if v is not ...}
    with pytest.raises(ConfigError) as caught:
        read("deepseek", **changes)
    assert message in str(caught.value)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("name", ARCHITECTURES)
def test_what_transformers_saves_means_the_same(tmp_path, name):
    import transformers

    raw = CONFIGS[name]
    config_class = getattr(transformers, raw["architectures"][0].replace("ForCausalLM", "Config"))
    fields = {k: v for k, v in raw.items() if k not in ("model_type", "auto_map")}
    config_class(**fields, dtype="bfloat16").save_pretrained(tmp_path)
    _, config = read_config(tmp_path)
    assert config.model_dump() == read(name).model_dump()
    assert config.fused_layout_known  # written by transformers 5
