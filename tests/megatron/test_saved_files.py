"""A saved training of which any file was changed is refused; a save without room leaves the old."""

import re
import shutil
from collections import namedtuple
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

pytest.importorskip("megatron.core", reason="megatron-core is not installed")

from isomodels.errors import CheckpointError, ContractError
from isomodels.megatron import Trainer
from isomodels.megatron.saved_files import DIGESTS, require_digests
from isomodels.weights_conv.files import CONTRACT
from tests.megatron.full_disk import no_file_above
from tests.megatron.test_training import BATCH

FILES = {
    ".metadata",
    "__0_0.distcp",
    "__0_1.distcp",
    "common.pt",
    "metadata.json",
    CONTRACT,
    DIGESTS,
}


@pytest.fixture
def trainer(checkpoint) -> Iterator[Trainer]:
    with Trainer(checkpoint("qwen3", "bf16"), dtype=torch.bfloat16) as trainer:
        yield trainer


def step(trainer: Trainer) -> float:
    return trainer.step(BATCH, num_microbatches=2).loss


def contents(folder: Path) -> dict[str, bytes]:
    return {file.name: file.read_bytes() for file in folder.iterdir()}


def flipped(whole: bytes, at: int) -> bytes:
    """One bit, another one at each place."""
    changed = bytearray(whole)
    changed[at] ^= 1 << at % 8
    return bytes(changed)


def test_every_change_of_every_file_is_refused_by_its_name(trainer, tmp_path):
    step(trainer)
    saved = tmp_path / "saved"
    trainer.save(saved)
    before = contents(saved)
    assert before.keys() == FILES
    expected = step(trainer)
    for name, whole in before.items():
        file, size = saved / name, len(whole)
        changes = {"empty": b"", "longer": whole + b"\0", "missing": None}
        changes |= {f"cut at {at}": whole[:at] for at in (1, size // 2, size - 1)}
        changes |= {f"flipped at {at}": flipped(whole, at) for at in (0, size // 3, size - 1)}
        for what, content in changes.items():
            if (name, what) == (CONTRACT, "missing"):
                continue
            file.unlink() if content is None else file.write_bytes(content)
            with pytest.raises((CheckpointError, ContractError)) as error:
                trainer.load(saved)
            assert name in str(error.value), what
            assert "\n" not in str(error.value), what
            if name != CONTRACT:  # the contract is read first
                remedy = "copy the folder again, or resume from another save"
                if (name, what) == (DIGESTS, "missing"):
                    remedy = "give a folder that Trainer.save of this version wrote"
                assert str(error.value).endswith(f": {remedy}")
        file.write_bytes(whole)
    trainer.load(saved)
    assert step(trainer) == expected
    (saved / CONTRACT).unlink()  # as its own message tells who accepts other bits
    trainer.load(saved)
    assert step(trainer) == expected


def test_every_bit_of_the_digests_counts(trainer, tmp_path):
    trainer.save(tmp_path)
    file = tmp_path / DIGESTS
    whole = file.read_bytes()
    for at in range(len(whole)):
        for content in (flipped(whole, at), whole[:at]):
            file.write_bytes(content)
            with pytest.raises(CheckpointError, match=f"{DIGESTS} is cut or damaged: copy"):
                require_digests(tmp_path)
    for content in ("null", "[]", '{"files": []}', '{"files": null, "sha256": ""}', "[" * 100_000):
        file.write_text(content)
        with pytest.raises(CheckpointError, match=f"{DIGESTS} is cut or damaged: copy"):
            require_digests(tmp_path)


def test_a_contract_that_was_changed_with_its_own_digests_is_refused(trainer, tmp_path):
    trainer.save(tmp_path)
    file = tmp_path / CONTRACT
    file.write_text(file.read_text() + "\n")
    with pytest.raises(CheckpointError, match=f"{CONTRACT} is not as it was saved"):
        require_digests(tmp_path)


def test_a_file_without_room_leaves_the_old_save(trainer, tmp_path):
    """Each file in turn is the first that is too large; torch's writer tells no reason."""
    saved = tmp_path / "saved"
    trainer.save(saved)
    before = contents(saved)
    expected = step(trainer)
    reason = "File too large|a file could not be written to its end: make room on the disk"
    for name, whole in before.items():
        with no_file_above(len(whole) - 1), pytest.raises(CheckpointError) as error:
            trainer.save(saved)
        message = str(error.value)
        assert re.fullmatch(f"cannot write {saved}: .*({reason}).*", message), name
        assert contents(saved) == before, name
        assert [entry.name for entry in tmp_path.iterdir()] == ["saved"], name
    trainer.load(saved)
    assert step(trainer) == expected


def test_a_disk_without_the_room_is_refused_before_anything_is_written(
    trainer, tmp_path, monkeypatch
):
    trainer.save(tmp_path / "saved")
    before = contents(tmp_path / "saved")
    size = sum(len(whole) for whole in before.values())
    usage = namedtuple("usage", "total used free")
    monkeypatch.setattr(shutil, "disk_usage", lambda _: usage(0, 0, int(0.99 * size)))
    with pytest.raises(CheckpointError, match=r"cannot write .*saved: it needs .* GB are free"):
        trainer.save(tmp_path / "saved")
    assert contents(tmp_path / "saved") == before
    monkeypatch.setattr(shutil, "disk_usage", lambda _: usage(0, 0, size))
    trainer.save(tmp_path / "saved")
