"""What may be asked of grpo.py, and the folder that a run owns."""

import json
import os
import subprocess
import sys
from argparse import Namespace
from pathlib import Path
from types import ModuleType

import psutil
import pytest

from isomodels.errors import CheckpointError
from tests.examples.conftest import SCRIPT

# Each option of a run with another value than its default.
OTHERS = {
    "checkpoint": Path(__file__).parent,
    "engine": "vllm",
    "device": "cuda",
    "dtype": "float32",
    "prompts": 3,
    "group": 2,
    "behind": 1,
    "lr": 1e-3,
    "warm_up": 1,
    "seed": 1,
}


@pytest.fixture
def command_line(grpo: ModuleType) -> ModuleType:
    return sys.modules["command_line"]


@pytest.fixture
def parse(command_line: ModuleType, monkeypatch: pytest.MonkeyPatch):
    def parsed(*given: str) -> Namespace:
        monkeypatch.setattr(sys, "argv", ["grpo.py", *given])
        return command_line.parse(None)

    return parsed


@pytest.mark.parametrize(
    ("given", "named"),
    [
        ("--steps 0", "--steps must be at least 1"),
        ("--prompts 0", "--prompts must be at least 1"),
        ("--group 1", "--group must be at least 2"),
        ("--behind -1", "--behind must be at least 0"),
        ("--warm-up -1", "--warm-up must be at least 0"),
        ("--seed -1", "--seed must be at least 0"),
        ("--device tpu", "argument --device: invalid choice"),
        ("--lr nan", "--lr must be at least 0"),
        ("--steps 3 --behind 3", "--behind must be less than --steps"),
        ("--behind 1 --resume", "leave out --behind"),
        ("--checkpoint nowhere", "--checkpoint nowhere has no config.json"),
        (f"--checkpoint {Path(__file__).parent}", "examples has no config.json"),
    ],
)
def test_what_cannot_be_asked_is_one_line(parse, capsys, given: str, named: str):
    with pytest.raises(SystemExit) as ended:
        parse("OUT", *given.split())
    assert ended.value.code == 2
    assert named in capsys.readouterr().err


def test_help_tells_of_every_option_with_its_default(parse, capsys):
    names = vars(parse("OUT"))
    with pytest.raises(SystemExit) as ended:
        parse("--help")
    shown = capsys.readouterr().out
    assert ended.value.code == 0
    for name in names.keys() - {"out"}:
        assert f"--{name.replace('_', '-')}" in shown
    assert shown.count("(default: ") == len(names) - 1


def begun(command_line: ModuleType, args: Namespace, lines: int = 1) -> None:
    """What a run with these options leaves that was killed after so many steps."""
    command_line.claim(args).close()
    (args.out / "log.jsonl").write_text("{}\n" * lines)


@pytest.mark.parametrize("name", OTHERS)
def test_other_options_at_resume_are_refused_by_name(command_line, parse, tmp_path, name):
    args = parse(str(tmp_path), "--device", "cpu")
    assert vars(args).keys() - OTHERS.keys() == {"out", "steps", "resume"}  # no option is left out
    begun(command_line, args)
    before = (tmp_path / "options.json").read_text()
    args.resume = True
    changed = Namespace(**vars(args) | {name: OTHERS[name]})
    told = rf"begun with other options: {name} {getattr(args, name)}, now {OTHERS[name]}$"
    with pytest.raises(CheckpointError, match=told):
        command_line.claim(changed)
    assert (tmp_path / "options.json").read_text() == before
    args.steps += 1  # which may change
    command_line.claim(args).close()


def test_a_run_does_not_take_the_place_of_another(command_line, parse, tmp_path):
    args = parse(str(tmp_path))
    begun(command_line, args, lines=0)  # killed before its first step: nothing is lost
    begun(command_line, args)
    with pytest.raises(CheckpointError, match="holds a run: give another folder, or --resume"):
        command_line.claim(args)


@pytest.mark.parametrize("kept", [None, "", '{"dtype": '])
def test_nothing_to_resume(command_line, parse, tmp_path, kept: str | None):
    if kept is not None:
        (tmp_path / "options.json").write_text(kept)
    with pytest.raises(CheckpointError, match=r"options\.json tells of no run"):
        command_line.claim(parse(str(tmp_path), "--resume"))


def test_a_file_is_no_folder_of_a_run(command_line, parse, tmp_path):
    (tmp_path / "file").touch()
    with pytest.raises(CheckpointError, match=r"cannot write into .*file"):
        command_line.claim(parse(str(tmp_path / "file")))


def in_a_fork(action) -> int:
    child = os.fork()
    if child == 0:
        try:
            action()
        except CheckpointError as error:
            os._exit(7 if "another run writes into" in str(error) else 8)
        except BaseException:
            os._exit(9)
        os._exit(0)
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])


def test_one_run_at_a_time(command_line, parse, tmp_path):
    args = parse(str(tmp_path))
    begun(command_line, args)
    args.resume = True
    held = command_line.claim(args)
    assert in_a_fork(lambda: command_line.claim(args)) == 7
    held.close()
    assert in_a_fork(lambda: command_line.claim(args)) == 0


def test_what_a_run_started_does_not_hold_its_folder(command_line, parse, tmp_path):
    """A killed run's engine may live a little longer."""
    args = parse(str(tmp_path))
    held = command_line.claim(args)
    reading, writing = os.pipe()
    child = os.fork()
    if child == 0:
        os.close(writing)
        os.read(reading, 1)  # until the parent closes its end
        os._exit(0)
    held.close()
    command_line.claim(args).close()
    os.close(writing)
    os.close(reading)
    os.waitpid(child, 0)


PARENT = """
import multiprocessing, os, time
from command_line import die_with_parent

def wait():
    die_with_parent()
    print(os.getpid(), flush=True)
    time.sleep(600)

if __name__ == "__main__":
    multiprocessing.get_context("spawn").Process(target=wait).start()
"""


def test_a_process_of_the_engine_ends_with_a_run_that_is_killed(tmp_path):
    script = tmp_path / "parent.py"
    script.write_text(PARENT)
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(SCRIPT.parent), *sys.path])}
    with subprocess.Popen(
        [sys.executable, script], stdout=subprocess.PIPE, env=environment
    ) as parent:
        assert parent.stdout is not None
        child = psutil.Process(int(parent.stdout.readline()))
        assert child.ppid() == parent.pid
        parent.kill()
    _, alive = psutil.wait_procs([child], timeout=30)
    for one in alive:
        one.kill()
    assert not alive


def test_a_log_and_a_state_that_do_not_fit_are_refused(command_line, tmp_path):
    log = tmp_path / "log.jsonl"
    lines = [json.dumps({"step": step, "loss": 0.5}).encode() + b"\n" for step in range(3)]
    whole = b"".join(lines)
    for size in range(len(whole) + 1):  # however much is left of it, and whatever the state has
        left = whole[:size]
        done = left.count(b"\n")
        partial = not left.endswith(b"\n") and size > 0
        for steps in range(4):
            log.write_bytes(left)
            if steps <= done and done + partial <= steps + 1:
                command_line.cut_log(log, steps)
                assert log.read_bytes() == b"".join(lines[:steps])
            else:
                with pytest.raises(CheckpointError, match=f"the state is of {steps} steps"):
                    command_line.cut_log(log, steps)
                assert log.read_bytes() == left
    log.unlink()
    command_line.cut_log(log, 0)
    assert log.read_bytes() == b""
