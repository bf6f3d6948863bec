"""Checkpoints of one layout in another, and ranks that die."""

import time
from pathlib import Path

import pytest

pytest.importorskip("megatron.core", reason="megatron-core is not installed")

from megatron.core import dist_checkpointing
from safetensors.torch import load_file
from torch import Tensor

from isomodels.megatron.layout import Degrees
from isomodels.megatron.process import start_process, stop_process
from isomodels.parity.ranks import Ranks
from isomodels.parity.remote import ProcessError
from tests.megatron.bits import assert_same_bits
from tests.parallel.conftest import TRAINER

LAYERS = {"num_hidden_layers": 2}
EIGHT_HEADS = {**LAYERS, "num_attention_heads": 8, "head_dim": 16}
CASES = [
    ("MiMoForCausalLM", "tp2,pp2", ("tp1", "tp4", "tp8", "dp2")),
    ("Glm4MoeLiteForCausalLM", "tp2,sp,ep2", ("tp1", "dp2,ep2")),
    # the first stage has no experts, and so no optimizer for them
    ("DeepseekV3ForCausalLM", "pp2,tp2,ep2", ("tp1", "pp2", "dp2,ep2")),
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
    fields = EIGHT_HEADS if architecture == "MiMoForCausalLM" else LAYERS
    path = str(tiny(architecture, "bfloat16", **fields))
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


def wait_for(file: Path, seconds: float = 60.0) -> None:
    end = time.monotonic() + seconds
    while not file.exists():
        assert time.monotonic() < end, f"{file.name} did not begin"
        time.sleep(0.01)


@pytest.mark.parametrize("doing", ["train_on", "save_on"])
def test_a_killed_rank_ends_the_others(trainers, tiny, sequences, tmp_path, doing):
    path, saved = str(tiny("MiMoForCausalLM", "float32", **LAYERS)), str(tmp_path / "last")
    long_enough = [s for s in sequences if len(s) > 1]
    started = tmp_path / "started"
    with Ranks("killed", TRAINER, 2) as ranks:
        ranks.results()
        ranks.call("train_and_save", path, "float32", "tp2", long_enough, saved)
        if doing == "train_on":
            ranks.submit(doing, path, "tp2", long_enough, str(started))
        else:
            ranks.submit(doing, path, "tp2", str(started), str(tmp_path / "next"))
        wait_for(started)
        time.sleep(0.2)
        begin = time.monotonic()
        ranks.remotes[1].kill()
        with pytest.raises(ProcessError, match=r"the killed-rank1 process ended \(exit code -9\)"):
            ranks.results()
        assert time.monotonic() - begin < 30.0
        for remote in ranks.remotes:
            remote.log.unlink(missing_ok=True)
    # what was saved before is whole
    out = str(tmp_path / "again")
    assert trainers(1).call("load_and_save", path, "float32", "tp1", saved, out) == 2
