"""Files of the latent-attention families: loading, saving, casting, and what is refused."""

import json

import pytest
import torch
from safetensors.torch import load_file, save_file

from isomodels.checkpoint import (
    load_checkpoint,
    open_checkpoint,
    save_checkpoint,
)
from isomodels.conversion import convert_checkpoint
from isomodels.errors import CheckpointError
from tests.kernel.battery import DTYPES, assert_same_bits
from tests.moe.mla.models import ARCHITECTURES, load_ours

BIAS = "model.layers.1.mlp.gate.e_score_correction_bias"


def tensors_of(folder):
    return load_file(folder / "model.safetensors")


def copy_with(folder, target, edit):
    stored = tensors_of(folder)
    edit(stored)
    target.mkdir()
    (target / "config.json").write_text((folder / "config.json").read_text())
    save_file(stored, target / "model.safetensors", metadata={"format": "pt"})
    return target


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", ARCHITECTURES)
def test_load_and_save(checkpoint, tmp_path, name, dtype):
    folder = checkpoint(name, dtype)
    module = load_checkpoint(folder, carry_mtp=True)
    by_hand = load_ours(folder, carry_mtp=True).state_dict()
    assert module.state_dict().keys() == by_hand.keys()
    for key, tensor in module.state_dict().items():
        assert_same_bits(tensor, by_hand[key], key)
    save_checkpoint(module, tmp_path / "saved", like=folder)
    saved, source = tensors_of(tmp_path / "saved"), tensors_of(folder)
    assert saved.keys() == source.keys()
    for key, tensor in source.items():
        assert_same_bits(saved[key], tensor, key)


def test_row_37_a_cast_leaves_the_correction_bias(checkpoint, tmp_path):
    def fine(stored):
        for key in [k for k in stored if k.endswith("e_score_correction_bias")]:
            stored[key] = 7 + 0.25 * torch.rand(16, generator=torch.Generator().manual_seed(1))

    source = copy_with(checkpoint("deepseek"), tmp_path / "source", fine)
    bias = tensors_of(source)[BIAS]
    assert len(bias.bfloat16().unique()) < 9 < len(bias.unique())
    written = convert_checkpoint(source, tmp_path / "cast", dtype=torch.bfloat16)
    stored = tensors_of(written.path)
    assert stored["lm_head.weight"].dtype == torch.bfloat16
    for key in (BIAS, BIAS.replace("layers.1", "layers.3")):
        assert_same_bits(stored[key], bias, key)
    for module in (
        load_checkpoint(source, dtype=torch.bfloat16, cast=True, carry_mtp=True),
        load_checkpoint(written.path, carry_mtp=True).bfloat16(),
    ):
        assert_same_bits(module.state_dict()[BIAS], bias, "loaded")
        save_checkpoint(module, tmp_path / "again", like=source)
        assert_same_bits(tensors_of(tmp_path / "again")[BIAS], bias, "saved")


def test_a_module_whose_bias_was_rounded_is_not_saved(checkpoint, tmp_path):
    folder = checkpoint("glm", torch.bfloat16)
    module = load_checkpoint(folder, carry_mtp=True)
    gate = module.model.layers[1].mlp.gate
    gate.e_score_correction_bias = gate.e_score_correction_bias.bfloat16()
    with pytest.raises(CheckpointError, match=f"float32 expected: {BIAS} is bfloat16"):
        save_checkpoint(module, tmp_path / "saved", like=folder)


@pytest.mark.parametrize(
    ("edit", "message"),
    [
        (lambda t: t.pop(BIAS), f"1 tensor missing: {BIAS}"),
        (lambda t: t.update({BIAS: t[BIAS].bfloat16()}), f"float32 expected: {BIAS} is bfloat16"),
        (lambda t: t.update({BIAS: t[BIAS][:-1].clone()}), rf"{BIAS} is \[15\] instead of \[16\]"),
        (
            lambda t: t.pop("model.layers.3.eh_proj.weight"),
            "1 tensor missing: model.layers.3.eh_proj.weight",
        ),
        (
            lambda t: t.update({"model.layers.4.enorm.weight": torch.ones(128)}),
            "1 tensor left over: model.layers.4.enorm.weight",
        ),
    ],
)
def test_files_that_do_not_fit_are_refused(checkpoint, tmp_path, edit, message):
    folder = copy_with(checkpoint("deepseek"), tmp_path / "edited", edit)
    with pytest.raises(CheckpointError, match=message):
        open_checkpoint(folder)


def test_fused_experts_are_read_and_written_as_they_are(checkpoint, tmp_path):
    """transformers 5 saves them so if it is asked to; MTP layers it does not save at all."""
    source = checkpoint("moonlight", torch.bfloat16)

    def fuse(stored):
        for layer in (1, 2):
            prefix = f"model.layers.{layer}.mlp.experts."

            def take(expert, part, prefix=prefix):
                return stored.pop(f"{prefix}{expert}.{part}.weight")

            gate_up = [torch.cat([take(e, "gate_proj"), take(e, "up_proj")]) for e in range(8)]
            stored[f"{prefix}gate_up_proj"] = torch.stack(gate_up)
            stored[f"{prefix}down_proj"] = torch.stack([take(e, "down_proj") for e in range(8)])

    fused = copy_with(source, tmp_path / "fused", fuse)
    one, two = load_checkpoint(source), load_checkpoint(fused)
    for key, tensor in one.state_dict().items():
        assert_same_bits(two.state_dict()[key], tensor, key)
    save_checkpoint(two, tmp_path / "saved", like=fused)
    assert tensors_of(tmp_path / "saved").keys() == tensors_of(fused).keys()


def test_a_trainer_that_dropped_mtp_cannot_save(checkpoint, tmp_path):
    folder = checkpoint("glm", torch.bfloat16)
    with pytest.raises(CheckpointError, match="load it with carry_mtp=True"):
        save_checkpoint(load_checkpoint(folder), tmp_path / "saved", like=folder)


def test_the_eps_of_latents_stays_in_the_config(checkpoint, tmp_path):
    folder = checkpoint("glm", torch.bfloat16)
    module = load_checkpoint(folder, carry_mtp=True)
    save_checkpoint(module, tmp_path / "saved", like=folder)
    assert json.loads((tmp_path / "saved" / "config.json").read_text())["latent_norm_eps"] == 1e-6
