"""Conversions between Hugging Face and Megatron folders: every architecture, every bit."""

import hashlib
import json
import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from isomodels.conversion import convert_checkpoint, plan_conversion
from isomodels.errors import CheckpointError
from isomodels.registry import architectures
from isomodels.stored_weights import open_weights
from tests.checkpoints import make_mimo, make_qwen3, make_qwen3_moe
from tests.hybrid.checkpoints import (
    make_multimodal,
    make_qwen3_5,
    make_qwen3_5_moe,
    make_qwen3_next,
)
from tests.moe.mla.models import make as make_latent
from tests.weights.dcp import grid, write_dcp
from tests.weights.support import any_bits, edit_config, raw, raw_folder

BF16 = torch.bfloat16
MAKERS = {
    "qwen3": lambda path: make_qwen3(path, BF16),
    "qwen3-tied": lambda path: make_qwen3(path, BF16, tied=True),
    "mimo": lambda path: make_mimo(path, BF16),
    "qwen3-moe": lambda path: make_qwen3_moe(path, BF16),
    "qwen3-moe-fused": lambda path: make_qwen3_moe(path, BF16, fused=True),
    "deepseek": lambda path: make_latent("deepseek", path, BF16),
    "moonlight": lambda path: make_latent("moonlight", path, BF16),
    "glm": lambda path: make_latent("glm", path, BF16),
    "qwen3_5": lambda path: make_qwen3_5(path, BF16),
    "qwen3_5-tied": lambda path: make_qwen3_5(path, BF16, tied=True),
    "qwen3_5-multimodal": lambda path: make_multimodal(path, BF16),
    "qwen3_5-moe": lambda path: make_qwen3_5_moe(path, BF16),
    "qwen3-next": lambda path: make_qwen3_next(path, BF16),
}
# float32 in a module, and in files in either dtype: what is read back is wider, and equal
WIDENED = ("A_log", "dt_bias", "linear_attn.norm.weight")


@pytest.fixture(scope="session")
def source(tmp_path_factory: pytest.TempPathFactory):
    """source(kind) -> a checkpoint of random bit patterns that no test may change."""
    root = tmp_path_factory.mktemp("sources")

    def get(kind: str) -> Path:
        path = root / kind
        if not path.exists():
            MAKERS[kind](path)
            (path / "generation_config.json").write_text('{"do_sample": true}')
            file = path / "model.safetensors"
            found = load_file(file)
            save_file(
                {
                    name: any_bits(*tensor.shape, dtype=tensor.dtype, seed=seed)
                    for seed, (name, tensor) in enumerate(sorted(found.items()))
                },
                file,
                metadata={"format": "pt"},
            )
        return path

    return get


def digest(folder: Path) -> str:
    """Of every name and byte."""
    whole = hashlib.sha256()
    for file in sorted(folder.rglob("*")):
        whole.update(str(file.relative_to(folder)).encode())
        whole.update(file.read_bytes() if file.is_file() else b"")
    return whole.hexdigest()


def widened(folder: Path) -> dict[str, tuple[list[int], bytes]]:
    """Tensors of a one-file checkpoint, those that a module widens as it does."""
    found = load_file(folder / "model.safetensors")
    return {n: raw(t.float() if n.endswith(WIDENED) else t) for n, t in found.items()}


def small_files(folder: Path) -> dict[str, bytes]:
    names = ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja", "config.json")
    return {n: (folder / n).read_bytes() for n in (*names, "generation_config.json")}


def test_every_architecture_is_here(source) -> None:
    kinds = {
        json.loads((source(k) / "config.json").read_text())["architectures"][0] for k in MAKERS
    }
    missing = architectures().keys() - kinds
    # the same module in another folder, as the dense one's is
    assert missing <= {"Qwen3_5MoeForConditionalGeneration"}


@pytest.mark.parametrize("kind", MAKERS)
def test_row_66_of_the_field_reports_there_and_back_is_the_same(source, tmp_path, kind) -> None:
    """MTP layers, vision tower, tied heads, float32 biases and A_log: names and bits."""
    path = source(kind)
    before = digest(path)
    there = convert_checkpoint(path, tmp_path / "there", to="megatron")
    assert there.layout == "megatron"
    fused = "fused" if kind.endswith("fused") else None
    convert_checkpoint(there.path, tmp_path / "back", experts=fused)
    assert raw_folder(tmp_path / "back") == widened(path)
    assert small_files(tmp_path / "back") == small_files(path) == small_files(there.path)
    assert digest(path) == before


@pytest.mark.parametrize("target", ["hf", "megatron"])
def test_row_68_of_the_field_reports_a_head_that_is_tied_and_repeated(tmp_path, target) -> None:
    """A Hugging Face copy keeps it; Megatron has one tensor, and none is repeated after that."""
    path = make_qwen3(tmp_path / "hf", BF16, tied=True)
    found = load_file(path / "model.safetensors")
    found["lm_head.weight"] = found["model.embed_tokens.weight"].clone()
    save_file(found, path / "model.safetensors", metadata={"format": "pt"})
    there = convert_checkpoint(path, tmp_path / "there", to=target)
    assert "core.lm_head.weight" not in {name for name, _ in there.stored}
    convert_checkpoint(there, tmp_path / "back")
    expected = raw_folder(path)
    if target == "megatron":
        del expected["lm_head.weight"]
    assert raw_folder(tmp_path / "back") == expected


