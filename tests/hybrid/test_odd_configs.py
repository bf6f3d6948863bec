"""Configs and files at the edges of what is read: the same bits in every way, right against fp64,
and what released multimodal checkpoints say."""

import json

import pytest
import torch
from safetensors.torch import load_file, save_file

from isomodels.checkpoint import load_checkpoint, open_checkpoint, save_checkpoint
from isomodels.config import read_config
from isomodels.conversion import convert_checkpoint
from isomodels.errors import CheckpointError, ConfigError
from tests.hybrid import reference
from tests.hybrid.models import Engine, load_ours, make, run_packed, tokens
from tests.hybrid.test_invariance import results
from tests.kernel.battery import assert_same_bits
from tests.weights.dcp import whole, write_dcp
from tests.weights.support import assert_round_trip, raw_folder

LINEAR, FULL = "linear_attention", "full_attention"
SMALL = {
    "hidden_size": 64,
    "intermediate_size": 96,
    "vocab_size": 64,
    "head_dim": 32,
    "num_hidden_layers": 2,
    "layer_types": [LINEAR, FULL],
    "full_attention_interval": 2,
    "linear_key_head_dim": 8,
    "linear_value_head_dim": 16,
}
# one of each key head's values, more channels in keys than in values, and other places of layers
ODD = {
    "a value head a key head": {"linear_num_value_heads": 2, "linear_key_head_dim": 24},
    "one head, a window of one": {
        "linear_num_key_heads": 1,
        "linear_num_value_heads": 1,
        "linear_conv_kernel_dim": 2,
    },
    "three value heads a key head": {"linear_num_value_heads": 6, "linear_conv_kernel_dim": 7},
    "attention first": {
        "num_hidden_layers": 3,
        "layer_types": [FULL, FULL, LINEAR],
        "full_attention_interval": None,
        "num_key_value_heads": 4,
    },
    "recurrent last": {
        "num_hidden_layers": 5,
        "layer_types": [LINEAR, LINEAR, FULL, LINEAR, LINEAR],
        "full_attention_interval": 3,
        "num_key_value_heads": 1,
    },
    "all channels turn": {"head_dim": 20, "partial_rotary_factor": 1.0, "rms_norm_eps": 1e-3},
    "two channels turn": {"head_dim": 20, "partial_rotary_factor": 0.1, "rope_theta": 50.0},
}
NAMES = ("qwen3_5", "qwen3_5-tied", "qwen3_5_moe", "qwen3_next", "multimodal")


def changed(name, change):
    """The fields of a change in the form that the architecture's config has."""
    change = dict(change)
    rope = {"rope_theta": 10000000.0, "partial_rotary_factor": 0.25}
    rope = {key: change.pop(key, value) for key, value in rope.items()}
    if name == "qwen3_next":
        return SMALL | change | rope
    return SMALL | change | {"rope_parameters": {"rope_type": "default", **rope}}


# each config once, and each architecture at least once
@pytest.mark.parametrize(("odd", "name"), [(o, NAMES[i % 5]) for i, o in enumerate(ODD)])
def test_the_same_bits_in_every_way_and_the_numbers_of_fp64(tmp_path, odd, name):
    folder, ids = make(name, tmp_path, **changed(name, ODD[odd])), tokens(70, vocab=64)
    assert_round_trip(open_checkpoint(folder))
    model = load_ours(folder).requires_grad_(False)
    loaded = load_checkpoint(folder).state_dict()
    assert loaded.keys() == model.state_dict().keys()
    for key, tensor in model.state_dict().items():
        assert_same_bits(loaded[key], tensor, key)
    one = results(model, run_packed(model, ids))
    together = results(model, run_packed(model, ids, [1, 0, 2, 67]))
    alone = [results(model, run_packed(model, part)) for part in ids.split([1, 2, 67])]
    assert_same_bits(together, torch.cat(alone), "packed")
    engine = Engine(model, [70])
    steps = ids.split([1, 1, 5, 55, 1, 1, 1, 5])  # decodes over the end of the chunk
    assert_same_bits(
        torch.cat([results(model, engine.step({0: part})) for part in steps]), one, "in steps"
    )
    mine, right = model.logits(run_packed(model, ids)), reference.logits(folder, ids)
    # of the median token: where two experts score alike, fp64 may choose another
    assert ((mine - right).norm(dim=1) / right.norm(dim=1)).median() < 2e-5


