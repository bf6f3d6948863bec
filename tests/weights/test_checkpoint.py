"""A module from a checkpoint and back: strict, and the same bits."""

import json
import re
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from isomodels.checkpoint import (
    load_checkpoint,
    load_into,
    open_checkpoint,
    save_checkpoint,
)
from isomodels.conversion import (
    convert_checkpoint,
    plan_conversion,
    run_conversion,
)
from isomodels.errors import CheckpointError, ConfigError
from isomodels.stored_weights import open_weights
from isomodels.weights_conv import write as write_module
from tests.weights.conftest import DTYPES, KINDS
from tests.weights.support import any_bits, edit_config, raw, raw_folder

both_dtypes = pytest.mark.parametrize("dtype", list(DTYPES))
all_kinds = pytest.mark.parametrize("kind", KINDS)
all_shards = pytest.mark.parametrize("shards", [1, 3])


def small_files(folder: Path) -> dict[str, bytes]:
    return {
        p.name: p.read_bytes()
        for p in folder.iterdir()
        if p.suffix != ".safetensors" and not p.name.endswith(".index.json")
    }


def placed(folder: Path) -> dict[str, set[str]]:
    return {file.name: set(load_file(file)) for file in folder.glob("*.safetensors")}


@all_kinds
@both_dtypes
@all_shards
def test_save_of_load_is_the_same_checkpoint(made, tmp_path, kind, dtype, shards) -> None:
    """Rows 66, 68, 69 and 74: the same keys (MTP, a repeated tied head), the same bits, the real
    vocabulary, MTP halves unswapped; again after a second round."""
    source = made(kind, dtype, shards)
    for target in (tmp_path / "once", tmp_path / "twice"):
        save_checkpoint(load_checkpoint(source, carry_mtp=True), target, like=source)
        assert raw_folder(target) == raw_folder(source)
        assert placed(target) == placed(source)
        assert small_files(target) == small_files(source)
        source = target


@both_dtypes
def test_the_module_has_the_files_bits(made, dtype) -> None:
    source = made("mimo", dtype, 3)
    state = load_checkpoint(source, carry_mtp=True).state_dict()
    hf = {name: t for file in source.glob("*.safetensors") for name, t in load_file(file).items()}
    expected = {}
    for name in hf:
        if "mtp_layers" in name or not name.split(".")[-2].endswith(("q_proj", "gate_proj")):
            expected[name] = hf[name]
    for name in list(hf):
        if "mtp_layers" in name:
            continue
        for first, others, fused in (
            ("q_proj", ("k_proj", "v_proj"), "qkv_proj"),
            ("gate_proj", ("up_proj",), "gate_up_proj"),
        ):
            if f".{first}." in name:
                rest = [expected.pop(name.replace(first, other)) for other in others]
                expected[name.replace(first, fused)] = torch.cat([hf[name], *rest])
    assert {n: raw(t) for n, t in state.items()} == {n: raw(t) for n, t in expected.items()}


def test_an_engine_leaves_out_what_is_only_carried(made, tmp_path) -> None:
    source = made("mimo", "bfloat16", 1)
    engine, trainer = load_checkpoint(source), load_checkpoint(source, carry_mtp=True)
    assert not [name for name in engine.state_dict() if "mtp" in name]
    assert not [name for name, _ in trainer.named_parameters() if "mtp" in name]
    assert len([name for name in trainer.state_dict() if "mtp" in name]) == 2 * 16
    with pytest.raises(CheckpointError, match="carry_mtp=True"):
        save_checkpoint(engine, tmp_path / "out", like=source)


def test_tied_sides_change_together(changeable, tmp_path) -> None:
    """Row 68: after a change of the one tensor, both names in the file have it."""
    source = changeable("qwen3-tied-with-head")
    module = load_checkpoint(source)
    assert module.head_weight is module.model.embed_tokens.weight
    new = any_bits(*module.head_weight.shape, dtype=torch.bfloat16, seed=99)
    with torch.no_grad():
        module.model.embed_tokens.weight.copy_(new)
    save_checkpoint(module, source, like=source)
    saved = raw_folder(source)
    assert saved["lm_head.weight"] == saved["model.embed_tokens.weight"] == raw(new)


