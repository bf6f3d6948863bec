"""The comparison of dumps sees a single bit, a missing layout, other tokens and another expert."""

import time

import numpy as np
import pytest

pytest.importorskip("vllm", reason="vllm is not installed")
pytest.importorskip("megatron.core", reason="megatron-core is not installed")

from isomodels.config import read_config
from isomodels.vllm.results import Result, Token
from tests.multi_gpu import layouts
from tests.multi_gpu.layouts import Dump, compare, engine_layouts, trainer_layouts

SEQUENCES = [[5, 6, 7, 8], [1, 2, 3]]
LOGPROBS = [np.array(row, np.float32) for row in ([-1.5, -2.5, -0.1], [-3.0, -0.0])]
ROUTES = [np.arange(2 * len(ids)).reshape(-1, 1, 2).astype(np.int32) for ids in SEQUENCES]


@pytest.fixture
def dumps():
    engine, trainer = Dump(), Dump()
    forward, score = ([row.copy() for row in LOGPROBS] for _ in range(2))
    layouts._Trainers._fill(trainer, SEQUENCES, {"forward": forward, "score": score}, ROUTES)
    results = []
    for ids, row, routes in zip(SEQUENCES, LOGPROBS, ROUTES, strict=True):
        tokens = [
            Token(ids[i], float(row[i - 1]), 0, 1, 0, 0, replayed=i % 2 == 0)
            for i in range(2, len(ids))
        ]
        prompt = tuple(ids[:2])
        result = Result(0, 0, prompt, tokens, [float(row[0])], routes=[(0, routes[:1].copy())])
        results.append(result)
    layouts._fill(engine, results)
    return {("engine", "tp2"): engine, ("trainer", "tp1"): trainer}


def line(dumps, side="engine", layout="tp2"):
    return compare(side, layout, dumps[side, layout], dumps)


def test_equal_dumps(dumps):
    engine, trainer = line(dumps), line(dumps, "trainer", "tp1")
    assert (engine.compared, engine.differ, engine.from_graphs, engine.error) == (5, 0, 2, "")
    assert (engine.routes, engine.routes_differ) == (2, 0)
    assert (trainer.compared, trainer.differ, trainer.routes) == (10, 0, 7)


def test_one_bit(dumps):
    dumps["engine", "tp2"].bits["graph"][0][2][0] ^= 1
    assert line(dumps).differ == 1
    # -0 and 0 are equal numbers and other bits
    (*_, (number, _, bits)) = dumps["trainer", "tp1"].bits["score"]
    assert number == 1
    bits[1] = 0
    assert line(dumps, "trainer", "tp1").differ == 1


def test_other_tokens_another_expert_and_no_reference(dumps):
    dumps["engine", "tp2"].routes[1][0][1][0, 0, 1] += 1
    assert line(dumps).routes_differ == 1
    dumps["engine", "tp2"].tokens[0][3] = 9
    assert line(dumps).error == "the engine sampled other tokens"
    dumps["trainer", "tp1"].error = "ended"
    assert line(dumps).error == "no trainer to compare with"


def config_of(name):
    return read_config(layouts.CONFIGS / name)[1]


def test_layouts_of_so_many_gpus():
    dense, experts = config_of("qwen3-8b"), config_of("qwen3-30b-a3b")
    assert engine_layouts(2, dense) == ["tp1", "tp2"]
    assert engine_layouts(4, experts) == ["tp1", "tp2", "tp4", "tp2,ep2", "tp4,ep4"]
    assert engine_layouts(8, dense) == ["tp1", "tp2", "tp4", "tp8"]
    # 20 heads, which eight ranks do not divide
    assert engine_layouts(8, config_of("glm-4.7-flash"))[:3] == ["tp1", "tp2", "tp4"]
    for gpus in (2, 4, 8):
        for config in (dense, experts):
            degrees = [layouts.Degrees.parse(one) for one in trainer_layouts(gpus, config)]
            assert degrees[0].ranks == 1
            assert max(one.ranks for one in degrees) == gpus
            assert max(one.ep for one in degrees) == (gpus if config is experts else 1)


def test_an_engine_ends_as_soon_as_its_dump_is_there():
    """The trainers need its memory."""
    for fault in ("", "the process failed"):
        calls, dump = [], Dump()

        class Engine:
            name = "engine"

            def result(self, fault=fault):
                if fault:
                    raise RuntimeError(fault)

            def __getattr__(self, name, calls=calls):
                return lambda: calls.append(name)

        layouts._dump_engine(Engine(), [], dump, time.monotonic() + 10, lambda _: None)
        assert calls == (["kill", "close"] if fault else ["close"])
        assert fault in dump.error
