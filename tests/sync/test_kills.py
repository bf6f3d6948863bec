"""SIGKILL of a trainer at random moments of a sync: the engine has one set of weights, by bits."""

import random
import threading
import time
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

pytest.importorskip("vllm", reason="vllm is not installed")

from isomodels.contract import contract_of
from isomodels.errors import CheckpointError
from isomodels.layers.parallel import named_tensors
from isomodels.vllm import LLMSyncClient, Request
from tests.sync import support
from tests.vllm.support import assert_equal_bits, draw, load_core

KILLS = [
    ("shared_memory", 20),
    ("network", 8),
    pytest.param("network", 20, marks=[pytest.mark.slow, pytest.mark.timeout(900)]),
]


@pytest.fixture(scope="module")
def files(folders: list[Path]) -> list[str]:
    for folder in folders:
        torch.save(dict(named_tensors(load_core(folder))), folder / "tensors.pt")
    return [str(folder / "tensors.pt") for folder in folders]


def same(a: dict[str, Tensor], b: dict[str, Tensor]) -> bool:
    return a.keys() == b.keys() and all(
        torch.equal(a[name].view(torch.int16), b[name].view(torch.int16)) for name in a
    )


@pytest.mark.parametrize(("transport", "kills"), KILLS)
def test_a_killed_trainer_leaves_one_set_of_weights(engine, folders, files, transport, kills):
    sets = [torch.load(file) for file in files]
    contract = contract_of(folders[0]).to_json()
    client = LLMSyncClient(engine.llm)
    source = random.Random(transport)
    times: list[float] = []
    for _ in range(2):  # the first sync of an engine takes longer
        times.clear()
        process, pipe = support.start(contract, files, transport, 1)
        pipe.send(0)
        assert support.serve(pipe, client, lambda _: times.append(time.monotonic())) == "done"
        times.append(time.monotonic())
        process.kill()
    lengths = [end - begin for begin, end in pairwise(times)]  # of each call
    serving, phases, kept = 0, set(), {True: 0, False: 0}
    for kill in range(kills):
        process, pipe = support.start(contract, files, transport, 1)
        last: list[str] = ["before the handshake"]
        number = 1 - serving
        # in each call as often as in any other: one may take nearly all of the time
        call = kill % len(support.CALLS)
        timer = threading.Timer(source.uniform(0, lengths[call]), process.kill)
        pipe.send(number)

        def begun(name: str, last: list = last, call: int = call, timer: Any = timer) -> None:
            last.append(name)
            if name == support.CALLS[call]:
                timer.start()

        ended = support.serve(pipe, client, begun)
        timer.cancel()
        process.kill()
        process.join()
        pipe.close()
        phases.add(last[-1])
        own = named_tensors(engine._model.core)
        if engine._model.refusal is not None:  # only an engine that dies itself comes here
            pytest.fail(engine._model.refusal)
        now = [same(own, tensors) for tensors in sets].index(True)
        assert ended == "gone" or now == number
        kept[now == serving] += 1
        serving = now
        assert client.weight_version() == f"step {serving}"
        (result,) = engine.run([Request(draw(20, kill), max_tokens=2)])
        assert assert_equal_bits(load_core(folders[serving]), [result])
        assert support.held_files() == []
    print(f"{transport}, {kills} kills: {kept[True]} left the old weights, {kept[False]} the new")
    assert kept[True]
    assert len(phases) > 1


@pytest.mark.parametrize("transport", ["shared_memory", "network"])
@pytest.mark.parametrize("call", support.CALLS)
def test_a_trainer_that_dies_in_each_call(engine, folders, files, transport, call):
    """The call is made, and there is nobody to hear its answer."""
    sets = [torch.load(file) for file in files]
    contract = contract_of(folders[0]).to_json()
    client = LLMSyncClient(engine.llm)
    process, pipe = support.start(contract, files, transport, 1)
    pipe.send(0)
    assert support.serve(pipe, client) == "done"
    pipe.send(1)

    def kill(name: str) -> None:
        if name == call:
            process.kill()
            process.join()

    assert support.serve(pipe, client, kill) == "gone"
    changed = call == "finish_weight_update"
    assert same(named_tensors(engine._model.core), sets[changed])
    assert client.weight_version() == f"step {int(changed)}"
    assert support.held_files() == []
    if call == "start_weight_update":  # an update that is open: the next handshake ends it
        client.init_weight_transfer_engine({"contract": contract})
        client.start_weight_update()
        with pytest.raises(CheckpointError, match="ended without weights"):
            client.finish_weight_update("none")
    assert client.weight_version() == f"step {int(changed)}"
