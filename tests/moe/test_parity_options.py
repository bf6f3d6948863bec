"""`isomodels parity` on a config of experts: fewer layers of it, and names of architectures."""

from pathlib import Path

import pytest

from isomodels.cli.parity import _named, _with_layers
from isomodels.config import read_config
from isomodels.errors import UnsupportedError
from isomodels.parity.checkpoints import tiny_config
from tests.moe.qwen3_moe.test_config import RELEASED

HERE = Path("models")
KINDS = {"deepseek_v3": "DeepseekV3", "glm4_moe_lite": "Glm4MoeLite", "qwen3_moe": "Qwen3Moe"}


@pytest.mark.parametrize("model_type", KINDS)
def test_an_architecture_is_named_by_its_model_type_too(model_type):
    assert _named(model_type) == f"{KINDS[model_type]}ForCausalLM"


@pytest.mark.parametrize("name", ["deepseek_v3", "glm4_moe_lite"])
@pytest.mark.parametrize("count", [2, 3])
def test_the_kinds_of_fewer_layers(name, count):
    """As transformers 5 saves a config: the kind of every layer."""
    raw = tiny_config(_named(name)) | {"dtype": "bfloat16"}
    del raw["first_k_dense_replace"]
    raw["mlp_layer_types"] = ["dense", "sparse", "sparse"]
    _, config = read_config(_with_layers(raw, count, HERE))
    assert config.mlp_layer_types == raw["mlp_layer_types"][:count]
    with pytest.raises(UnsupportedError, match=r"kinds of 3 layers \(mlp_layer_types\)"):
        _with_layers(raw, 4, HERE)
    assert len(raw["mlp_layer_types"]) == 3  # of the caller


def test_layers_without_experts_beyond_the_last_are_left_out():
    raw = RELEASED | {"mlp_only_layers": [0, 3, 40]}
    _, config = read_config(_with_layers(raw, 4, HERE))
    assert [config.is_sparse(i) for i in range(4)] == [False, True, True, False]
