"""Rows 64 and 65 of the field reports: experts apart, fused or in mixed files; never a guess."""

import json

import pytest
import torch
from safetensors.torch import load_file, save_file

from isomodels.checkpoint import load_checkpoint, load_into, save_checkpoint
from isomodels.conversion import convert_checkpoint
from isomodels.errors import CheckpointError
from tests.checkpoints import make_qwen3_moe
from tests.dense.models import run_packed, tokens
from tests.kernel.battery import assert_same_bits
from tests.moe.qwen3_moe.models import load_ours
from tests.weights.support import edit_config, fill_with_any_bits, raw, raw_folder, write_index

FORMS = {"apart": False, "fused": True}
SQUARE = {"gate_up": {"moe_intermediate_size": 64}, "down": {"moe_intermediate_size": 128}}
forms = pytest.mark.parametrize("form", FORMS)


def state(folder):
    return {name: raw(t) for name, t in load_checkpoint(folder).state_dict().items()}


def write(folder, dtype=torch.bfloat16, **overrides):
    return make_qwen3_moe(folder, dtype, num_hidden_layers=2, **overrides)


def change(folder, function):
    """Rewrite the tensors of a one-file checkpoint."""
    tensors = load_file(folder / "model.safetensors")
    function(tensors)
    tensors = {name: t.contiguous() for name, t in tensors.items()}
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    return folder


def expert_tensors(folder):
    return [n for n in load_file(folder / "model.safetensors") if ".experts." in n]


def test_both_forms_hold_the_same_model(tmp_path):
    apart, fused = write(tmp_path / "apart"), write(tmp_path / "fused", fused=True)
    assert len(expert_tensors(apart)) == 24
    assert expert_tensors(fused) == [
        f"model.layers.1.mlp.experts.{name}" for name in ("down_proj", "gate_up_proj")
    ]
    by_hand = {name: raw(t) for name, t in load_ours(apart).state_dict().items()}
    assert state(apart) == state(fused) == by_hand


@forms
@pytest.mark.parametrize("shards", [1, 4])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_save_of_load_is_the_same_checkpoint(tmp_path, form, shards, dtype):
    source = fill_with_any_bits(write(tmp_path / "c", dtype, fused=FORMS[form]), shards=shards)
    for target in (tmp_path / "once", tmp_path / "twice"):
        save_checkpoint(load_checkpoint(source), target, like=source)
        assert raw_folder(target) == raw_folder(source)
        source = target


@forms
def test_what_is_saved_has_the_form_of_what_it_is_like(tmp_path, form):
    """A model loaded from one form is saved in the other, without loss."""
    other = "apart" if form == "fused" else "fused"
    source, like = (write(tmp_path / f, fused=FORMS[f]) for f in (form, other))
    fill_with_any_bits(source)
    save_checkpoint(load_checkpoint(source), tmp_path / "saved", like=like)
    assert set(expert_tensors(tmp_path / "saved")) == set(expert_tensors(like))
    assert state(tmp_path / "saved") == state(source)


@forms
def test_conversion_to_another_dtype(tmp_path, form):
    source = write(tmp_path / "c", torch.float32, fused=FORMS[form])
    convert_checkpoint(source, tmp_path / "out", dtype=torch.bfloat16)
    written = load_file(tmp_path / "out/model.safetensors")
    for name, tensor in load_file(source / "model.safetensors").items():
        assert_same_bits(written[name], tensor.bfloat16(), name)


def test_row_65_forms_mixed_over_layers_and_shards(tmp_path):
    apart, fused = (make_qwen3_moe(tmp_path / f, fused=FORMS[f]) for f in FORMS)
    expected = state(apart)
    tensors = [load_file(f / "model.safetensors") for f in (apart, fused)]
    first = {n: t for n, t in tensors[0].items() if "layers.2.mlp" not in n}
    second = {n: t for n, t in tensors[1].items() if "layers.2.mlp" in n}
    assert any(".experts.0." in n for n in first)
    assert "model.layers.2.mlp.experts.down_proj" in second
    (apart / "model.safetensors").unlink()
    files = {"model-00001-of-00002.safetensors": first, "model-00002-of-00002.safetensors": second}
    for name, part in files.items():
        save_file(part, apart / name, metadata={"format": "pt"})
    size = sum(t.nbytes for part in files.values() for t in part.values())
    write_index(apart, {t: f for f, part in files.items() for t in part}, size)
    assert state(apart) == expected
    save_checkpoint(load_checkpoint(apart), tmp_path / "saved", like=apart)
    assert raw_folder(tmp_path / "saved") == raw_folder(apart)