@pytest.mark.parametrize("kind", ["qwen3", "mimo"])
def test_an_untied_head_must_be_there(changeable, kind) -> None:
    """Row 68: a missing head is never replaced by the embedding."""
    source = changeable(kind)
    drop(source, "lm_head.weight")
    with pytest.raises(CheckpointError, match=r"1 tensor missing: lm_head\.weight"):
        load_checkpoint(source)


def test_a_tied_head_with_other_bits(changeable) -> None:
    """Row 68: neither of two different tensors is taken silently."""
    source = changeable("qwen3-tied-with-head")
    file = source / "model.safetensors"
    tensors = load_file(file)
    tensors["lm_head.weight"].view(torch.int16)[-1, -1] ^= 1
    save_file(tensors, file)
    with pytest.raises(CheckpointError, match=r"ties lm_head\.weight to model\.embed_tokens"):
        open_checkpoint(source)


def test_a_padded_vocabulary_does_not_reach_the_file(changeable, tmp_path) -> None:
    """Row 69: vocabulary 1003; a host's padded rows are refused on the way out and in."""
    source = changeable()
    module = load_checkpoint(source)
    save_checkpoint(module, tmp_path / "out", like=source)
    assert raw_folder(tmp_path / "out")["lm_head.weight"][0] == [1003, 64]
    module.lm_head.weight = torch.nn.Parameter(torch.zeros(1024, 64, dtype=torch.bfloat16))
    with pytest.raises(CheckpointError, match=r"lm_head\.weight is \[1024, 64\] instead of"):
        save_checkpoint(module, tmp_path / "out", like=source)
    file = source / "model.safetensors"
    tensors = load_file(file)
    save_file({**tensors, "lm_head.weight": torch.zeros(1024, 64).bfloat16()}, file)
    with pytest.raises(CheckpointError, match=r"lm_head\.weight is \[1024, 64\] instead of"):
        load_checkpoint(source)


ROPE_FORMS = {
    "transformers 4": {"rope_theta": 5e6, "rope_scaling": None},
    "transformers 5": {"rope_parameters": {"rope_theta": 5e6, "rope_type": "default"}},
}


@pytest.mark.parametrize("form", ROPE_FORMS)
def test_both_forms_of_rope_theta_survive_a_save(changeable, tmp_path, form) -> None:
    """Row 70: no form loses its theta, on the way in or out."""
    source = edit_config(changeable(), **{"rope_theta": None, **ROPE_FORMS[form]})
    module = load_checkpoint(source)
    assert module.config.rope_theta == 5e6
    assert module.model.layers[0].self_attn.rope.table_key[1] == 5e6
    save_checkpoint(module, tmp_path / "out", like=source)
    convert_checkpoint(source, tmp_path / "cast", dtype=torch.float32)
    for folder in ("out", "cast"):
        assert open_checkpoint(tmp_path / folder).config.rope_theta == 5e6


@pytest.mark.parametrize("rope", [None, {"rope_type": "default"}])
def test_an_absent_rope_theta_is_an_error(changeable, rope) -> None:
    """Row 70: transformers takes 10000."""
    source = edit_config(changeable(), rope_theta=None, rope_parameters=rope)
    with pytest.raises(ConfigError, match="rope_theta is missing"):
        load_checkpoint(source)


def test_mtp_input_projection_keeps_its_halves(made, tmp_path) -> None:
    """Row 74: columns [hidden | embed] stay as they are, through ten saves."""
    source = made("mimo", "bfloat16", 1)
    name = "model.mtp_layers.1.input_proj.weight"
    before = raw_folder(source)[name]
    assert before[0] == [64, 128]
    for i in range(10):
        save_checkpoint(load_checkpoint(source, carry_mtp=True), tmp_path / str(i), like=source)
        source = tmp_path / str(i)
    assert raw_folder(source)[name] == before


