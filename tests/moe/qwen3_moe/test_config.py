"""config.json of Qwen3-MoE, in the released form and as transformers 5 saves it."""

import json

import pytest

from isomodels.config import read_config
from isomodels.errors import ConfigError

# Qwen3-30B-A3B
RELEASED = {
    "architectures": ["Qwen3MoeForCausalLM"],
    "attention_bias": False,
    "attention_dropout": 0.0,
    "bos_token_id": 151643,
    "decoder_sparse_step": 1,
    "eos_token_id": 151645,
    "head_dim": 128,
    "hidden_act": "silu",
    "hidden_size": 2048,
    "initializer_range": 0.02,
    "intermediate_size": 6144,
    "max_position_embeddings": 40960,
    "max_window_layers": 48,
    "mlp_only_layers": [],
    "model_type": "qwen3_moe",
    "moe_intermediate_size": 768,
    "norm_topk_prob": True,
    "num_attention_heads": 32,
    "num_experts": 128,
    "num_experts_per_tok": 8,
    "num_hidden_layers": 48,
    "num_key_value_heads": 4,
    "output_router_logits": False,
    "rms_norm_eps": 1e-06,
    "rope_scaling": None,
    "rope_theta": 1000000.0,
    "router_aux_loss_coef": 0.001,
    "sliding_window": None,
    "tie_word_embeddings": False,
    "torch_dtype": "bfloat16",
    "transformers_version": "4.51.0",
    "use_cache": True,
    "use_sliding_window": False,
    "vocab_size": 151936,
}


def test_the_released_config():
    spec, config = read_config(RELEASED)
    assert spec.family == "moe"
    routing = config.routing
    assert (routing.num_experts, routing.top_k) == (128, 8)
    assert (routing.scoring, routing.normalize, routing.scale) == ("softmax", True, 1.0)
    assert not routing.correction_bias
    assert all(config.is_sparse(i) for i in range(48))
    assert config.fused_layout_known is False


def test_as_transformers_saves_it(tmp_path):
    from transformers import Qwen3MoeConfig

    names = ("architectures", "model_type", "transformers_version", "torch_dtype")
    fields = {k: v for k, v in RELEASED.items() if k not in names}
    theirs = Qwen3MoeConfig(**fields, dtype="bfloat16", architectures=RELEASED["architectures"])
    theirs.save_pretrained(tmp_path)
    raw = json.loads((tmp_path / "config.json").read_text())
    assert "num_experts" not in raw
    assert raw["num_local_experts"] == 128
    config = read_config(tmp_path)[1]
    released = read_config(RELEASED)[1]
    differ = {"layer_types"}
    assert config.model_dump(exclude=differ) == released.model_dump(exclude=differ)
    assert config.fused_layout_known


@pytest.mark.parametrize(
    ("changes", "dense"),
    [
        ({"decoder_sparse_step": 2}, [0, 2, 4]),
        ({"mlp_only_layers": [0, 5]}, [0, 5]),
        ({"decoder_sparse_step": 3, "mlp_only_layers": [2]}, [0, 1, 2, 3, 4]),
        ({"mlp_only_layers": None}, []),
    ],
)
def test_layers_without_experts_are_those_of_transformers(changes, dense):
    import torch
    from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM

    raw = RELEASED | {"num_hidden_layers": 6, "num_experts": 8} | changes
    config = read_config(raw)[1]
    assert [i for i in range(6) if not config.is_sparse(i)] == dense
    with torch.device("meta"):
        theirs = Qwen3MoeForCausalLM(Qwen3MoeConfig.from_dict(raw))
    assert [i for i in range(6) if not hasattr(theirs.model.layers[i].mlp, "experts")] == dense


@pytest.mark.parametrize(
    "field",
    [
        "num_experts",
        "num_experts_per_tok",
        "moe_intermediate_size",
        "norm_topk_prob",  # transformers would take False
        "decoder_sparse_step",
        "mlp_only_layers",
        "attention_bias",
    ],
)
def test_what_is_missing_is_named(field):
    with pytest.raises(ConfigError, match=f"{field} is missing"):
        read_config({k: v for k, v in RELEASED.items() if k != field})


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"num_experts_per_tok": 129}, "num_experts_per_tok 129 exceeds num_experts 128"),
        ({"num_experts_per_tok": 0}, "num_experts_per_tok = 0 is not supported"),
        ({"num_experts": 0}, "num_experts = 0"),
        ({"num_local_experts": 64}, "num_experts and num_local_experts differ"),
        ({"mlp_only_layers": [48]}, "mlp_only_layers names layer 48 of 48"),
        ({"mlp_only_layers": [-1]}, r"mlp_only_layers.0 = -1"),
        ({"decoder_sparse_step": 0}, "decoder_sparse_step = 0"),
        ({"decoder_sparse_step": 49}, "leave no layer with experts"),
        ({"attention_bias": True}, "attention_bias = True"),
        ({"norm_topk_prob": "yes"}, "norm_topk_prob = 'yes'"),
        ({"shared_expert_intermediate_size": 512}, "shared_expert_intermediate_size is unknown"),
        ({"n_group": 4}, "n_group is unknown"),
        ({"scoring_func": "sigmoid"}, "scoring_func is unknown"),
        ({"moe_intermediate_size": 0}, "moe_intermediate_size = 0"),
    ],
)
def test_what_is_not_implemented_is_named(changes, message):
    with pytest.raises(ConfigError, match=message):
        read_config(RELEASED | changes)


def test_a_field_of_ours_cannot_be_stated():
    config = read_config(RELEASED | {"fused_layout_known": True})[1]
    assert config.fused_layout_known is False
