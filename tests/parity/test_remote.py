"""An object in another process: its values, its errors, its end."""

import os
from collections.abc import Iterator

import pytest

from isomodels.errors import CheckpointError
from isomodels.parity.remote import ProcessError, Remote, threads


class Target:
    """Runs in the other process."""

    def __init__(self, start: int = 0):
        if start < 0:
            raise CheckpointError("no such start")
        self.value = start

    def add(self, number: int) -> int:
        self.value += number
        return self.value

    def threads(self) -> int:
        import torch

        return torch.get_num_threads()

    def refuse(self) -> None:
        try:
            raise CheckpointError("a broken file")
        except CheckpointError as error:
            raise RuntimeError("the host gave up") from error

    def fail(self) -> None:
        raise KeyError("lost")

    def die(self) -> None:
        print("last words", flush=True)
        os._exit(7)


TARGET = "tests.parity.test_remote:Target"


@pytest.fixture(autouse=True)
def _importable(monkeypatch: pytest.MonkeyPatch, pytestconfig: pytest.Config) -> None:
    monkeypatch.setenv("PYTHONPATH", str(pytestconfig.rootpath))


def test_calls_keep_their_order_and_values() -> None:
    with Remote("target", TARGET, start=2) as remote:
        remote.submit("add", 3)
        remote.submit("add", 5)
        assert [remote.result() for _ in range(3)] == [None, 5, 10]
        assert remote.call("add", 1) == 11
    assert not remote.log.exists()


def test_a_process_beside_others_has_one_thread_unless_it_is_given_more(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("OMP_NUM_THREADS", "3")
    assert threads("cpu") == {"OMP_NUM_THREADS": "3"}
    assert threads("cuda") == {}
    monkeypatch.delenv("OMP_NUM_THREADS")
    assert threads("cpu") == {"OMP_NUM_THREADS": "1"}
    # An engine of vLLM on a CPU has this process preload a library that reads it earlier.
    monkeypatch.delenv("LD_PRELOAD", raising=False)
    with Remote("target", TARGET, environment=threads("cpu")) as remote:
        remote.result()
        assert remote.call("threads") == 1


def test_our_errors_arrive_as_they_are() -> None:
    with (
        Remote("target", TARGET, start=-1) as remote,
        pytest.raises(CheckpointError, match="start"),
    ):
        remote.result()
    assert not remote.log.exists()


@pytest.fixture
def remote() -> Iterator[Remote]:
    with Remote("target", TARGET) as started:
        started.result()
        yield started
    started.log.unlink(missing_ok=True)


def test_our_error_is_found_below_a_host_error(remote: Remote) -> None:
    with pytest.raises(CheckpointError, match="a broken file"):
        remote.call("refuse")


def test_other_errors_name_the_log(remote: Remote) -> None:
    with pytest.raises(ProcessError, match=r"KeyError.*\n.*log"):
        remote.call("fail")
    assert "lost" in remote.log.read_text()


def test_a_dead_process_is_an_error_with_its_last_words(remote: Remote) -> None:
    with pytest.raises(ProcessError, match=r"exit code 7.*last words"):
        remote.call("die")
    with pytest.raises(ProcessError, match="exit code 7"):
        remote.call("add", 1)