def text_of(folder):
    return json.loads((folder / "config.json").read_text())


# what stands beside text_config, and contradicts it or is no config of this model
CONTRADICTIONS = {
    "hidden_size and that of text_config differ": {"hidden_size": 64},
    "vocab_size and that of text_config differ": {"vocab_size": 7},
    "layer_types and that of text_config differ": {"layer_types": [FULL] * 4},
    "rope_parameters and that of text_config differ": {
        "rope_parameters": {"rope_type": "default", "rope_theta": 1e4}
    },
    "mtp_num_hidden_layers and that of text_config differ": {"mtp_num_hidden_layers": 2},
    r"quantised weights \(quantization_config\) are not supported: use the bfloat16": {
        "quantization_config": {"quant_method": "fp8", "weight_block_size": [128, 128]}
    },
}


@pytest.mark.parametrize("sentence", CONTRADICTIONS)
def test_what_stands_beside_the_text_model(checkpoint, sentence):
    raw = text_of(checkpoint("multimodal"))
    with pytest.raises(ConfigError, match=sentence):
        read_config(raw | CONTRADICTIONS[sentence])


def test_what_may_stand_beside_the_text_model(checkpoint):
    raw = text_of(checkpoint("multimodal"))
    text = raw["text_config"]
    agreeing = {key: text[key] for key in ("hidden_size", "rope_parameters", "dtype")}
    # ids and the like reach no forward, whichever of the two is meant
    other = {"eos_token_id": [5, 6], "pad_token_id": 0, "initializer_range": 1.0}
    _, expected = read_config(raw)
    assert read_config(raw | agreeing | other)[1] == expected
    assert read_config(raw | {"text_config": text | {"architectures": None}})[1] == expected
    with pytest.raises(ConfigError, match="model_type of text_config is 'qwen3_5_moe_text'"):
        read_config(raw | {"text_config": text | {"model_type": "qwen3_5_moe_text"}})


@pytest.mark.parametrize("name", ["qwen3_5", "qwen3_5_moe", "qwen3_next"])
def test_quantised_weights_are_refused_with_a_remedy(checkpoint, name):
    raw = text_of(checkpoint(name))
    with pytest.raises(ConfigError, match="use the bfloat16 files"):
        read_config(raw | {"quantization_config": {"quant_method": "fp8"}})
    assert read_config(raw | {"quantization_config": None})[1] == read_config(raw)[1]


def in_a_multimodal_file(text, folder):
    """A text checkpoint as released multimodal ones hold it, with a vision tower beside."""
    raw, found = text_of(text), load_file(text / "model.safetensors")
    outer = text_of(make("multimodal", folder, torch.bfloat16))
    tower = load_file(folder / "model.safetensors")
    architecture = raw.pop("architectures")[0].replace("CausalLM", "ConditionalGeneration")
    outer |= {
        "architectures": [architecture],
        "model_type": raw["model_type"].removesuffix("_text"),
        "text_config": raw,
        "tie_word_embeddings": raw["tie_word_embeddings"],
    }
    (folder / "config.json").write_text(json.dumps(outer))
    found = {n.replace("model.", "model.language_model.", 1): t for n, t in found.items()}
    rewrite(folder, found | {n: t for n, t in tower.items() if n.startswith("model.visual.")})
    return folder


@pytest.mark.parametrize("name", ["qwen3_5", "qwen3_5-tied", "qwen3_5_moe"])
def test_the_text_of_a_multimodal_file_is_the_text_model(tmp_path, name):
    text = make(name, tmp_path / "text", torch.bfloat16, **changed(name, {}))
    if name == "qwen3_5_moe":
        rewrite(text, fused(load_file(text / "model.safetensors"), "model."))
    folder, ids = in_a_multimodal_file(text, tmp_path / "whole"), tokens(70, vocab=64)
    assert_round_trip(open_checkpoint(folder))
    alone, inside = (load_checkpoint(one).requires_grad_(False) for one in (text, folder))
    assert_same_bits(
        results(inside, run_packed(inside, ids)), results(alone, run_packed(alone, ids))
    )
    carrying = load_checkpoint(folder, carry_mtp=True)
    save_checkpoint(carrying, tmp_path / "saved", like=folder)
    assert (
        load_file(tmp_path / "saved" / "model.safetensors").keys()
        == load_file(folder / "model.safetensors").keys()
    )