@pytest.mark.parametrize(
    ("kind", "extra"),
    [
        ("mimo", "model.layers.0.self_attn.q_norm.weight"),  # row 75: MiMo has no qk-norm
        ("qwen3", "model.layers.0.self_attn.q_proj.bias"),
        ("qwen3", "model.mtp_layers.0.input_proj.weight"),
        ("mimo", "model.mtp_layers.2.input_proj.weight"),
        ("qwen3", "model.layers.2.input_layernorm.weight"),
        ("qwen3", "model.layers.0.self_attn.rotary_emb.inv_freq"),
    ],
)
def test_a_tensor_too_many(changeable, kind, extra) -> None:
    """Rows 54 and 75: no tensor is ignored."""
    source = changeable(kind)
    file = source / "model.safetensors"
    save_file({**load_file(file), extra: torch.zeros(1).bfloat16()}, file)
    with pytest.raises(CheckpointError, match=f"1 tensor left over: {extra}"):
        load_checkpoint(source)


@pytest.mark.parametrize(
    "name",
    [
        "model.layers.0.self_attn.q_proj.bias",  # row 75: MiMo has a bias on q, k and v
        "model.mtp_layers.0.mlp.up_proj.weight",  # row 66
        "model.layers.1.mlp.gate_proj.weight",
    ],
)
def test_a_tensor_too_few(changeable, name) -> None:
    source = changeable("mimo")
    drop(source, name)
    for carry_mtp in (False, True):
        with pytest.raises(CheckpointError, match=f"1 tensor missing: {name}"):
            load_checkpoint(source, carry_mtp=carry_mtp)


def drop(checkpoint: Path, name: str) -> None:
    file = checkpoint / "model.safetensors"
    tensors = load_file(file)
    del tensors[name]
    save_file(tensors, file)


def test_a_tensor_of_another_dtype(changeable) -> None:
    source = changeable()
    file = source / "model.safetensors"
    tensors = load_file(file)
    tensors["model.norm.weight"] = tensors["model.norm.weight"].float()
    save_file(tensors, file)
    with pytest.raises(CheckpointError, match=r"bfloat16 expected: model\.norm\.weight is float32"):
        load_checkpoint(source)


def test_a_config_that_names_another_dtype(changeable) -> None:
    source = edit_config(changeable(), torch_dtype="float32")
    with pytest.raises(CheckpointError, match=r"float32 expected: .* and 19 more"):
        load_checkpoint(source)


def test_a_dtype_is_never_cast_unasked(made, tmp_path) -> None:
    source = made("mimo", "float32", 1)
    with pytest.raises(CheckpointError, match="is float32, bfloat16 was asked for"):
        load_checkpoint(source, dtype=torch.bfloat16)
    cast = load_checkpoint(source, dtype=torch.bfloat16, carry_mtp=True, cast=True)
    hf = load_file(source / "model.safetensors")
    save_checkpoint(cast, tmp_path / "out", like=source)
    expected = {name: raw(tensor.to(torch.bfloat16)) for name, tensor in hf.items()}
    assert raw_folder(tmp_path / "out") == expected
    assert open_checkpoint(tmp_path / "out").dtype == torch.bfloat16


def test_load_into_changes_nothing_on_an_error(made, changeable) -> None:
    module = load_checkpoint(made("qwen3", "bfloat16", 1))
    before = {name: raw(t) for name, t in module.state_dict().items()}
    source = changeable(shards=3)
    last = sorted(source.glob("*.safetensors"))[-1]
    last.write_bytes(last.read_bytes()[:-1])
    with pytest.raises(CheckpointError, match="truncated"):
        load_into(module, source)
    with pytest.raises(CheckpointError, match="is float32, bfloat16 was asked for"):
        load_into(module, made("qwen3", "float32", 1))
    assert {name: raw(t) for name, t in module.state_dict().items()} == before


