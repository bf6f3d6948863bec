"""The contract in a checkpoint's folder: written, carried by conversions, checked by loads."""

import json
from pathlib import Path

import pytest
import torch
from typer.testing import CliRunner

from isomodels.checkpoint import load_checkpoint, save_checkpoint
from isomodels.cli.main import app
from isomodels.config import read_config
from isomodels.contract import Contract, contract_of
from isomodels.contract.stored import read_stored, require_stored
from isomodels.conversion import convert_checkpoint
from isomodels.errors import ContractError
from isomodels.weights_conv.files import CONTRACT, DIGESTS
from tests.checkpoints import make_qwen3
from tests.weights.support import edit_config

BF16 = torch.bfloat16


@pytest.fixture
def plain(tmp_path: Path) -> Path:
    return make_qwen3(tmp_path / "plain", BF16)


@pytest.fixture
def trained(plain: Path, tmp_path: Path) -> Path:
    """What a trainer writes: the weights, and the contract that they were trained under."""
    module = load_checkpoint(plain, carry_mtp=True)
    contract = contract_of(plain, "cpu").to_json()
    save_checkpoint(module, tmp_path / "trained", like=plain, contract=contract)
    return tmp_path / "trained"


def edited(folder: Path, section: str, change) -> None:
    """Another version's contract, sound in itself."""
    document = json.loads((folder / CONTRACT).read_text())
    change(document[section])
    sections = ("semantic", "numerical_policy", "deployment")
    (folder / CONTRACT).write_text(Contract(*(document[s] for s in sections)).to_json())


def require(folder: Path, **how) -> None:
    require_stored(folder, *read_config(folder), "cpu", **how)


def convert(*arguments: object) -> str:
    """What the command printed, errors too."""
    return CliRunner().invoke(app, ["convert", *map(str, arguments)]).output


def test_a_published_folder_states_nothing(plain: Path) -> None:
    assert read_stored(plain) is None
    require(plain)


def test_the_same_contract_loads(trained: Path) -> None:
    assert read_stored(trained).digests == contract_of(trained, "cpu").digests
    require(trained)


def test_a_deployment_moves_no_bit(trained: Path) -> None:
    edited(trained, "deployment", lambda one: one.update(python="3.99"))
    require(trained)


def test_other_bits_are_refused_with_the_difference(trained: Path) -> None:
    edited(trained, "numerical_policy", lambda one: one["schedules"]["linear"].update(version=99))
    with pytest.raises(ContractError) as error:
        require(trained)
    assert "numerical_policy.schedules.linear.version: 99 against " in str(error.value)
    assert f"remove {CONTRACT} from the folder" in str(error.value)
    assert "\n" not in str(error.value)
    require(trained, cast=True)  # other bits were asked for
    (trained / CONTRACT).unlink()
    require(trained)


@pytest.mark.parametrize("cast", [False, True])
def test_another_model_is_refused_with_the_difference(trained: Path, cast: bool) -> None:
    """A rope theta that something rewrote, as of row 70 of the field reports."""
    edit_config(trained, rope_theta=10000.0)
    with pytest.raises(ContractError, match=r"rope_theta: 1000000\.0 .* against 10000\.0") as e:
        require(trained, cast=cast)
    assert "bring back the one that was written with the weights" in str(e.value)
    output = convert(trained, trained.parent / "out", "--to", "megatron")
    assert "config.json was changed since" in output
    assert not (trained.parent / "out").exists()


def test_a_damaged_contract(trained: Path) -> None:
    text = (trained / CONTRACT).read_text()
    (trained / CONTRACT).write_text(text.replace('"family":"dense"', '"family":"moe"'))
    with pytest.raises(ContractError, match="its digests are not those of its content"):
        require(trained)


def test_conversions_carry_it(trained: Path, tmp_path: Path) -> None:
    expected = (trained / CONTRACT).read_bytes()
    convert(trained, tmp_path / "there", "--to", "megatron")
    convert(tmp_path / "there", tmp_path / "back")
    convert_checkpoint(tmp_path / "there", tmp_path / "too")
    for name in ("there", "back", "too"):
        assert (tmp_path / name / CONTRACT).read_bytes() == expected


def test_digests_of_a_saved_training_stay_with_its_files(plain: Path, tmp_path: Path) -> None:
    convert(plain, tmp_path / "there", "--to", "megatron")
    (tmp_path / "there" / DIGESTS).write_text("{}")
    convert(tmp_path / "there", tmp_path / "back")
    convert(plain, tmp_path / "there", "--to", "megatron")
    for name in ("there", "back"):
        assert not (tmp_path / name / DIGESTS).exists()


def test_a_source_without_one_states_its_model_from_now_on(plain: Path, tmp_path: Path) -> None:
    convert(plain, tmp_path / "out")
    stated = read_stored(tmp_path / "out").stated
    assert stated == {"semantic": contract_of(plain, "cpu").digests["semantic"]}
    require(tmp_path / "out")
    edit_config(tmp_path / "out", rms_norm_eps=1e-5)
    with pytest.raises(ContractError, match=r"semantic\.config\.rms_norm_eps"):
        require(tmp_path / "out")


def test_rounded_weights_were_never_run(trained: Path, tmp_path: Path) -> None:
    convert(trained, tmp_path / "out", "--dtype", "float32")
    assert read_stored(tmp_path / "out").stated.keys() == {"semantic"}
    convert_checkpoint(trained, tmp_path / "too", dtype=torch.float32)
    assert read_stored(tmp_path / "too") is None


def test_another_checkpoints_contract_is_never_copied(plain, trained, tmp_path) -> None:
    """Neither from the folder that gives the small files, nor from the one that is replaced."""
    save_checkpoint(load_checkpoint(trained, carry_mtp=True), tmp_path / "out", like=trained)
    assert read_stored(tmp_path / "out") is None
    save_checkpoint(load_checkpoint(trained, carry_mtp=True), trained, like=trained)
    assert read_stored(trained) is None


def test_inspect_shows_the_digests(trained: Path) -> None:
    shown = CliRunner().invoke(app, ["inspect", str(trained), "--json"])
    assert json.loads(shown.output)["contract"] == read_stored(trained).digests
    for digest in read_stored(trained).digests.values():
        assert digest[:16] in CliRunner().invoke(app, ["inspect", str(trained)]).output
