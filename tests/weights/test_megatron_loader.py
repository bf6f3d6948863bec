"""Megatron's own loader and saver beside ours: the same folders, the same bits."""

from pathlib import Path

import pytest
import torch

pytest.importorskip("megatron.core", reason="megatron-core is not installed")

from megatron.core import dist_checkpointing
from safetensors.torch import load_file, save_file

from isomodels.checkpoint import load_checkpoint
from isomodels.conversion import convert_checkpoint
from isomodels.megatron import Trainer, model_provider, transformer_config
from isomodels.megatron.degrees import Degrees
from isomodels.megatron.process import start_process, stop_process
from isomodels.parity.ranks import Ranks
from isomodels.stored_weights import open_weights
from isomodels.weights_conv import dist_write
from isomodels.weights_conv.bits import same_bits
from tests.checkpoints import make_mimo, make_qwen3
from tests.dense.models import run_packed, tokens
from tests.moe.mla.models import make as make_latent
from tests.weights.support import raw_folder
from tests.weights.test_conversion import MAKERS, digest

KINDS = ("qwen3-tied", "mimo", "qwen3-moe", "glm", "qwen3_5", "qwen3_5-moe", "qwen3_5-multimodal")


@pytest.fixture
def process():
    start_process()
    yield
    stop_process()


@pytest.mark.parametrize("kind", KINDS)
def test_megatron_loads_what_convert_writes(tmp_path: Path, monkeypatch, process, kind) -> None:
    """Chunks small enough that every tensor has several, and many files."""
    monkeypatch.setattr(dist_write, "_CHUNK_SIZE", 5000)
    path = MAKERS[kind](tmp_path / "hf")
    written = convert_checkpoint(path, tmp_path / "dist", to="megatron", max_shard_size=400_000)
    assert len(list(written.path.glob("*.distcp"))) > 1
    model = model_provider(path, load_weights=False)(config=transformer_config(written.config))
    for tensor in model.core.state_dict().values():
        tensor.fill_(1.0)
    state = {"model": model.sharded_state_dict()}
    loaded = dist_checkpointing.load(state, str(written.path))
    model.load_state_dict(loaded["model"])
    expected = load_checkpoint(path, carry_mtp=True).state_dict()
    assert model.core.state_dict().keys() == expected.keys()
    for name, tensor in model.core.state_dict().items():
        assert same_bits(tensor, expected[name]), name


@pytest.mark.parametrize("kind", ["qwen3-moe", "glm", "qwen3_5-multimodal"])
def test_convert_reads_what_megatron_saves(tmp_path: Path, kind) -> None:
    """A training with its optimizer's states, after a step."""
    path = MAKERS[kind](tmp_path / "hf")
    with Trainer(path, dtype=torch.bfloat16, lr=1e-2) as trainer:
        trainer.step([[1, 2, 3, 4, 5, 6, 7, 8, 9]], num_microbatches=1)
        trainer.save(tmp_path / "dist")
        trainer.save_hf(tmp_path / "expected")
    before = digest(tmp_path / "dist")
    opened = open_weights(tmp_path / "dist", path)
    assert opened.layout == "megatron"
    convert_checkpoint(opened, tmp_path / "out")
    assert raw_folder(tmp_path / "out") == raw_folder(tmp_path / "expected")
    assert raw_folder(tmp_path / "out") != raw_folder(path)
    assert digest(tmp_path / "dist") == before


WIDE = {"vocab_size": 1003}  # leaves for each rank, of unequal sizes
LAYOUTS = {
    "tp2,pp2": lambda path: make_qwen3(
        path, torch.bfloat16, tied=True, num_hidden_layers=2, **WIDE
    ),
    "tp4,sp": lambda path: make_mimo(path, torch.bfloat16, **WIDE),
    "tp2,sp,ep2": lambda path: make_latent("glm", path, torch.bfloat16, **WIDE),
}


@pytest.mark.slow
@pytest.mark.parametrize("layout", LAYOUTS)
def test_real_ranks_of_any_layout(tmp_path: Path, monkeypatch, pytestconfig, layout) -> None:
    """Reads what ranks of a layout saved, and ranks of a layout read what it writes."""
    monkeypatch.setenv("PYTHONPATH", str(pytestconfig.rootpath))
    monkeypatch.setattr(dist_write, "_CHUNK_SIZE", 5000)
    path = LAYOUTS[layout](tmp_path / "hf")
    saved = tmp_path / "saved"
    count = Degrees.parse(layout).ranks
    with Ranks("loader", "tests.weights.loader_rank:LoaderRank", count) as ranks:
        ranks.results()
        ranks.call("save", str(path), layout, str(saved))
        assert len({file.name.split("_")[2] for file in saved.glob("__*.distcp")}) == count
        convert_checkpoint(saved, tmp_path / "out", like=path)
        assert raw_folder(tmp_path / "out") == raw_folder(tmp_path / "saved-hf")
        assert raw_folder(tmp_path / "out") != raw_folder(path)
        convert_checkpoint(tmp_path / "out", tmp_path / "there", to="megatron")
        ranks.call("load", str(path), layout, str(tmp_path / "there"), str(tmp_path / "back"))
    assert raw_folder(tmp_path / "back") == raw_folder(tmp_path / "out")


@pytest.mark.slow
@pytest.mark.parametrize("head", ["untied", "tied", "tied and repeated"])
def test_row_68_of_the_field_reports_heads_over_two_stages(
    tmp_path: Path, monkeypatch, pytestconfig, head
) -> None:
    """The last stage has the embedding's copy, from a file that may repeat it; both change."""
    monkeypatch.setenv("PYTHONPATH", str(pytestconfig.rootpath))
    path = make_qwen3(tmp_path / "hf", torch.bfloat16, tied=head != "untied", num_hidden_layers=2)
    names = ("model.embed_tokens.weight", "lm_head.weight")
    found = load_file(path / "model.safetensors")
    if head == "tied and repeated":
        found[names[1]] = found[names[0]].clone()
        save_file(found, path / "model.safetensors", metadata={"format": "pt"})
    ids = tokens(30)
    with Ranks("loader", "tests.weights.loader_rank:LoaderRank", 2) as ranks:
        ranks.results()
        logprobs = ranks.call("stepped", str(path), "pp2", str(tmp_path / "out"), ids.tolist())
    for folder, theirs in zip((path, tmp_path / "out"), logprobs, strict=True):
        model = load_checkpoint(folder)
        with torch.no_grad():
            assert same_bits(theirs, model.token_logprobs(run_packed(model, ids)[:-1], ids[1:]))
    saved = load_file(tmp_path / "out" / "model.safetensors")
    assert saved.keys() == found.keys()
    for name in saved.keys() & names:
        assert not same_bits(saved[name], found[name]), name
    if head == "tied and repeated":
        assert same_bits(*(saved[name] for name in names))
