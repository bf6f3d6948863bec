"""`isomodels check` and `isomodels convert`: answers for people and machines, exit codes."""

import json
import os
import shutil
import subprocess
import sys
import tempfile
import zipfile
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from typer.testing import CliRunner

import isomodels
from isomodels.cli.convert import parse_size
from isomodels.cli.files import check_folder
from isomodels.cli.main import app
from isomodels.cli.progress import byte_bar
from isomodels.errors import UnsupportedError
from isomodels.stored_weights import open_weights
from tests.checkpoints import make_mimo, make_qwen3
from tests.weights.conftest import SIZES
from tests.weights.support import as_nobody, edit_config, raw_folder


@pytest.fixture
def checkpoint(tmp_path: Path) -> Path:
    return make_qwen3(tmp_path / "checkpoint", torch.bfloat16, **SIZES)


def run(*arguments: object):
    return CliRunner().invoke(app, [str(a) for a in arguments])


def refused(*arguments: object) -> str:
    """The one message of a command that must end with exit code 2 and touch stdout not."""
    result = run(*arguments)
    assert result.exit_code == 2, result.output
    assert result.stdout == ""
    assert result.stderr.startswith("error: ")
    assert len(result.stderr.strip().splitlines()) <= 2
    assert "Traceback" not in result.stderr
    return result.stderr


def test_version() -> None:
    result = run("--version")
    assert result.exit_code == 0
    assert result.stdout == f"isomodels {isomodels.__version__}\n"


def test_check_tells_what_it_is(checkpoint: Path) -> None:
    result = run("check", checkpoint)
    assert result.exit_code == 0
    for part in ("Qwen3ForCausalLM (dense), supported", "bfloat16", "2 layers", "25 tensors"):
        assert part in result.stdout


def test_check_json(tmp_path: Path) -> None:
    path = make_mimo(tmp_path / "m", torch.float32, **SIZES)
    result = run("check", path, "--json")
    assert result.exit_code == 0
    facts = json.loads(result.stdout)
    hf = load_file(path / "model.safetensors")
    carried = sum(t.numel() for name, t in hf.items() if "mtp_layers" in name)
    assert facts == {
        "supported": True,
        "path": str(path),
        "architecture": "MiMoForCausalLM",
        "family": "dense",
        "dtype": "float32",
        "layers": 2,
        "hidden_size": 64,
        "vocab_size": 1003,
        "tied": False,
        "parameters": sum(t.numel() for t in hf.values()),
        "carried_parameters": carried,
        "tensors": len(hf),
        "files": 1,
    }


def truncate(path: Path) -> None:
    file = path / "model.safetensors"
    file.write_bytes(file.read_bytes()[:-3])


def cut_index(path: Path) -> None:
    tensors = load_file(path / "model.safetensors")
    (path / "model.safetensors").unlink()
    save_file(tensors, path / "a.safetensors")
    weight_map = {**dict.fromkeys(tensors, "a.safetensors"), "model.norm.weight": "b.safetensors"}
    (path / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))


def pickle(path: Path) -> None:
    torch.save(load_file(path / "model.safetensors"), path / "pytorch_model.bin")
    (path / "model.safetensors").unlink()


def widen_one(path: Path) -> None:
    file = path / "model.safetensors"
    tensors = load_file(file)
    tensors["model.norm.weight"] = tensors["model.norm.weight"].float()
    save_file(tensors, file)


BAD = {
    "truncated": (truncate, "model.safetensors is truncated or damaged"),
    "missing shard": (cut_index, "names a missing file: b.safetensors"),
    "pickle": (pickle, "holds pickled weights (pytorch_model.bin)"),
    "wrong dtype": (widen_one, "bfloat16 expected: model.norm.weight is float32"),
    "no theta": (lambda p: edit_config(p, rope_theta=None), "rope_theta is missing"),
    "architecture": (
        lambda p: edit_config(p, architectures=["GPT2LMHeadModel"]),
        "unknown architecture 'GPT2LMHeadModel'; isomodels has ",
    ),
    "no config": (lambda p: (p / "config.json").unlink(), "has no config.json"),
    "unknown field": (lambda p: edit_config(p, alibi=True), "alibi is unknown"),
    "vocabulary": (
        lambda p: edit_config(p, vocab_size=1024),
        "lm_head.weight is [1003, 64] instead of [1024, 64]",
    ),
}


