"""Wrong arguments: answered in one sentence before torch is imported, and none is ignored."""

import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
import typer
from safetensors.torch import save_file
from typer.testing import CliRunner

from isomodels.cli.arguments import Dtype, Workload
from isomodels.cli.main import app
from isomodels.config import DTYPES
from isomodels.parity.workload import WORKLOADS

FORM = "such as [[1, 2, 3], [4, 5]]"
IDS = {
    "none": (None, "there is no such file"),
    "text": ("tokens", "is no JSON (Expecting value: line 1, column 1)"),
    "lines": ("[1, 2]\n[3]", "is no JSON (Extra data: line 2, column 1)"),
    "bytes": (b"\xff\xfe", "is no text"),
    "object": ('{"ids": [[1]]}', "the file holds an object"),
    "number": ("7", "the file holds the number 7"),
    "nothing": ("[]", "the list is empty"),
    "flat": ("[1, 2]", "sequence 0 is the number 1 (a single sequence is a list in the list)"),
    "empty": ("[[1], []]", "sequence 1 is empty"),
    "words": ('[[1], ["a"]]', "token 0 of sequence 1 is the text 'a'"),
    "true": ("[[1, true]]", "token 1 of sequence 0 is true"),
    "null": ("[[1], null]", "sequence 1 is null"),
    "float": ("[[1, 2.0]]", "token 1 of sequence 0 is the number 2.0"),
    "nan": ("[[NaN]]", "token 0 of sequence 0 is the number nan"),
    "negative": ("[[1, -1]]", "token 1 of sequence 0 is -1, and ids start at 0"),
    "deep": ("[" * 100_000, "holds no token ids"),
    "long": ("[[" + "9" * 5000 + "]]", "holds no token ids"),
}
POSITIONS = {
    "": "a part of it is empty",
    "1,,2": "a part of it is empty",
    "x": "'x' is no position, which counts from 0",
    "-1": "'-1' is no position",
    "1.5": "'1.5' is no position",
    "4:x": "'x' is no position",
    "9:1": "9:1 holds no token, since its end is not after its start",
    "3:3": "3:3 holds no token",
    "5": "no sequence of --ids reaches there: the longest has 5 tokens, from 0 to 4",
    "7:,90": "no sequence of --ids reaches there",
}
# What is in the folder T of the tests below, or is not.
RECORD = ("trace", "record", "T/model", "T/out")
WITH_IDS = (*RECORD, "--ids", "T/ids.json")
OUT = {
    "T": "out T is a folder: give the name of a file",
    "T/none/out": "out T/none/out: there is no folder T/none: make it first",
    "T/file/out": "out T/file/out cannot be written (Not a directory)",
    "/proc/out": "out /proc/out",
    "T/ids.json": "out T/ids.json exists and is no recording: give another name, or remove it",
    "T/other.safetensors": "exists and is no recording",
}
# Commands that take a checkpoint, and where.
FOLDERS = {
    "check": ("check", "X"),
    "inspect": ("inspect", "X"),
    "inspect --like": ("inspect", "T/model", "--like", "X"),
    "convert": ("convert", "X", "T/out"),
    "convert --like": ("convert", "T/model", "T/out", "--like", "X"),
    "contract show": ("contract", "show", "X"),
    "contract diff": ("contract", "diff", "T/model", "X"),
    "trace record": ("trace", "record", "X", "T/out", "--ids", "T/ids.json"),
    "parity --checkpoint": ("parity", "--checkpoint", "X"),
    "parity --config": ("parity", "--config", "X"),
}
NO_FILES = ("contract show", "contract diff")  # they read contracts from files
WRONG = {
    **{f"--ids {k}": ((*RECORD, "--ids", f"T/ids-{k}"), w) for k, (_, w) in IDS.items()},
    "--ids folder": ((*RECORD, "--ids", "T"), "cannot be read (Is a directory)"),
    **{
        f"--positions {text}": ((*WITH_IDS, "--positions", text), f"--positions {text!r}: {word}")
        for text, word in POSITIONS.items()
        if "reaches" not in word
    },
    **{
        f"--positions {text}": ((*WITH_IDS, "--positions", text), word)
        for text, word in POSITIONS.items()
        if "reaches" in word
    },
    "too many": ((*RECORD, "--ids", "T/many.json"), "keeps 65,536 tokens, and 65,537 are chosen"),
    **{
        f"out {path}": (("trace", "record", "T/model", path, "--ids", "T/ids.json"), word)
        for path, word in OUT.items()
    },
    **{
        f"{name}, no folder": (
            tuple(a.replace("X", "T/none") for a in arguments),
            "there is no T/none: give a" if name in NO_FILES else "there is no folder T/none",
        )
        for name, arguments in FOLDERS.items()
    },
    **{
        f"{name}, a file": (tuple(a.replace("X", "T/file") for a in arguments), "T/file is a file")
        for name, arguments in FOLDERS.items()
        if name not in NO_FILES
    },
    **{
        f"{name}, below a file": (
            tuple(a.replace("X", "T/file/x") for a in arguments),
            "there is no T/file/x" if name in NO_FILES else "there is no folder T/file/x",
        )
        for name, arguments in FOLDERS.items()
    },
    **{
        f"{name}, empty": (
            tuple(a.replace("X", "T/empty") for a in arguments),
            "T/empty has no config.json",
        )
        for name, arguments in FOLDERS.items()
        if name not in ("check", "inspect", "convert")
    },
    "diff of a file that is missing": (
        ("contract", "diff", "T/file", "T/none.json"),
        "there is no T/none.json: give a checkpoint's folder or a contract",
    ),
    **{
        f"{name}, a link to itself": (
            tuple(a.replace("X", "T/loop") for a in arguments),
            "cannot read T/loop: Too many levels of symbolic links",
        )
        for name, arguments in FOLDERS.items()
    },
    **{
        f"{name}, too long": (
            tuple(a.replace("X", "T/" + "x" * 300) for a in arguments),
            "x: File name too long",
        )
        for name, arguments in FOLDERS.items()
    },
    "--max-shard-size of 5,000 digits": (
        ("convert", "a", "b", "--max-shard-size", "9" * 5000),
        "write a size such as 2GB",
    ),
    "a name of the Hub": (("check", "Qwen/Qwen3-0.6B"), "hf download Qwen/Qwen3-0.6B --local-dir"),
    "megatron": (("check", "T/megatron"), "is a Megatron folder: see it with `isomodels inspect"),
    **{
        f"{' '.join(command)} --dtype": (
            (*command, "--dtype", "float16"),
            "'--dtype': 'float16' is not one of 'float32', 'bfloat16'",
        )
        for command in (
            ("convert", "T/model", "T/out"),
            ("contract", "show", "T/model"),
            ("parity",),
        )
    },
    **{
        f"{command[0]} --device {device}": (
            (*command, "--device", device),
            f"--device {device}: write cpu, cuda or cuda:1",
        )
        for command in (("validate",), ("contract", "show", "T/model"), WITH_IDS)
        for device in ("tpu", "mps", "cuda:", "cuda:x", "cuda:1000", "cpu:0", "CPU", "")
    },
    "parity --device": (("parity", "--device", "cuda:1"), "'cuda:1' is not one of 'cpu', 'cuda'"),
    "--workload": (("parity", "--workload", "big"), "'big' is not one of 'short', 'quick', 'full'"),
    "--host": ((*WITH_IDS, "--host", "sglang"), "is not one of 'module', 'vllm', 'megatron'"),
    "--to": (("convert", "a", "b", "--to", "gguf"), "'gguf' is not one of 'hf', 'megatron'"),
    "--experts": (("convert", "a", "b", "--experts", "x"), "'x' is not one of 'apart', 'fused'"),
    "--max-shard-size": (("convert", "a", "b", "--max-shard-size", "2TB"), "such as 2GB"),
    "--arch": (("parity", "--arch", "GPT2LMHeadModel"), "--arch: unknown architecture"),
    **{
        f"--{side}-layout {text}": (("parity", f"--{side}-layout", text), word)
        for side in ("trainer", "engine")
        for text, word in (
            ("tp0", f"--{side}-layout: layout 'tp0': 'tp0' is none of tpN, sp,"),
            ("", f"--{side}-layout: layout ''"),
            ("tp2,tp2", "states tp twice"),
            ("sp", "give tpN"),
            ("ep3", "use one of 1"),
        )
    },
    "--seed": (("parity", "--seed", "x"), "Invalid value for '--seed'"),
    "parity --json": (("parity", "--json", "T/none/x"), "there is no folder T/none: make it first"),
    "validate --json": (("validate", "--json", "T"), "--json T is a folder"),
    "--compare": (("validate", "--compare", "T/none"), "there is no report T/none: write it with"),
    "--compare folder": (("validate", "--compare", "T"), "T is a folder: give the file that"),
    "trace diff": (("trace", "diff", "T/file", "T/none"), "there is no recording T/none"),
    "trace diff folder": (("trace", "diff", "T", "T/file"), "T is a folder: give the file that"),
    "no command": (("convrt",), "No such command 'convrt'"),
    "no option": (("convert", "a", "b", "--lik", "c"), "No such option: --lik"),
    "no argument": (("convert", "a"), "Missing argument 'destination'"),
    "one too many": (("check", "a", "b"), "unexpected extra argument"),
    # An option that would do nothing is a misunderstanding.
    "--device of a host": (
        (*WITH_IDS, "--host", "vllm", "--device", "cpu"),
        "--device is for the module alone",
    ),
    "--experts of megatron": (
        ("convert", "T/model", "T/out", "--to", "megatron", "--experts", "fused"),
        "--experts is for Hugging Face folders",
    ),
    "--device of contracts": (
        ("contract", "diff", "T/file", "T/ids.json", "--device", "cuda"),
        "--device is for a checkpoint's folder",
    ),
    "--dtype of a contract": (
        ("contract", "show", "T/file", "--dtype", "float32"),
        "--dtype is for a checkpoint's folder",
    ),
    "--compare of the interpreter": (
        ("validate", "--interpret", "--compare", "T/file"),
        "--interpret shows no bits",
    ),
    "--quick of the interpreter": (("validate", "--interpret", "--quick"), "has one form"),
    "--num-layers": (("parity", "--num-layers", "2"), "--num-layers is only for --config"),
    "--forward-only": (("parity", "--forward-only"), "--forward-only is only for --config"),
    "two models": (("parity", "--config", "T", "--checkpoint", "T"), "give one of them"),
}
# Runs every command where no import of torch or of a host succeeds.
CODE = """
import json, sys
sys.modules.update(dict.fromkeys(("torch", "vllm", "transformers")))
sys.modules["megatron"] = None
from typer.testing import CliRunner
from isomodels.cli.main import app
done = [CliRunner().invoke(app, arguments) for arguments in json.load(sys.stdin)]
print(json.dumps([[one.exit_code, one.stdout, one.stderr] for one in done]))
"""


