"""Checkpoints of one layout in another."""

from pathlib import Path

import pytest

pytest.importorskip("megatron.core", reason="megatron-core is not installed")

from megatron.core import dist_checkpointing
from safetensors.torch import load_file
from torch import Tensor

from isomodels.megatron.degrees import Degrees
from isomodels.megatron.process import start_process, stop_process
from tests.megatron.bits import assert_same_bits

LAYERS = {"num_hidden_layers": 2}
EIGHT_HEADS = {**LAYERS, "num_attention_heads": 8, "head_dim": 16}
HYBRID = {
    "num_hidden_layers": 4,
    "full_attention_interval": 2,
    "linear_num_key_heads": 4,
    "linear_num_value_heads": 8,
}
FIELDS = {
    "MiMoForCausalLM": EIGHT_HEADS,
    "Qwen3ForCausalLM": {**LAYERS, "tie_word_embeddings": True},
    "Qwen3_5MoeForCausalLM": HYBRID,
    "Qwen3NextForCausalLM": HYBRID,
}
CASES = [
    ("MiMoForCausalLM", "tp2,pp2", ("tp1", "tp4", "tp8", "dp2")),
    ("Qwen3MoeForCausalLM", "tp2,pp2", ("tp1", "tp4", "dp2,ep2")),
    ("Glm4MoeLiteForCausalLM", "tp2,sp,ep2", ("tp1", "dp2,ep2")),
    # the first stage has no experts, and so no optimizer for them
    ("DeepseekV3ForCausalLM", "pp2,tp2,ep2", ("tp1", "pp2", "dp2,ep2")),
    *[
        pytest.param(*case, marks=pytest.mark.slow)
        for case in (
            ("Qwen3ForCausalLM", "tp2,pp2", ("tp1", "tp4", "tp2,sp", "pp2", "pp2,dp2")),
            ("Qwen3ForCausalLM", "tp4", ("tp1", "pp2", "tp2,pp2")),
            ("Qwen3MoeForCausalLM", "tp2,sp,dp2,ep4", ("tp1", "tp4,ep2", "tp2,pp2", "dp4,ep4")),
            ("Glm4MoeLiteForCausalLM", "tp2,pp2", ("tp4,sp,ep4", "tp2,dp2,ep4", "pp2,dp2,ep2")),
            ("Qwen3_5MoeForCausalLM", "tp2,pp2", ("tp1", "tp4", "dp2,ep2", "pp2,vpp2")),
            ("Qwen3NextForCausalLM", "tp2,sp,ep2", ("tp1", "pp2", "tp4,ep4")),
        )
    ],
]


def assert_same_files(left: Path, right: Path) -> None:
    """Model and optimizer states of two checkpoints, as whole tensors."""
    a, b = (
        {
            key: value
            for key, value in dist_checkpointing.load_plain_tensors(str(path)).items()
            if isinstance(value, Tensor)  # the rest are objects of Megatron's
        }
        for path in (left, right)
    )
    assert a.keys() == b.keys()
    assert any(key.startswith("model.") or "core." in key for key in a)
    assert any(key.startswith("optimizer.state.exp_avg") for key in a)
    for key, tensor in a.items():
        assert_same_bits(tensor, b[key], key)


@pytest.mark.parametrize(("architecture", "first", "others"), CASES)
def test_a_checkpoint_of_any_layout_loads_in_any_other(
    trainers, tiny, sequences, tmp_path, architecture, first, others
):
    path = str(tiny(architecture, "bfloat16", **FIELDS.get(architecture, LAYERS)))
    saved = tmp_path / "saved"
    long_enough = [s for s in sequences if len(s) > 1]
    trainers(Degrees.parse(first).ranks).call(
        "train_and_save", path, "bfloat16", first, long_enough, str(saved)
    )
    weights = load_file(tmp_path / "saved-hf" / "model.safetensors")
    start_process()  # dist_checkpointing needs a process group, even to read
    try:
        for layout in others:
            out = tmp_path / layout
            ranks = trainers(Degrees.parse(layout).ranks)
            steps = ranks.call("load_and_save", path, "bfloat16", layout, str(saved), str(out))
            assert steps == 2
            assert_same_files(out, saved)
            exported = load_file(tmp_path / f"{layout}-hf" / "model.safetensors")
            assert exported.keys() == weights.keys()
            for name, tensor in weights.items():
                assert_same_bits(exported[name], tensor, name)
    finally:
        stop_process()
