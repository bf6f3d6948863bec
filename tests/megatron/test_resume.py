"""Saving and resuming: interrupted training ends with the bits of uninterrupted training."""

import subprocess
import sys
from pathlib import Path

import pytest
import torch

pytest.importorskip("megatron.core", reason="megatron-core is not installed")

from safetensors.torch import load_file

from isomodels.contract import Contract
from isomodels.contract.stored import read_stored
from isomodels.errors import CheckpointError, ContractError
from isomodels.megatron import Trainer, resume
from isomodels.megatron.saved_files import DIGESTS
from isomodels.weights_conv.files import CONTRACT
from tests.megatron.conftest import DTYPES
from tests.megatron.test_training import BATCH, assert_same, weights

CASES = [("qwen3_tied", "fp32"), ("qwen3", "bf16"), ("mimo", "bf16"), ("qwen3_moe", "bf16")]


def open_trainer(path: Path, dtype: str, distributed: bool, *, cast: bool = False) -> Trainer:
    return Trainer(
        path,
        cast=cast,
        dtype=DTYPES[dtype],
        distributed_optimizer=distributed,
        weight_decay=0.1,
        lr=3e-3,
    )


def train(trainer: Trainer, steps: int) -> list[float]:
    return [trainer.step(BATCH, num_microbatches=2).loss for _ in range(steps)]


# the plain optimizer knows nothing of an architecture: once in each dtype
RESUMED = [*[(*case, True) for case in CASES], ("qwen3_tied", "fp32", False), (*CASES[-1], False)]


@pytest.mark.parametrize(("kind", "dtype", "distributed"), RESUMED)
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


def test_folders_that_cannot_be_saved_to(checkpoint, tmp_path):
    (tmp_path / "file").touch()
    (tmp_path / "home").mkdir()
    (tmp_path / "home" / "thesis.tex").touch()
    with open_trainer(checkpoint("qwen3", "fp32"), "fp32", True) as trainer:
        for place, message in (
            (tmp_path / "file", "is a file: give a folder"),
            (tmp_path / "file" / "below", "cannot write .*: (Not a directory|File exists)"),
            (tmp_path / "home", "exists and is no checkpoint"),
            ("/proc/saved", "cannot write /proc/saved: No such file"),
        ):
            with pytest.raises(CheckpointError, match=message) as error:
                trainer.save(place)
            assert "\n" not in str(error.value)
    assert {entry.name for entry in tmp_path.iterdir()} == {"file", "home"}


def test_a_save_that_fails_leaves_the_old_one(checkpoint, tmp_path, monkeypatch):
    """Megatron writes into its place as it goes: what it left would be half old and half new."""
    path = checkpoint("qwen3", "bf16")
    with open_trainer(path, "bf16", True) as trainer:
        train(trainer, 1)
        trainer.save(tmp_path / "saved")
        expected = train(trainer, 1)
        before = {file.name: file.read_bytes() for file in (tmp_path / "saved").iterdir()}

        def full(folder, path, state):
            (folder / "__0_0.distcp").write_bytes(b"half")
            raise CheckpointError(f"cannot write {path}: No space left on device")

        with monkeypatch.context() as patched:
            patched.setattr(resume, "_write", full)
            with pytest.raises(CheckpointError, match=r"saved: No space left on device$"):
                trainer.save(tmp_path / "saved")
        after = {file.name: file.read_bytes() for file in (tmp_path / "saved").iterdir()}
        assert after == before
        trainer.load(tmp_path / "saved")
        assert train(trainer, 1) == expected
        trainer.save(tmp_path / "saved")  # replaces it
    assert [entry.name for entry in tmp_path.iterdir()] == ["saved"]


def test_a_save_of_other_bits_is_refused(checkpoint, tmp_path):
    """Under another version of an operation, and in another dtype: the first difference is told."""
    with open_trainer(checkpoint("qwen3", "bf16"), "bf16", True) as trainer:
        trainer.save(tmp_path / "saved")
        assert read_stored(tmp_path / "saved").digests == trainer.contract().digests
        document = trainer.contract().to_dict()
        document["numerical_policy"]["schedules"]["linear"]["version"] = 99
        other = Contract(document["semantic"], document["numerical_policy"], {})
        (tmp_path / "saved" / CONTRACT).write_text(other.to_json())
        with pytest.raises(ContractError, match=r"schedules\.linear\.version: 99 against") as error:
            trainer.load(tmp_path / "saved")
        assert f"remove {CONTRACT} from the folder" in str(error.value)
    with (
        open_trainer(checkpoint("qwen3", "fp32"), "fp32", True) as trainer,
        pytest.raises(
            ContractError, match=r'numerical_policy\.dtype: "bfloat16" against "float32"'
        ),
    ):
        trainer.load(tmp_path / "saved")


def test_weights_of_a_training_state_its_contract(checkpoint, tmp_path):
    with open_trainer(checkpoint("qwen3", "fp32"), "fp32", True) as trainer:
        trainer.save_hf(tmp_path / "saved")
        expected = trainer.contract()
    assert read_stored(tmp_path / "saved").digests == expected.digests
    other = dict(expected.numerical_policy) | {"device": {"backend": "triton"}}
    (tmp_path / "saved" / CONTRACT).write_text(Contract(expected.semantic, other, {}).to_json())
    with pytest.raises(ContractError, match=r'device\.backend: "triton" against "torch"'):
        open_trainer(tmp_path / "saved", "fp32", True)
    with open_trainer(tmp_path / "saved", "bf16", True, cast=True):
        pass  # rounded weights have other bits anyhow


def test_folders_that_cannot_be_loaded(checkpoint, tmp_path):
    (tmp_path / "empty").mkdir()
    (tmp_path / "file").touch()
    with open_trainer(checkpoint("mimo", "fp32"), "fp32", True) as trainer:
        trainer.save(tmp_path / "other")
    with open_trainer(checkpoint("qwen3", "fp32"), "fp32", True) as trainer:
        for place, message in (
            (Path("/nothing"), "it is no folder: give one that Trainer.save wrote"),
            (tmp_path / "file", "it is no folder: give one that Trainer.save wrote"),
            (
                tmp_path / "empty",
                f"{DIGESTS} is missing, by which the other files are checked: give a folder that "
                "Trainer.save of this version wrote",
            ),
        ):
            with pytest.raises(CheckpointError) as error:
                trainer.load(place)
            assert str(error.value) == f"cannot load {place}: {message}"
        with pytest.raises(ContractError, match=r'architecture: "MiMo\w+" against "Qwen3\w+"'):
            trainer.load(tmp_path / "other")
        (tmp_path / "other" / CONTRACT).unlink()
        with pytest.raises(CheckpointError, match=r"give a folder that Trainer\.save wrote$"):
            trainer.load(tmp_path / "other")


def test_a_script_without_a_main_guard_saves(checkpoint, tmp_path):
    """Megatron's helper process would import the script again: a save starts none."""
    script = tmp_path / "script.py"
    script.write_text(
        "import torch\nfrom isomodels.megatron import Trainer\n"
        f"t = Trainer({str(checkpoint('qwen3', 'fp32'))!r}, dtype=torch.float32)\n"
        f"t.save({str(tmp_path / 'saved')!r})\n"
    )
    done = subprocess.run(
        [sys.executable, str(script)], capture_output=True, text=True, timeout=120, check=False
    )
    assert done.returncode == 0, done.stderr
    assert (tmp_path / "saved" / ".metadata").exists()