def _files(folder: Path) -> None:
    for name in ("empty", "model", "megatron"):
        (folder / name).mkdir()
    (folder / "model" / "config.json").write_text("{}")
    (folder / "megatron" / ".metadata").touch()
    (folder / "file").write_text("{}")
    (folder / "loop").symlink_to("loop")
    (folder / "ids.json").write_text("[[1, 2, 3, 4, 5], [6]]")
    (folder / "many.json").write_text(json.dumps([[1] * 65_536, [2]]))
    save_file({"x": torch.zeros(3)}, folder / "other.safetensors")
    for name, (content, _) in IDS.items():
        if content is not None:
            data = content if isinstance(content, bytes) else content.encode()
            (folder / f"ids-{name}").write_bytes(data)


@pytest.fixture(scope="module")
def answers(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, list]]:
    """Exit code, stdout and stderr of every wrong command, by name, in a folder called T."""
    folder = tmp_path_factory.mktemp("arguments")
    (folder / "T").mkdir()
    _files(folder / "T")
    before = {path: path.lstat().st_mtime_ns for path in folder.rglob("*")}
    done = subprocess.run(
        [sys.executable, "-c", CODE],
        input=json.dumps([arguments for arguments, _ in WRONG.values()]),
        capture_output=True,
        text=True,
        timeout=120,
        cwd=folder,
    )
    assert done.returncode == 0, done.stderr
    yield dict(zip(WRONG, json.loads(done.stdout), strict=True))
    # nothing was written, or left
    assert {path: path.lstat().st_mtime_ns for path in folder.rglob("*")} == before