def test_row_63_of_the_field_reports_float8_is_multiplied_on_the_way(tmp_path) -> None:
    block, weights = (32, 48), {}
    path = make_latent("deepseek", tmp_path / "hf", BF16)
    for name, tensor in load_file(path / "model.safetensors").items():
        if ".experts." in name:
            counts = [-(-size // by) for size, by in zip(tensor.shape, block, strict=True)]
            generator = torch.Generator().manual_seed(len(weights))
            scales = torch.rand(counts, generator=generator) + 0.1
            stored = tensor.float().to(torch.float8_e4m3fn)
            weights |= {name: stored, f"{name}_scale_inv": scales}
        else:
            weights[name] = tensor
    save_file(weights, path / "model.safetensors", metadata={"format": "pt"})
    quantisation = {"fmt": "e4m3", "quant_method": "fp8", "activation_scheme": "dynamic"}
    edit_config(path, quantization_config={**quantisation, "weight_block_size": list(block)})
    convert_checkpoint(path, tmp_path / "there", to="megatron")
    convert_checkpoint(tmp_path / "there", tmp_path / "back")
    assert "quantization_config" not in (tmp_path / "back" / "config.json").read_text()
    for name, tensor in load_file(tmp_path / "back" / "model.safetensors").items():
        expected = weights[name]
        if f"{name}_scale_inv" in weights:
            rows, columns = torch.meshgrid(*map(torch.arange, tensor.shape), indexing="ij")
            factor = weights[f"{name}_scale_inv"][rows // block[0], columns // block[1]]
            expected = (expected.float() * factor).bfloat16()
        assert raw(tensor) == raw(expected), name


def test_ten_conversions_in_a_row(source, tmp_path) -> None:
    path = source("glm")
    before, current = digest(path), path
    for number in range(10):
        new = tmp_path / str(number)
        convert_checkpoint(current, new, to="hf" if number % 2 else "megatron")
        if current != path:
            shutil.rmtree(current)
        current = new
    assert raw_folder(current) == raw_folder(path)
    assert digest(path) == before


@pytest.mark.parametrize("sizes", ["2I == H", "I == H"])
def test_row_64_of_the_field_reports_square_experts(tmp_path, sizes) -> None:
    """Shapes do not tell rows from columns: the layout comes from the names or is refused."""
    width = {"2I == H": 64, "I == H": 128}[sizes]
    apart = make_qwen3_moe(tmp_path / "apart", BF16, moe_intermediate_size=width)
    with pytest.raises(CheckpointError, match=r"its shape does not tell rows from columns"):
        convert_checkpoint(apart, tmp_path / "fused", experts="fused")
    assert not (tmp_path / "fused").exists()
    edit_config(apart, transformers_version="5.0.0")
    convert_checkpoint(apart, tmp_path / "fused", experts="fused")
    mlp = "model.layers.1.mlp.experts"
    found, meant = (load_file(tmp_path / n / "model.safetensors") for n in ("fused", "apart"))
    for expert in range(8):
        gate, up, down = (meant[f"{mlp}.{expert}.{n}_proj.weight"] for n in ("gate", "up", "down"))
        assert torch.equal(found[f"{mlp}.gate_up_proj"][expert], torch.cat([gate, up]))
        assert torch.equal(found[f"{mlp}.down_proj"][expert], down)
    convert_checkpoint(tmp_path / "fused", tmp_path / "there", to="megatron")
    convert_checkpoint(tmp_path / "there", tmp_path / "back")
    assert raw_folder(tmp_path / "back") == raw_folder(apart)


def test_row_65_of_the_field_reports_experts_in_either_form_and_mixed(source, tmp_path) -> None:
    apart, fused = (
        load_file(source(k) / "model.safetensors") for k in ("qwen3-moe", "qwen3-moe-fused")
    )
    convert_checkpoint(source("qwen3-moe"), tmp_path / "fused", experts="fused")
    convert_checkpoint(tmp_path / "fused", tmp_path / "apart", experts="apart")
    assert raw_folder(tmp_path / "apart") == raw_folder(source("qwen3-moe"))
    joined = load_file(tmp_path / "fused" / "model.safetensors")
    assert joined.keys() == fused.keys()
    mixed = {n: t for n, t in apart.items() if "layers.1.mlp.experts" not in n}
    mixed |= {n: t for n, t in joined.items() if "layers.1.mlp.experts" in n}
    path = shutil.copytree(source("qwen3-moe"), tmp_path / "mixed")
    save_file(mixed, path / "model.safetensors", metadata={"format": "pt"})
    convert_checkpoint(path, tmp_path / "unmixed", experts="apart")
    assert raw_folder(tmp_path / "unmixed") == raw_folder(source("qwen3-moe"))
    lost = "model.layers.2.mlp.experts.5.up_proj.weight"
    save_file({n: t for n, t in mixed.items() if n != lost}, path / "model.safetensors")
    with pytest.raises(CheckpointError, match=f"1 tensor missing: {lost}"):
        convert_checkpoint(path, tmp_path / "x", to="megatron")


def megatron_names(checkpoint: Path) -> dict[str, Tensor]:
    """The tensors that Megatron would save of a checkpoint's model, from its state dict."""
    from isomodels.checkpoint import load_checkpoint

    module = load_checkpoint(checkpoint, carry_mtp=True)
    return {f"core.{name}": tensor for name, tensor in module.state_dict().items()}


CUTS = {"tp2": (2,), "ep2 tp2": (2, 2), "rows of three": (3, 1), "columns": (1, 4)}


@pytest.mark.parametrize("cuts", CUTS)
def test_any_parallel_layout(source, tmp_path, cuts) -> None:
    """Chunks of any grid, over files, beside an optimizer's states and other objects."""
    path = source("qwen3-moe")
    tensors = {
        name: grid(tensor, [c for c, _ in zip(CUTS[cuts], tensor.shape, strict=False)])
        for name, tensor in megatron_names(path).items()
    }
    states = {
        f"optimizer.state.exp_avg.{n}": [(at, t.float()) for at, t in c] for n, c in tensors.items()
    }
    extra = {"core.model.layers.0._extra_state": grid(torch.zeros(3), ())}
    write_dcp(tmp_path / "dist", {**states, **tensors, **extra}, files=3)
    convert_checkpoint(tmp_path / "dist", tmp_path / "out", like=path)
    assert raw_folder(tmp_path / "out") == raw_folder(path)


def test_a_training_folder_gives_its_latest_save(source, tmp_path) -> None:
    path = source("qwen3")
    tensors = {name: grid(tensor, ()) for name, tensor in megatron_names(path).items()}
    write_dcp(tmp_path / "run" / "iter_0000012", tensors)
    (tmp_path / "run" / "latest_checkpointed_iteration.txt").write_text("12\n")
    opened = open_weights(tmp_path / "run", path)
    assert opened.path == tmp_path / "run" / "iter_0000012"
    convert_checkpoint(opened, tmp_path / "out")
    assert raw_folder(tmp_path / "out") == raw_folder(path)
    (tmp_path / "run" / "latest_checkpointed_iteration.txt").write_text("13")
    with pytest.raises(
        CheckpointError, match=r"names '13', and .*iter_0000013 holds no \.metadata"
    ):
        open_weights(tmp_path / "run", path)


def test_a_megatron_folder_without_a_config_says_what_to_give(source, tmp_path) -> None:
    tensors = {name: grid(tensor, ()) for name, tensor in megatron_names(source("qwen3")).items()}
    write_dcp(tmp_path / "dist", tensors)
    with pytest.raises(CheckpointError, match=r"has no config\.json.*with --like$"):
        open_weights(tmp_path / "dist")


FAULTS = {
    "missing": (
        lambda t: t.pop("core.model.norm.weight"),
        r"core?\.?model\.norm\.weight is missing",
    ),
    "left over": (
        lambda t: t.update({"core.model.extra": grid(torch.zeros(2, dtype=BF16), ())}),
        r"does not have: core\.model\.extra$",
    ),
    "misshapen": (
        lambda t: t.update({"core.model.norm.weight": grid(torch.zeros(3, dtype=BF16), ())}),
        r"model\.norm\.weight is \[3\] instead of \[128\]",
    ),
    "mistyped": (
        lambda t: t.update({"core.model.norm.weight": grid(torch.zeros(128), ())}),
        r"the weights are bfloat16, float32",
    ),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_a_megatron_folder_of_another_model(source, tmp_path, fault) -> None:
    tensors = {name: grid(tensor, ()) for name, tensor in megatron_names(source("qwen3")).items()}
    change, message = FAULTS[fault]
    change(tensors)
    write_dcp(tmp_path / "dist", tensors)
    with pytest.raises(CheckpointError, match=message.replace("core?\\.?", "")):
        convert_checkpoint(tmp_path / "dist", tmp_path / "out", like=source("qwen3"))
    assert not (tmp_path / "out").exists()


def test_a_cast_on_the_way(source, tmp_path) -> None:
    path = source("glm")
    convert_checkpoint(path, tmp_path / "there", to="megatron", dtype=torch.float32)
    wide = convert_checkpoint(tmp_path / "there", tmp_path / "back")
    assert wide.config.dtype == "float32"
    found = load_file(tmp_path / "back" / "model.safetensors")
    for name, tensor in load_file(path / "model.safetensors").items():
        assert raw(found[name]) == raw(tensor.float())


def test_what_is_read_is_written_once(source) -> None:
    """Mappings name every tensor of both sides once; a tied head has none of its own."""
    for kind in MAKERS:
        opened = open_weights(source(kind))
        for to in ("hf", "megatron"):
            plan = plan_conversion(opened, to=to)
            read, written = (
                [name for row in plan.mappings() for name in row[side]] for side in (0, 1)
            )
            assert sorted(read) == sorted(opened.tensors)
            assert sorted(written) == sorted(plan.tensors)
