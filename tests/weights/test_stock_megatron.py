"""Checkpoints of stock Megatron-Bridge models come in with equal bits and equal logits."""

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from isomodels.checkpoint import load_checkpoint
from isomodels.conversion import convert_checkpoint
from isomodels.errors import CheckpointError
from isomodels.stored_weights import open_weights
from isomodels.weights_conv.bits import same_bits
from tests.checkpoints import make_mimo, make_qwen3, make_qwen3_moe
from tests.dense.models import run_packed, tokens
from tests.hybrid.checkpoints import make_qwen3_5, make_qwen3_5_moe, make_qwen3_next
from tests.moe.mla.models import make as make_latent
from tests.weights.dcp import write_dcp
from tests.weights.stock_megatron import (
    Saved,
    stock_hybrid,
    stock_latent,
    stock_mimo,
    stock_qwen3,
    stock_qwen3_moe,
)

BF16 = torch.bfloat16
MAKERS = {
    "qwen3": lambda path: make_qwen3(path, BF16),
    "qwen3-tied": lambda path: make_qwen3(path, BF16, tied=True),
    "qwen3-moe": lambda path: make_qwen3_moe(path, BF16),
    "mimo": lambda path: make_mimo(path, BF16),
    "glm": lambda path: make_latent("glm", path, BF16),
    "moonlight": lambda path: make_latent("moonlight", path, BF16),
    "qwen3_5": lambda path: make_qwen3_5(path, BF16),
    "qwen3_5-moe": lambda path: make_qwen3_5_moe(path, BF16),
    "qwen3-next": lambda path: make_qwen3_next(path, BF16),
}
STOCK = {
    "qwen3": [lambda hf, raw, tp: stock_qwen3(hf, raw, tp)],
    "qwen3-tied": [lambda hf, raw, tp: stock_qwen3(hf, raw, tp)],
    "qwen3-moe": [lambda hf, raw, tp: stock_qwen3_moe(hf, raw, tp)],
    "mimo": [lambda hf, raw, tp: stock_mimo(hf, raw, tp)],
    "glm": [
        lambda hf, raw, tp: stock_latent(hf, raw, tp),
        lambda hf, raw, tp: stock_latent(hf, raw, tp, local=True),
    ],
    "moonlight": [lambda hf, raw, tp: stock_latent(hf, raw, tp)],
    **{
        kind: [
            lambda hf, raw, tp: stock_hybrid(hf, raw, tp, pieces=True),
            lambda hf, raw, tp: stock_hybrid(hf, raw, tp, pieces=False),
        ]
        for kind in ("qwen3_5", "qwen3_5-moe", "qwen3-next")
    },
}
CASES = [
    (kind, form, tp) for kind, forms in STOCK.items() for form in range(len(forms)) for tp in (1, 2)
]


@pytest.fixture(scope="module")
def source(tmp_path_factory):
    """source(kind) -> a checkpoint whose gated norms bfloat16 can hold after a shift by one."""
    root = tmp_path_factory.mktemp("stock")

    def get(kind: str) -> Path:
        path = root / kind
        if not path.exists():
            MAKERS[kind](path)
            found = load_file(path / "model.safetensors")
            for name, tensor in found.items():
                if name.endswith("linear_attn.norm.weight"):
                    found[name] = tensor.bfloat16().clamp(0.5, 2.0).float()
                elif name.endswith("A_log"):
                    found[name] = tensor.bfloat16().float()
                elif ".embed_tokens." in name or "shared_head.head" in name:
                    # MTP layers repeat the tables of the model, which is all that Megatron has
                    whole = "lm_head.weight" if "head" in name else "model.embed_tokens.weight"
                    found[name] = found[whole].clone()
            save_file(found, path / "model.safetensors", metadata={"format": "pt"})
        return path

    return get


def saved_of(path: Path, kind: str, form: int, tp: int) -> Saved:
    raw = json.loads((path / "config.json").read_text())
    return STOCK[kind][form](load_file(path / "model.safetensors"), raw, tp)


def logits(folder: Path) -> Tensor:
    model = load_checkpoint(folder)
    with torch.no_grad():
        return model.logits(run_packed(model, tokens(70), [50, 20]))


@pytest.mark.parametrize(("kind", "form", "tp"), CASES)
def test_a_stock_checkpoint_imports_with_equal_logits(source, tmp_path, kind, form, tp) -> None:
    path = source(kind)
    write_dcp(tmp_path / "stock", saved_of(path, kind, form, tp), files=3)
    opened = open_weights(tmp_path / "stock", path)
    assert opened.layout == "megatron-bridge"
    assert opened.carried_over == ()
    convert_checkpoint(opened, tmp_path / "out")
    own, expected = (
        load_checkpoint(folder, carry_mtp=True).state_dict() for folder in (tmp_path / "out", path)
    )
    assert own.keys() == expected.keys()
    for name, tensor in own.items():
        assert same_bits(tensor, expected[name]), name
    assert same_bits(logits(tmp_path / "out"), logits(path))