@pytest.mark.parametrize("name", WRONG)
def test_a_wrong_argument_is_one_sentence_without_torch(answers, name: str) -> None:
    code, stdout, stderr = answers[name]
    assert (code, stdout) == (2, ""), stderr
    assert stderr.startswith("error: ")
    assert stderr.count("\n") == 1
    assert WRONG[name][1] in stderr
    if "--ids" in name:
        assert FORM in stderr


def commands() -> Iterator[tuple[str, ...]]:
    """Every command, as its words."""
    top = typer.main.get_command(app)
    for name, command in top.commands.items():
        below = getattr(command, "commands", None)
        yield from ((name, one) for one in below) if below else ((name,),)


@pytest.mark.parametrize("command", commands(), ids=" ".join)
def test_help_teaches(command: tuple[str, ...]) -> None:
    text = CliRunner().invoke(app, [*command, "--help"]).stdout
    assert f"Example: isomodels {' '.join(command)}" in text
    assert "Exit code: 0 " in text
    assert "--json" in text
    # an option of any text says what text: its choices, or the name of its form
    assert "<str>" not in text
    assert "<list" not in text
    for option, choices in (
        ("--dtype", "<float32|bfloat16>"),
        ("--host", "<module|vllm|megatron>"),
        ("--workload", "<short|quick|full>"),
        ("--to", "<hf|megatron>"),
        ("--experts", "<apart|fused>"),
        ("--device", "<cpu|cuda>" if command == ("parity",) else "<cpu|cuda|cuda:N>"),
    ):
        if f"  {option} " in text:
            assert f"{option} {choices}" in text


def test_choices_are_those_that_there_are() -> None:
    assert [one.value for one in Dtype] == list(DTYPES)
    assert [one.value for one in Workload] == list(WORKLOADS)


def test_a_fault_of_the_command_is_not_a_difference(monkeypatch, tmp_path: Path) -> None:
    """Exit code 1 says that something differs: a script must not take a crash for that."""

    def crash(*_: object) -> None:
        raise ZeroDivisionError("broken")

    monkeypatch.setattr("isomodels.cli.contract._check", crash)
    done = CliRunner().invoke(app, ["contract", "diff", str(tmp_path), str(tmp_path)])
    assert done.exit_code == 3
    assert "ZeroDivisionError: broken" in done.stderr
    assert "error: isomodels failed" in done.stderr