@pytest.mark.parametrize("kind", BAD)
def test_bad_checkpoints_are_refused(checkpoint: Path, tmp_path: Path, kind: str) -> None:
    spoil, message = BAD[kind]
    spoil(checkpoint)
    assert message in refused("check", checkpoint)
    assert message in refused("convert", checkpoint, tmp_path / "out")
    assert not (tmp_path / "out").exists()
    result = run("check", checkpoint, "--json")
    assert result.exit_code == 2
    answer = json.loads(result.stdout)
    assert not answer["supported"]
    assert message in answer["reason"]


def test_a_size_that_an_operation_refuses(tmp_path: Path) -> None:
    path = make_qwen3(tmp_path / "odd", **{**SIZES, "intermediate_size": 130})
    assert "130" in refused("check", path)


def test_check_of_nothing(tmp_path: Path) -> None:
    assert "there is no folder" in refused("check", tmp_path / "none")


def test_convert_reshards(checkpoint: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    result = run("convert", checkpoint, out, "--max-shard-size", "100KB")
    assert result.exit_code == 0, result.output
    assert "bit-exact" in result.stdout
    assert result.stderr == ""
    assert raw_folder(out) == raw_folder(checkpoint)
    assert len(list(out.glob("*.safetensors"))) > 2
    # Back into one file, over an existing checkpoint.
    result = run("convert", out, tmp_path / "back", "--max-shard-size", "1GB", "--json")
    assert result.exit_code == 0
    facts = json.loads(result.stdout)
    assert (facts["files"], facts["round_trip"], facts["dtype"]) == (1, "bit-exact", "bfloat16")
    assert run("convert", tmp_path / "back", out).exit_code == 0
    assert [p.name for p in out.glob("*.safetensors")] == ["model.safetensors"]
    assert raw_folder(out) == raw_folder(checkpoint)


def test_convert_casts(checkpoint: Path, tmp_path: Path) -> None:
    assert run("convert", checkpoint, tmp_path / "out", "--dtype", "float32").exit_code == 0
    facts = json.loads(run("check", tmp_path / "out", "--json").stdout)
    assert facts["dtype"] == "float32"


def test_convert_to_megatron_and_back(checkpoint: Path, tmp_path: Path) -> None:
    there, back = tmp_path / "there", tmp_path / "back"
    result = run("convert", checkpoint, there, "--to", "megatron", "--json")
    assert result.exit_code == 0, result.output
    facts = json.loads(result.stdout)
    assert (facts["layout"], facts["source_layout"]) == ("megatron", "hf")
    assert facts["round_trip"] == "bit-exact"
    assert facts["bytes"] > 0
    assert facts["seconds"] >= 0
    assert run("convert", there, back, "--no-verify").exit_code == 0
    assert raw_folder(back) == raw_folder(checkpoint)
    # a checkpoint of the other form is not replaced
    assert "exists and is no checkpoint" in refused("convert", checkpoint, there)
    assert "exists and is no checkpoint" in refused("convert", there, back, "--to", "megatron")
    assert run("convert", checkpoint, there, "--to", "megatron").exit_code == 0


@pytest.mark.parametrize("target", ["hf", "megatron"])
@pytest.mark.parametrize("verify", [True, False])
def test_the_bar_runs_to_its_end(checkpoint, tmp_path, monkeypatch, target, verify) -> None:
    """Every byte that is written, and that is compared, moves it; it shows on a terminal alone."""
    monkeypatch.setenv("FORCE_COLOR", "1")  # rich: as on a terminal
    seen: list[int] = []

    @contextmanager
    def bar(label: str, total: int):
        with byte_bar(label, total) as advance:
            yield lambda count: (seen.append(count), advance(count))
        assert sum(seen) == total

    monkeypatch.setattr("isomodels.cli.progress.byte_bar", bar)
    how = [] if verify else ["--no-verify"]
    done = run("convert", checkpoint, tmp_path / "out", "--to", target, "--json", *how)
    assert done.exit_code == 0, done.output
    assert "Converting" in done.stderr
    facts = json.loads(done.stdout)
    assert sum(seen) == facts["bytes"] * (1 + verify)
    assert facts["bytes"] == sum(
        t.nbytes for t in load_file(checkpoint / "model.safetensors").values()
    )


def test_convert_dry_run(checkpoint: Path, tmp_path: Path) -> None:
    arguments = ("convert", checkpoint, tmp_path / "out", "--to", "megatron", "--dry-run")
    result = run(*arguments)
    assert result.exit_code == 0
    prefix = "model.layers.1.self_attn"
    line = f"{prefix}.q_proj.weight + {prefix}.k_proj.weight + {prefix}.v_proj.weight -> core."
    assert f"{line}{prefix}.qkv_proj.weight\n" in result.stdout
    assert "nothing was written" in result.stdout
    assert not (tmp_path / "out").exists()
    answer = json.loads(run(*arguments, "--json").stdout)
    read = [name for row in answer["mappings"] for name in row["from"]]
    assert sorted(read) == sorted(load_file(checkpoint / "model.safetensors"))


def test_inspect(checkpoint: Path, tmp_path: Path) -> None:
    result = run("inspect", checkpoint)
    assert result.exit_code == 0
    for part in ("Qwen3ForCausalLM (dense)", "in bfloat16", "2 layers", "25 tensors", "engine"):
        assert part in result.stdout
    run("convert", checkpoint, tmp_path / "there", "--to", "megatron")
    here, there = (
        json.loads(run("inspect", path, "--json").stdout)
        for path in (checkpoint, tmp_path / "there")
    )
    assert (here["layout"], there["layout"]) == ("hf", "megatron")
    assert (here["iteration"], there["iteration"]) == (None, 0)
    assert (here["contract"].keys(), there["contract"].keys()) == (set(), {"semantic"})
    own = ("path", "layout", "files", "iteration", "contract")
    assert {k: v for k, v in here.items() if k not in own} == {
        k: v for k, v in there.items() if k not in own
    }
    count = sum(t.numel() for t in load_file(checkpoint / "model.safetensors").values())
    assert here["dtypes"] == {"bfloat16": count}
    # weights 2, gradients 4, moments 8 and a copy 4 bytes
    whole, *parts = (row for row in here["memory"] if row["pipeline_parallel"] == 1)
    assert (whole["engine"], whole["trainer"]) == (2 * count, 18 * count)
    assert whole["trainer_sharded"] == 6 * count + 12 * count // 8
    assert [row["tensor_parallel"] for row in parts] == [2, 4]  # it has 4 heads
    norms = 2 * (2 * 64 + 2 * 16) + 64  # each rank has them whole
    halves = [row for row in here["memory"] if row["pipeline_parallel"] > 1]
    assert [row["pipeline_parallel"] for row in halves] == [2, 2, 2]  # of two layers
    # the head and the last norm are more than the embedding
    assert halves[0]["trainer"] == 18 * ((count - 2 * 1003 * 64 - 64) // 2 + 1003 * 64 + 64)
    assert halves[0]["engine"] is None
    assert parts[0]["engine"] == 2 * (norms + (count - norms) // 2 + rows_beyond_half(1003) * 64)


def rows_beyond_half(vocabulary: int) -> float:
    """Of the embedding and the head, which the first of two ranks has more: whole leaves."""
    leaf = -(-vocabulary // 1024) * 128
    return 2 * (min(4 * leaf, vocabulary) - vocabulary / 2)


@pytest.mark.parametrize("form", ["hf", "megatron"])
def test_inspect_names_all_that_is_missing_or_unknown(checkpoint, tmp_path, form) -> None:
    path = checkpoint
    if form == "megatron":
        other = make_qwen3(tmp_path / "other", torch.bfloat16, **{**SIZES, "num_hidden_layers": 3})
        path = tmp_path / "there"
        run("convert", checkpoint, path, "--to", "megatron")
        (path / "config.json").write_text((other / "config.json").read_text())
        missing, unknown = 8, 0
    else:
        file = path / "model.safetensors"
        tensors = load_file(file)
        for layer in range(2):
            for name in ("q", "k", "v", "o"):
                tensors[f"extra.{layer}.{name}"] = tensors.pop(
                    f"model.layers.{layer}.self_attn.{name}_proj.weight"
                )
        save_file(tensors, file)
        missing, unknown = 8, 8
    result = run("inspect", path, "--json")
    assert result.exit_code == 2
    answer = json.loads(result.stdout)
    assert not answer["supported"]
    assert (len(answer["missing"]), len(answer["unknown"])) == (missing, unknown)
    assert result.stderr == f"error: {answer['reason']}\n"
    lines = run("inspect", path).stdout.splitlines()
    assert len(lines) == missing + unknown


def test_names_that_would_write_on_the_terminal(checkpoint: Path, tmp_path: Path) -> None:
    """A tensor's name, and an object's in common.pt, are anyone's text."""
    file = checkpoint / "model.safetensors"
    tensors = load_file(file)
    bad = {"two\nlines": torch.zeros(1), "\x1b[2Jclear": torch.zeros(1), "x" * 9999: torch.zeros(1)}
    run("convert", checkpoint, tmp_path / "there", "--to", "megatron")
    save_file(tensors | bad, file)
    for command in (("check", checkpoint), ("convert", checkpoint, tmp_path / "out")):
        message = refused(*command)
        assert message.count("\n") == 1
        assert message.strip().isprintable()
        assert len(message) < 1000
    shown = run("inspect", checkpoint)
    assert all(line.isprintable() and len(line) < 400 for line in shown.stdout.splitlines())
    assert len(shown.stdout.splitlines()) == len(bad)
    with zipfile.ZipFile(tmp_path / "there" / "common.pt", "w") as archive:
        archive.writestr("common/data.pkl", b"c[/x]\n[bold]\n.")
    shown = run("inspect", tmp_path / "there")
    assert shown.exit_code == 0, shown.output
    assert "it names [/x].[bold], which is no part of the format" in shown.stdout


def test_a_folder_that_may_be_listed_but_not_entered(checkpoint: Path) -> None:
    with tempfile.TemporaryDirectory() as name:
        os.chmod(name, 0o755)
        folder = Path(name) / "closed"
        shutil.copytree(checkpoint, folder)
        (folder / "latest_checkpointed_iteration.txt").write_text("1")
        (folder / "latest_checkpointed_iteration.txt").chmod(0)
        for mode, file in ((0o644, ""), (0o755, "/latest_checkpointed_iteration.txt")):
            folder.chmod(mode)
            status, text = as_nobody(lambda: open_weights(folder))
            assert status != 0
            last = text.strip().splitlines()[-1]
            assert "CheckpointError: cannot read " in last
            assert last.endswith(f"{file or '/.metadata'}: Permission denied")
            if not file:
                status, text = as_nobody(lambda: check_folder(folder))
                assert f"CheckpointError: cannot read {folder}: Permission denied" in text


def test_inspect_of_nothing(tmp_path: Path) -> None:
    assert "there is no folder" in refused("inspect", tmp_path / "none")


def test_convert_refuses(checkpoint: Path, tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    (tmp_path / "loop").symlink_to("loop")
    before = raw_folder(checkpoint)
    for arguments, message in (
        ((checkpoint,), "is the source itself"),
        ((checkpoint / "sub",), "lie one in the other"),
        ((tmp_path / "file",), "is a file"),
        ((tmp_path / "file" / "below",), "cannot write"),
        (("/proc/isomodels",), "cannot write /proc/isomodels"),
        ((tmp_path / "loop",), "cannot write"),
        ((tmp_path / "loop" / "below",), "cannot write"),
        # a dry run says what the real one would
        ((checkpoint, "--dry-run"), "is the source itself"),
        ((checkpoint / "sub", "--dry-run"), "lie one in the other"),
        ((tmp_path / "file", "--dry-run"), "is a file"),
        ((tmp_path, "--to", "megatron", "--dry-run"), "exists and is no checkpoint"),
        ((tmp_path / "out", "--like", checkpoint), "--like is for Megatron folders"),
        ((tmp_path / "out", "--experts", "apart"), "Qwen3ForCausalLM has no experts"),
        ((tmp_path / "out", "--experts", "fused", "--dry-run"), "Qwen3ForCausalLM has no experts"),
    ):
        assert message in refused("convert", checkpoint, *arguments)
    assert raw_folder(checkpoint) == before
    assert not (tmp_path / "out").exists()


def test_sizes() -> None:
    assert [parse_size(t) for t in ("7", "2KB", "5 GB", "1MiB", "3gib")] == [
        7,
        2000,
        5 * 10**9,
        2**20,
        3 * 2**30,
    ]
    for text in ("", "0", "-1GB", "1.5GB", "2TB", "GB"):
        with pytest.raises(UnsupportedError):
            parse_size(text)


def test_the_installed_command(checkpoint: Path, tmp_path: Path) -> None:
    """As people run it: a process, with its own exit codes."""
    command = [str(Path(sys.executable).parent / "isomodels")]
    done = subprocess.run(
        [*command, "check", str(checkpoint)], capture_output=True, text=True, timeout=120
    )
    assert (done.returncode, done.stderr) == (0, "")
    failed = subprocess.run(
        [*command, "check", str(tmp_path)], capture_output=True, text=True, timeout=120
    )
    assert (failed.returncode, failed.stdout) == (2, "")
    assert failed.stderr == (
        f"error: {tmp_path} has no weights: model.safetensors or model.safetensors.index.json "
        "is expected\n"
    )