@pytest.mark.parametrize("kind", ["glm", "qwen3_5-moe"])
def test_straight_into_our_megatron_model(source, tmp_path, kind) -> None:
    path = source(kind)
    write_dcp(tmp_path / "stock", saved_of(path, kind, 0, 2))
    convert_checkpoint(tmp_path / "stock", tmp_path / "ours", to="megatron", like=path)
    convert_checkpoint(tmp_path / "ours", tmp_path / "out")
    own, expected = (
        load_checkpoint(folder, carry_mtp=True).state_dict() for folder in (tmp_path / "out", path)
    )
    for name, tensor in own.items():
        assert same_bits(tensor, expected[name]), name


def test_row_74_of_the_field_reports_mtp_halves(source, tmp_path) -> None:
    """MiMo projects [hidden | embedding], Megatron [embedding | hidden]."""
    path = source("mimo")
    saved = saved_of(path, "mimo", 0, 1)
    write_dcp(tmp_path / "stock", saved)
    convert_checkpoint(tmp_path / "stock", tmp_path / "out", like=path)
    name = "model.mtp_layers.0.input_proj.weight"
    theirs = load_file(tmp_path / "out" / "model.safetensors")[name]
    ((_, megatron),) = saved["mtp.layers.0.eh_proj.weight"]
    half = theirs.shape[1] // 2
    assert torch.equal(theirs[:, :half], megatron[:, half:])
    assert torch.equal(theirs[:, half:], megatron[:, :half])


def test_row_71_of_the_field_reports_every_layer_of_a_model_with_biases(source, tmp_path) -> None:
    """Not only the logits: what each layer hands on has equal bits after an import."""
    path = source("mimo")
    write_dcp(tmp_path / "stock", saved_of(path, "mimo", 0, 2))
    convert_checkpoint(tmp_path / "stock", tmp_path / "out", like=path)

    def hidden(folder: Path) -> list[Tensor]:
        model, found = load_checkpoint(folder), []
        for layer in model.model.layers:
            layer.register_forward_hook(lambda _, __, out: found.extend(out))
        with torch.no_grad():
            run_packed(model, tokens(40))
        return found

    own, expected = hidden(tmp_path / "out"), hidden(path)
    assert len(own) == 2 * 3
    assert all(same_bits(a, b) for a, b in zip(own, expected, strict=True))


def test_row_69_of_the_field_reports_padded_rows_stay_behind(source, tmp_path) -> None:
    path = source("qwen3")
    saved = saved_of(path, "qwen3", 0, 2)
    rows = sum(len(part) for _, part in saved["output_layer.weight"])
    assert rows > 512
    write_dcp(tmp_path / "stock", saved)
    convert_checkpoint(tmp_path / "stock", tmp_path / "out", like=path)
    assert load_file(tmp_path / "out" / "model.safetensors")["lm_head.weight"].shape[0] == 512


@pytest.mark.parametrize("kind", ["glm", "qwen3_5", "mimo"])
def test_row_66_of_the_field_reports_a_trainer_without_mtp(source, tmp_path, kind) -> None:
    """Its MTP layers come from the model that it began with, or it is refused."""
    path = source(kind)
    saved = {n: c for n, c in saved_of(path, kind, 0, 1).items() if not n.startswith("mtp.")}
    write_dcp(tmp_path / "stock", saved)
    (tmp_path / "stock" / "config.json").write_text((path / "config.json").read_text())
    with pytest.raises(CheckpointError, match=r"mtp\.layers.* is missing.*with --like$"):
        open_weights(tmp_path / "stock")
    opened = open_weights(tmp_path / "stock", path)
    assert opened.carried_over
    convert_checkpoint(opened, tmp_path / "out")
    own, expected = (load_file(f / "model.safetensors") for f in (tmp_path / "out", path))
    assert own.keys() == expected.keys()
    for name in opened.carried_over:
        assert same_bits(own[name], expected[name])


def test_row_72_of_the_field_reports_a_lost_router_bias(source, tmp_path) -> None:
    path = source("glm")
    saved = saved_of(path, "glm", 0, 1)
    del saved["decoder.layers.2.mlp.router.expert_bias"]
    write_dcp(tmp_path / "stock", saved)
    with pytest.raises(CheckpointError, match=r"layers\.2\.mlp\.router\.expert_bias is missing"):
        open_weights(tmp_path / "stock", path)


def test_ranks_that_do_not_fit_the_heads(source, tmp_path) -> None:
    path = source("qwen3_5")
    saved = saved_of(path, "qwen3_5", 1, 1)
    name = "decoder.layers.0.self_attention.in_proj.weight"
    ((_, tensor),) = saved[name]
    third = len(tensor) // 3
    saved[name] = [
        ((0, 0), tensor[:third]),
        ((third, 0), tensor[third : 2 * third]),
        ((2 * third, 0), tensor[2 * third :]),
    ]
    write_dcp(tmp_path / "stock", saved)
    with pytest.raises(CheckpointError, match="lies in 3 parts, which its heads do not fit"):
        open_weights(tmp_path / "stock", path)
