"""Saving and resuming: interrupted training ends with the bits of uninterrupted training."""

import subprocess
import sys
from pathlib import Path

import pytest
import torch

pytest.importorskip("megatron.core", reason="megatron-core is not installed")

from safetensors.torch import load_file

from isomodels.errors import CheckpointError
from isomodels.megatron import Trainer, resume
from tests.megatron.conftest import DTYPES
from tests.megatron.test_training import BATCH, assert_same, weights

CASES = [("qwen3_tied", "fp32"), ("qwen3", "bf16"), ("mimo", "bf16"), ("qwen3_moe", "bf16")]


def open_trainer(path: Path, dtype: str, distributed: bool) -> Trainer:
    return Trainer(
        path,
        dtype=DTYPES[dtype],
        distributed_optimizer=distributed,
        weight_decay=0.1,
        lr=3e-3,
    )


def train(trainer: Trainer, steps: int) -> list[float]:
    return [trainer.step(BATCH, num_microbatches=2).loss for _ in range(steps)]


@pytest.mark.parametrize("distributed", [True, False], ids=["distributed", "plain"])
@pytest.mark.parametrize(("kind", "dtype"), CASES)
def test_resumed_training_equals_uninterrupted(checkpoint, tmp_path, kind, dtype, distributed):
    path = checkpoint(kind, dtype)
    with open_trainer(path, dtype, distributed) as trainer:
        train(trainer, 2)
        trainer.save(tmp_path / "saved")
        expected_loss = train(trainer, 3)
        expected = weights(trainer)
    with open_trainer(path, dtype, distributed) as trainer:
        train(trainer, 1)  # what is loaded replaces a state that is already there
        trainer.load(tmp_path / "saved")
        assert trainer.steps == 2
        assert train(trainer, 3) == expected_loss
        assert_same(weights(trainer), expected)
    with open_trainer(path, dtype, distributed) as trainer:
        trainer.load(tmp_path / "saved")  # a fresh one
        assert train(trainer, 3) == expected_loss
        assert_same(weights(trainer), expected)


def test_save_before_the_first_step(checkpoint, tmp_path):
    path = checkpoint("qwen3", "bf16")
    with open_trainer(path, "bf16", True) as trainer:
        trainer.save(tmp_path / "saved")
        expected_loss = train(trainer, 2)
    with open_trainer(path, "bf16", True) as trainer:
        trainer.load(tmp_path / "saved")
        assert train(trainer, 2) == expected_loss


def test_without_the_repair_megatron_cannot_load(checkpoint, tmp_path, monkeypatch):
    """The faults are really there: when a release fixes them, the repair may go."""
    path = checkpoint("qwen3", "bf16")
    with open_trainer(path, "bf16", True) as trainer:
        train(trainer, 2)
        trainer.save(tmp_path / "saved")
    monkeypatch.setattr(resume, "repair_torch_adam_resume", lambda optimizer: None)
    with open_trainer(path, "bf16", True) as trainer, pytest.raises(AssertionError):
        trainer.load(tmp_path / "saved")
    with open_trainer(path, "bf16", True) as trainer:
        train(trainer, 1)
        with pytest.raises(KeyError, match="step"):
            trainer.load(tmp_path / "saved")


@pytest.mark.parametrize(("kind", "dtype"), CASES)
def test_hugging_face_checkpoint_of_trained_weights(checkpoint, tmp_path, sequences, kind, dtype):
    path = checkpoint(kind, dtype)
    with open_trainer(path, dtype, True) as trainer:
        trainer.save_hf(tmp_path / "unchanged")
        train(trainer, 1)
        trainer.save_hf(tmp_path / "trained")
        expected = trainer.score(sequences)
    original = load_file(path / "model.safetensors")
    assert_same(load_file(tmp_path / "unchanged" / "model.safetensors"), original)
    trained = load_file(tmp_path / "trained" / "model.safetensors")
    assert trained.keys() == original.keys()
    for name, tensor in original.items():
        same = torch.equal(trained[name], tensor)
        if ".experts." not in name:  # one that saw no token stays as it is
            assert same == (".mtp_layers." in name), name
    with open_trainer(tmp_path / "trained", dtype, True) as trainer:
        for left, right in zip(trainer.score(sequences), expected, strict=True):
            assert torch.equal(left, right)


def test_folders_that_cannot_be_saved_to(checkpoint, tmp_path, monkeypatch):
    (tmp_path / "file").touch()
    with open_trainer(checkpoint("qwen3", "fp32"), "fp32", True) as trainer:
        for place, message in (
            (tmp_path / "file", "is a file: give a folder"),
            (tmp_path / "file" / "below", "cannot write .*: Not a directory"),
            ("/proc/saved", "cannot write /proc/saved: No such file"),
        ):
            with pytest.raises(CheckpointError, match=message) as error:
                trainer.save(place)
            assert "\n" not in str(error.value)
        monkeypatch.setattr(resume.os, "access", lambda *_: False)  # root may write everywhere
        with pytest.raises(CheckpointError, match="a folder that you may write to"):
            trainer.save(tmp_path / "saved")


def test_folders_that_cannot_be_loaded(checkpoint, tmp_path):
    (tmp_path / "empty").mkdir()
    with open_trainer(checkpoint("mimo", "fp32"), "fp32", True) as trainer:
        trainer.save(tmp_path / "other")
    with open_trainer(checkpoint("qwen3", "fp32"), "fp32", True) as trainer:
        trainer.save(tmp_path / "damaged")
        for file in (tmp_path / "damaged").glob("*.distcp"):
            file.write_bytes(file.read_bytes()[:10])
        for place, message in (
            ("/nothing", "Checkpoint directory /nothing does not exist"),
            (tmp_path / "empty", "is not a distributed checkpoint"),
            (tmp_path / "damaged", ""),
            (tmp_path / "other", ""),
        ):
            with pytest.raises(CheckpointError, match=f"cannot load {place}: .*{message}") as error:
                trainer.load(place)
            assert str(error.value).endswith("; give a folder that Trainer.save wrote")
            assert "\n" not in str(error.value)


def test_save_in_a_script_without_a_main_guard_says_so(checkpoint, tmp_path):
    script = tmp_path / "script.py"
    script.write_text(
        "import torch\nfrom isomodels.megatron import Trainer\n"
        f"t = Trainer({str(checkpoint('qwen3', 'fp32'))!r}, dtype=torch.float32)\n"
        f"t.save({str(tmp_path / 'saved')!r})\n"
    )
    done = subprocess.run(
        [sys.executable, str(script)], capture_output=True, text=True, timeout=120, check=False
    )
    assert done.returncode != 0
    assert 'if __name__ == "__main__"' in done.stderr.splitlines()[-1]
