"""Row 63 of the field reports: block-scaled float8 files are multiplied by their scales."""

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
from isomodels.errors import CheckpointError, ConfigError
from isomodels.weights_conv.fp8 import dequantise
from tests.kernel.battery import assert_same_bits
from tests.moe.mla.models import make

BLOCK = (32, 48)  # divides neither the rows nor the columns of most matrices
QUANTIZATION = {
    "activation_scheme": "dynamic",
    "fmt": "e4m3",
    "quant_method": "fp8",
    "weight_block_size": list(BLOCK),
}
KEPT = ("embed_tokens", "lm_head", "norm", "mlp.gate.", "shared_head.head", "eh_proj")


def quantise(weight):
    """(float8 [N, K], scales) as the released files hold them, and their product in bf16."""
    rows, columns = weight.shape
    counts = [-(-size // by) for size, by in zip(weight.shape, BLOCK, strict=True)]
    scales = torch.empty(counts)
    stored = torch.empty(rows, columns, dtype=torch.float8_e4m3fn)
    product = torch.empty(rows, columns, dtype=torch.bfloat16)
    for i in range(counts[0]):
        for j in range(counts[1]):
            one = slice(i * BLOCK[0], (i + 1) * BLOCK[0]), slice(j * BLOCK[1], (j + 1) * BLOCK[1])
            scales[i, j] = weight[one].abs().amax() / 448
            stored[one] = (weight[one] / scales[i, j]).to(torch.float8_e4m3fn)
            product[one] = (stored[one].float() * scales[i, j]).bfloat16()
    return stored, scales, product


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    """(fp8 checkpoint, tensors that it means)."""
    folder = make("deepseek", tmp_path_factory.mktemp("fp8"), torch.bfloat16)
    found, meant, files = load_file(folder / "model.safetensors"), {}, ({}, {})
    for index, (name, tensor) in enumerate(found.items()):
        stored = files[index % 2]
        if tensor.dim() == 1 or any(part in name for part in KEPT):
            stored[name] = meant[name] = tensor
            continue
        weight, scales, meant[name] = quantise(tensor.float())
        stored[name] = weight
        # In the released files a matrix and its scales may lie in two shards.
        files[(index // 3) % 2][f"{name}_scale_inv"] = scales
    (folder / "model.safetensors").unlink()
    shards = {f"model-0000{i + 1}-of-00002.safetensors": files[i] for i in range(2)}
    for file, stored in shards.items():
        save_file(stored, folder / file, metadata={"format": "pt"})
    weight_map = {name: file for file, stored in shards.items() for name in stored}
    index = {"metadata": {"total_size": 0}, "weight_map": weight_map}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    raw = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(raw | {"quantization_config": QUANTIZATION}))
    return folder, meant


def copy_with(folder, target, edit):
    """A copy of a folder with the tensors of both files, edited, in one."""
    stored = {}
    for file in folder.glob("*.safetensors"):
        stored |= load_file(file)
    edit(stored)
    target.mkdir()
    (target / "config.json").write_text((folder / "config.json").read_text())
    save_file(stored, target / "model.safetensors", metadata={"format": "pt"})
    return target


def test_values_are_products_of_block_and_scale(folders):
    folder, meant = folders
    opened = open_checkpoint(folder)
    assert opened.tensors.keys() == meant.keys()
    assert not any(t.dtype.itemsize == 1 for t in opened.tensors.meta().values())
    for name, expected in meant.items():
        assert_same_bits(opened.tensors[name], expected, name)
    weight = torch.full((3, 5), 2.0).to(torch.float8_e4m3fn)
    scales = torch.tensor([[1.0, 10.0], [100.0, 1000.0]])
    right = torch.tensor([[2.0] * 3 + [20] * 2] * 2 + [[200.0] * 3 + [2000] * 2])
    assert_same_bits(dequantise(weight, scales, (2, 3), torch.float32), right)
    # a block that is larger than any tensor takes no memory of its size
    large = dequantise(weight, torch.tensor([[0.5]]), (1 << 45, 1 << 44), torch.float32)
    assert_same_bits(large, torch.ones(3, 5))


def test_convert_and_save_write_plain_checkpoints(folders, tmp_path):
    folder, meant = folders
    written = convert_checkpoint(folder, tmp_path / "converted")
    module = load_checkpoint(folder, carry_mtp=True)
    save_checkpoint(module, tmp_path / "saved", like=folder)
    for path in (written.path, tmp_path / "saved"):
        assert "quantization_config" not in json.loads((path / "config.json").read_text())
        assert len(list(path.glob("*.safetensors"))) == 2
        tensors = open_checkpoint(path).tensors
        assert tensors.keys() == meant.keys()
        for name, expected in meant.items():
            assert_same_bits(tensors[name], expected, name)


def test_a_float8_tensor_without_scales_is_refused(folders, tmp_path):
    name = "model.layers.1.self_attn.kv_b_proj.weight"
    bare = copy_with(folders[0], tmp_path / "bare", lambda t: t.pop(f"{name}_scale_inv"))
    with pytest.raises(CheckpointError, match=f"without their scales.*: {name}; a cast alone"):
        open_checkpoint(bare)


def test_scales_that_do_not_fit_are_refused(folders, tmp_path):
    name = "model.layers.1.self_attn.kv_b_proj.weight"

    def cut(stored):
        stored[f"{name}_scale_inv"] = stored[f"{name}_scale_inv"][1:]

    def halve(stored):
        stored[f"{name}_scale_inv"] = stored[f"{name}_scale_inv"].bfloat16()

    for number, edit in enumerate((cut, halve)):
        folder = copy_with(folders[0], tmp_path / str(number), edit)
        with pytest.raises(CheckpointError, match=f"a block of 32 x 48: {name}"):
            open_checkpoint(folder)


def test_scales_of_a_plain_tensor_are_left_over(folders, tmp_path):
    name = "model.layers.1.self_attn.kv_b_proj.weight"

    def plain(stored):
        stored[name] = stored[name].bfloat16()

    folder = copy_with(folders[0], tmp_path / "plain", plain)
    with pytest.raises(CheckpointError, match=f"1 tensor left over: {name}_scale_inv"):
        open_checkpoint(folder)


def test_float8_without_a_quantization_config_is_refused(folders, tmp_path):
    folder = copy_with(folders[0], tmp_path / "silent", lambda stored: None)
    raw = json.loads((folder / "config.json").read_text())
    del raw["quantization_config"]
    (folder / "config.json").write_text(json.dumps(raw))
    with pytest.raises(CheckpointError, match=r"bfloat16 expected: .* is float8_e4m3fn"):
        open_checkpoint(folder)


def test_the_quantisation_of_v3_1_is_read(folders, tmp_path):
    """Its config.json has one field more; its scales are float32 powers of two."""
    folder, meant = folders
    newer = copy_with(folder, tmp_path / "newer", lambda stored: None)
    raw = json.loads((newer / "config.json").read_text())
    raw["quantization_config"] = {**QUANTIZATION, "scale_fmt": "ue8m0"}
    (newer / "config.json").write_text(json.dumps(raw))
    opened = open_checkpoint(newer)
    name = "model.layers.1.self_attn.kv_b_proj.weight"
    assert_same_bits(opened.tensors[name], meant[name], name)


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"scale_fmt": "e8m0"}, "scale_fmt = 'e8m0' is not supported"),
        ({"quant_method": "awq"}, "quant_method = 'awq' is not supported"),
        ({"fmt": "e5m2"}, "fmt = 'e5m2' is not supported"),
        ({"activation_scheme": "static"}, "activation_scheme = 'static' is not supported"),
        ({"weight_block_size": None}, "weight_block_size = None is not supported"),
        ({"weight_block_size": [128]}, r"weight_block_size = \[128\] is not supported"),
        ({"modules_to_not_convert": ["lm_head"]}, "modules_to_not_convert is unknown"),
    ],
)
def test_other_quantisations_are_refused(folders, tmp_path, changed, message):
    folder = copy_with(folders[0], tmp_path / "other", lambda stored: None)
    raw = json.loads((folder / "config.json").read_text())
    raw["quantization_config"] = {**QUANTIZATION, **changed}
    (folder / "config.json").write_text(json.dumps(raw))
    with pytest.raises(ConfigError, match=f"quantization_config.{message}"):
        open_checkpoint(folder)