def fused(tensors, inside):
    """Experts below names that contain `inside` as transformers 5 fuses them, the rest as it is."""
    found, experts = {}, {}
    for name, tensor in tensors.items():
        stem, apart, rest = name.partition(".experts.")
        if not apart or inside not in name:
            found[name] = tensor
            continue
        expert, matrix, _ = rest.split(".")
        experts.setdefault(f"{stem}.experts.", {})[int(expert), matrix] = tensor
    for stem, own in experts.items():
        every = range(1 + max(expert for expert, _ in own))
        pairs = [torch.cat([own[e, "gate_proj"], own[e, "up_proj"]]) for e in every]
        found[f"{stem}gate_up_proj"] = torch.stack(pairs)
        found[f"{stem}down_proj"] = torch.stack([own[e, "down_proj"] for e in every])
    return found


def with_mtp(name, path, **overrides):
    """A checkpoint with an MTP layer; that of Qwen3-Next comes from a twin in the other layout."""
    folder = make(name, path / name, torch.bfloat16, **overrides)
    if name == "qwen3_next":
        twin = make("qwen3_5_moe", path / "twin", torch.bfloat16, seed=1, **overrides)
        mtp = {n: t for n, t in load_file(twin / "model.safetensors").items() if "mtp." in n}
        raw = text_of(folder) | {"mtp_num_hidden_layers": 1}
        (folder / "config.json").write_text(json.dumps(raw))
        rewrite(folder, load_file(folder / "model.safetensors") | mtp)
    return folder


def rewrite(folder, tensors):
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})


@pytest.mark.parametrize("name", ["qwen3_5_moe", "qwen3_next"])
@pytest.mark.parametrize("inside", ["mtp.", "model.", ""])
def test_row_66_of_the_field_reports_experts_apart_or_fused_and_those_of_mtp(
    tmp_path, name, inside
):
    """Qwen3.5 has experts of MTP layers apart and others fused, later files have both fused."""
    folder = with_mtp(name, tmp_path, mtp_num_hidden_layers=1)
    apart = load_file(folder / "model.safetensors")
    straight = load_checkpoint(folder, carry_mtp=True).state_dict()
    assert any(n.startswith("mtp.") for n in straight)
    rewrite(folder, fused(apart, inside))
    module = load_checkpoint(folder, carry_mtp=True)
    assert module.state_dict().keys() == straight.keys()
    for key, tensor in module.state_dict().items():
        assert_same_bits(tensor, straight[key], key)
    assert not any(n.startswith("mtp.") for n in load_checkpoint(folder).state_dict())
    # saved as it was read, and any way through a Megatron folder, also one without MTP layers
    save_checkpoint(module, tmp_path / "saved", like=folder)
    wide = {n: t.float() if n.endswith("dt_bias") else t for n, t in fused(apart, inside).items()}
    rewrite(folder, wide)  # the module holds that one in float32
    assert raw_folder(tmp_path / "saved") == raw_folder(folder)
    convert_checkpoint(folder, tmp_path / "there", to="megatron")
    convert_checkpoint(tmp_path / "there", tmp_path / "back", experts="apart")
    run = load_checkpoint(folder).state_dict()
    write_dcp(tmp_path / "run", {f"core.{key}": whole(tensor) for key, tensor in run.items()})
    convert_checkpoint(tmp_path / "run", tmp_path / "completed", like=folder)
    rewrite(folder, {n: t.float() if n.endswith("dt_bias") else t for n, t in apart.items()})
    assert raw_folder(tmp_path / "back") == raw_folder(folder)
    assert raw_folder(tmp_path / "completed") == raw_folder(folder)


def test_fused_experts_of_mtp_whose_layout_nothing_tells(tmp_path):
    sizes = {"moe_intermediate_size": 64, "shared_expert_intermediate_size": 64}
    folder = make("qwen3_5_moe", tmp_path, torch.bfloat16, transformers_version="4.57.0", **sizes)
    rewrite(folder, fused(load_file(folder / "model.safetensors"), "mtp."))
    with pytest.raises(CheckpointError, match=r"mtp\.layers\.0\.mlp\.experts\.gate_up_proj is"):
        open_checkpoint(folder)
