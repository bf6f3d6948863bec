"""Checkpoints that are broken in every way: each command says so in one sentence that names it."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from typer.testing import CliRunner

from isomodels.cli.main import app
from tests.checkpoints import make_qwen3
from tests.weights.conftest import SIZES
from tests.weights.support import edit_config

Spoil = Callable[[Path], object]


def config(text: str | bytes) -> Spoil:
    content = text if isinstance(text, bytes) else text.encode()
    return lambda folder: (folder / "config.json").write_bytes(content)


def edited(**fields: object) -> Spoil:
    return lambda folder: edit_config(folder, **fields)


def folder_instead(name: str) -> Spoil:
    def spoil(folder: Path) -> None:
        (folder / name).unlink(missing_ok=True)
        (folder / name).mkdir()

    return spoil


def index(text: str) -> Spoil:
    return lambda folder: (folder / "model.safetensors.index.json").write_text(text)


def weights(content: bytes) -> Spoil:
    return lambda folder: (folder / "model.safetensors").write_bytes(content)


DEEP, LONG = "[" * 100_000, '{"a": ' + "9" * 5000 + "}"
# What is wrong, and what the message must say of it.
CONFIGS = {
    "cut": (config('{"architectures": ['), "config.json cannot be read"),
    "empty": (config(""), "config.json cannot be read"),
    "bytes": (config(b"\xff\xfe"), "config.json cannot be read"),
    "deep": (config(DEEP), "config.json cannot be read"),
    "long number": (config(LONG), "config.json cannot be read"),
    "folder": (folder_instead("config.json"), "config.json cannot be read"),
    "list": (config("[]"), "config.json is no JSON object"),
    "no architecture": (config("{}"), "architectures must name one class"),
    "text": (edited(architectures="Qwen3ForCausalLM"), "architectures must name one class"),
    "another": (edited(architectures=["LlamaForCausalLM"]), "isomodels has DeepseekV3ForCausalLM"),
    "model type": (edited(model_type="llama"), "model_type is 'llama'"),
    "text size": (edited(hidden_size="64"), "hidden_size = '64'"),
    "huge": (edited(hidden_size=10**30), "hidden_size is larger than any size"),
    "layers": (edited(num_hidden_layers=2**31 - 1), "num_hidden_layers is larger than any size"),
    "no layers": (edited(num_hidden_layers=0), "num_hidden_layers = 0"),
    "nan": (edited(rope_theta=float("nan")), "rope_theta = nan"),
    "rope": (edited(rope_scaling=[1]), "rope_scaling is no object"),
    "rope 5": (edited(rope_parameters=[1]), "rope_parameters is no object"),
    "heads": (edited(num_key_value_heads=3), "no multiple of num_key_value_heads"),
    "float16": (edited(dtype="float16", torch_dtype="float16"), "'float32' or 'bfloat16'"),
    "quantised": (edited(quantization_config={"bits": 4}), "quantization_config is unknown"),
}
WEIGHTS = {
    "none": (lambda folder: (folder / "model.safetensors").unlink(), "has no weights"),
    "folder": (folder_instead("model.safetensors"), "model.safetensors: Is a directory"),
    "empty": (weights(b""), "model.safetensors is truncated or damaged"),
    "junk": (weights(b"\xff" * 99), "model.safetensors is truncated or damaged"),
    "index cut": (index("{"), "model.safetensors.index.json"),
    "index deep": (index(DEEP), "model.safetensors.index.json"),
    "index long number": (index(LONG), "model.safetensors.index.json"),
    "index list": (index("[]"), "has no weight_map"),
    "index numbers": (index('{"weight_map": {"a": 1}}'), "1 is no file name"),
    "index folder": (folder_instead("model.safetensors.index.json"), "index.json"),
}
COMMANDS = {
    "check": ("check", "X"),
    "inspect": ("inspect", "X"),
    "convert": ("convert", "X", "OUT"),
    "trace": ("trace", "record", "X", "OUT", "--ids", "IDS"),
    "parity": ("parity", "--checkpoint", "X"),
    "show": ("contract", "show", "X"),  # these two read the config alone
    "config": ("parity", "--config", "X"),
}
# `check` meets every fault; the others, which read with the same functions, some of each kind.
CASES = [
    *(("config", kind, "check") for kind in CONFIGS),
    *(("weights", kind, "check") for kind in WEIGHTS),
    *(
        ("config", kind, command)
        for kind in ("cut", "deep", "another", "huge")
        for command in COMMANDS
        if command != "check"
    ),
    *(
        ("weights", kind, command)
        for kind in ("none", "junk", "index cut")
        for command in COMMANDS
        if command not in ("check", "show", "config")
    ),
]


@pytest.fixture(scope="module")
def sound(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_qwen3(tmp_path_factory.mktemp("broken") / "sound", torch.bfloat16, **SIZES)


@pytest.mark.parametrize(("part", "kind", "command"), CASES, ids=map(" ".join, CASES))
def test_one_sentence(sound, tmp_path, monkeypatch, part: str, kind: str, command: str) -> None:
    def started(*_: object, **__: object) -> None:
        raise AssertionError("the hosts were started")

    monkeypatch.setattr("isomodels.parity.run.run_parity", started)
    spoil, message = {"config": CONFIGS, "weights": WEIGHTS}[part][kind]
    bad, out, ids = tmp_path / "bad", tmp_path / "out", tmp_path / "ids.json"
    shutil.copytree(sound, bad)
    spoil(bad)
    ids.write_text("[[1, 2]]")
    names = {"X": str(bad), "OUT": str(out), "IDS": str(ids)}
    arguments = [names.get(one, one) for one in COMMANDS[command]]
    done = CliRunner().invoke(app, arguments)
    assert (done.exit_code, done.stdout) == (2, ""), done.output
    said = done.stderr.strip().splitlines()
    assert said[-1].startswith("error: ")
    assert len(said) == 1 or (
        command in ("parity", "config") and said[:-1] == ["making the checkpoint"]
    )
    assert message in said[-1]
    assert str(bad) in said[-1]
    assert not out.exists()
    if command in ("check", "inspect"):
        as_json = CliRunner().invoke(app, [*arguments, "--json"])
        assert as_json.exit_code == 2
        answer = json.loads(as_json.stdout)
        assert not answer["supported"]
        assert message in answer["reason"]