@forms
def test_row_65_a_missing_expert_is_an_error(tmp_path, form):
    folder = write(tmp_path / "c", fused=FORMS[form])
    *_, name = expert_tensors(folder)
    change(folder, lambda tensors: tensors.pop(name))
    lost = name if form == "apart" else r"model\.layers\.1\.mlp\.experts\.0\."
    with pytest.raises(CheckpointError, match=f"missing: {lost}"):
        load_checkpoint(folder)


def test_an_expert_too_many_is_an_error(tmp_path):
    folder, name = write(tmp_path / "c"), "model.layers.1.mlp.experts.8.up_proj.weight"
    change(folder, lambda tensors: tensors.update({name: torch.zeros(48, 128).bfloat16()}))
    with pytest.raises(CheckpointError, match=f"1 tensor left over: {name}"):
        load_checkpoint(folder)


def test_the_same_experts_in_both_forms_are_an_error(tmp_path):
    folder, name = write(tmp_path / "c"), "model.layers.1.mlp.experts.down_proj"
    change(folder, lambda tensors: tensors.update({name: torch.zeros(8, 128, 48).bfloat16()}))
    with pytest.raises(CheckpointError, match=f"same experts twice, as {name} and as .*0.down"):
        load_checkpoint(folder)


def transpose(tensors):
    for name in [n for n in tensors if n.endswith(("gate_up_proj", "down_proj"))]:
        tensors[name] = tensors[name].transpose(1, 2)


def test_row_64_experts_stored_transposed_are_refused(tmp_path):
    folder = change(write(tmp_path / "c", fused=True), transpose)
    with pytest.raises(
        CheckpointError, match=r"down_proj is \[8, 48, 128\] instead of \[8, 128, 48\]"
    ):
        load_checkpoint(folder)


@pytest.mark.parametrize("square", SQUARE)
@pytest.mark.parametrize("version", [None, "4.57.1", "main"])
def test_row_64_a_square_layout_that_nothing_tells_is_refused(tmp_path, square, version):
    """2 * I == H and I == H."""
    folder = write(tmp_path / "c", fused=True, **SQUARE[square])
    edit_config(folder, transformers_version=version)
    with pytest.raises(CheckpointError) as error:
        load_checkpoint(folder)
    shape = [8, 128, 128]
    assert f"{square}_proj is {shape}: its shape does not tell" in str(error.value)
    assert "save the experts one by one" in str(error.value)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize("square", SQUARE)
def test_row_64_a_square_layout_that_the_file_states_is_loaded(tmp_path, square):
    apart = write(tmp_path / "apart", **SQUARE[square])
    fused = write(tmp_path / "fused", fused=True, **SQUARE[square])
    edit_config(fused, transformers_version="5.18.0")
    assert state(apart) == state(fused)


@pytest.mark.parametrize("square", SQUARE)
@forms
def test_row_64_what_transformers_saves_is_loaded(tmp_path, square, form):
    """Both forms that transformers writes, 2 * I == H and I == H, against its own logits."""
    from transformers import Qwen3MoeForCausalLM

    source = write(tmp_path / "c", torch.float32, **SQUARE[square])
    theirs = Qwen3MoeForCausalLM.from_pretrained(source).eval()
    theirs.save_pretrained(tmp_path / "saved", save_original_format=form == "apart")
    assert ("0.up_proj" in " ".join(expert_tensors(tmp_path / "saved"))) == (form == "apart")
    assert state(tmp_path / "saved") == state(source)
    ids, model = tokens(30), load_checkpoint(tmp_path / "saved")
    with torch.no_grad():
        mine, other = model.logits(run_packed(model, ids)), theirs(ids[None]).logits[0]
    torch.testing.assert_close(mine, other, atol=1e-4, rtol=1e-4)


def test_transformers_loads_what_is_saved(tmp_path):
    from transformers import Qwen3MoeForCausalLM

    source = write(tmp_path / "c", torch.float32)
    model, ids = load_checkpoint(source), tokens(30)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(1.03125)
        save_checkpoint(model, tmp_path / "saved", like=source)
        theirs = Qwen3MoeForCausalLM.from_pretrained(tmp_path / "saved").eval()
        mine, other = model.logits(run_packed(model, ids)), theirs(ids[None]).logits[0]
    torch.testing.assert_close(mine, other, atol=1e-4, rtol=1e-4)


def test_a_version_of_transformers_makes_no_other_model(tmp_path):
    """The same model saved by another release can be loaded into a live one."""
    apart, fused = write(tmp_path / "apart"), write(tmp_path / "fused", fused=True)
    edit_config(fused, transformers_version="5.18.0")
    model = load_checkpoint(apart)
    with torch.no_grad():
        model.model.layers[1].mlp.experts.down_proj.zero_()
    load_into(model, fused)
    assert {n: raw(t) for n, t in model.state_dict().items()} == state(apart)
    assert json.loads((fused / "config.json").read_text())["transformers_version"] == "5.18.0"