def test_load_into_replaces_the_values(made) -> None:
    source = made("qwen3", "bfloat16", 3)
    module = load_checkpoint(source)
    before = {name: raw(t) for name, t in module.state_dict().items()}
    for parameter in module.parameters():
        parameter.data.zero_()
    load_into(module, source)
    assert {name: raw(t) for name, t in module.state_dict().items()} == before


def test_another_config_is_named(made, changeable, tmp_path) -> None:
    module = load_checkpoint(made("qwen3", "bfloat16", 1))
    other = edit_config(changeable(), rope_theta=5.0)
    for call in (
        lambda: load_into(module, other),
        lambda: save_checkpoint(module, tmp_path / "out", like=other),
    ):
        with pytest.raises(CheckpointError, match=r"rope_theta \(1000000\.0 and 5\.0\)"):
            call()


def test_a_meta_module_is_not_filled_silently(made) -> None:
    source = made("qwen3", "bfloat16", 1)
    with pytest.raises(ValueError, match="meta"):
        load_checkpoint(source, device="meta")


@all_kinds
@pytest.mark.parametrize("size", [None, 1, 100_000])
def test_convert_keeps_every_bit(made, tmp_path, kind, size) -> None:
    source = made(kind, "bfloat16", 3)
    convert_checkpoint(source, tmp_path / "out", max_shard_size=size)
    assert raw_folder(tmp_path / "out") == raw_folder(source)
    assert small_files(tmp_path / "out") == small_files(source)
    if size is None:
        assert placed(tmp_path / "out") == placed(source)


def test_convert_casts_when_asked(made, tmp_path) -> None:
    source = made("qwen3", "bfloat16", 1)
    convert_checkpoint(source, tmp_path / "wide", dtype=torch.float32)
    hf = load_file(source / "model.safetensors")
    assert raw_folder(tmp_path / "wide") == {n: raw(t.float()) for n, t in hf.items()}
    # Widening is exact, and narrowing brings every number back; only NaNs lose their payload.
    convert_checkpoint(tmp_path / "wide", tmp_path / "back", dtype=torch.bfloat16)
    for name, tensor in load_file(tmp_path / "back" / "model.safetensors").items():
        numbers = ~hf[name].isnan()
        assert raw(tensor[numbers]) == raw(hf[name][numbers])
        assert raw(tensor.isnan().float()) == raw(hf[name].isnan().float())


def test_convert_reads_back_what_it_wrote(made, tmp_path, monkeypatch) -> None:
    """A disk that drops a bit is seen before the folder takes its place."""

    def write(folder, *arguments) -> None:
        write_shards(folder, *arguments)
        file = folder / "model.safetensors"
        content = bytearray(file.read_bytes())
        content[-1] ^= 1
        file.write_bytes(content)

    write_shards = write_module.write_shards
    monkeypatch.setattr(write_module, "write_shards", write)
    source = made("qwen3", "bfloat16", 1)
    last = re.escape(last_tensor(source))
    with pytest.raises(CheckpointError, match=rf"out read back differs in {last}$"):
        convert_checkpoint(source, tmp_path / "out")
    assert list(tmp_path.iterdir()) == []
    plan = plan_conversion(open_weights(source), to="hf")
    run_conversion(plan, tmp_path / "out", verify=False)  # asked for
    assert raw_folder(tmp_path / "out").keys() == raw_folder(source).keys()


def last_tensor(checkpoint: Path) -> str:
    content = (checkpoint / "model.safetensors").read_bytes()
    header = json.loads(content[8 : 8 + int.from_bytes(content[:8], "little")])
    del header["__metadata__"]
    return max(header, key=lambda name: header[name]["data_offsets"])
