"""Trainers in parallel layouts send their pieces into a running engine, which has their bits."""

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from multiprocessing.connection import Listener
from pathlib import Path
from typing import Any

import pytest
import torch

pytest.importorskip("vllm", reason="vllm is not installed")
pytest.importorskip("megatron.core", reason="megatron-core is not installed")

from isomodels.checkpoint import load_checkpoint
from isomodels.errors import IsoError
from isomodels.layers.parallel import named_tensors
from isomodels.megatron.degrees import Degrees
from isomodels.parity.checkpoints import random_checkpoint, tiny_config
from isomodels.parity.ranks import Ranks
from isomodels.parity.remote import ProcessError
from isomodels.vllm import Engine, LLMSyncClient, Request
from tests.megatron.bits import assert_all_same_bits, assert_same_bits
from tests.sync import support
from tests.vllm.support import draw

SEQUENCES = [draw(n, n) for n in (17, 5, 33, 2)]
PROMPTS = [draw(40, 1), draw(7, 2)]
LIMITS = {
    "max_model_len": 64,
    "num_gpu_blocks_override": 24,
    "block_size": 16,
    "skip_tokenizer_init": True,
}
HYBRID = {
    "full_attention_interval": 2,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
}
MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "qwen3-tied": ("Qwen3ForCausalLM", {"tie_word_embeddings": True}),
    "mimo": ("MiMoForCausalLM", {}),
    "qwen3-moe": ("Qwen3MoeForCausalLM", {}),
    "glm": ("Glm4MoeLiteForCausalLM", {}),
    "qwen3_5-moe": ("Qwen3_5MoeForCausalLM", HYBRID),
}
CASES = [
    ("qwen3-tied", "tp2", 1, {}),
    *[
        pytest.param(*case, marks=pytest.mark.slow)
        for case in (
            ("qwen3-tied", "pp2", 1, {}),  # the last stage's copy of the embedding stays there
            ("mimo", "pp2,vpp2", 1, {}),
            ("qwen3-tied", "tp2,pp2", 2, {}),
            ("qwen3-moe", "dp2,ep2", 1, {}),
            ("glm", "tp2,sp,ep2", 1, {}),
            ("glm", "tp2,sp,pp2,ep2", 2, {"enable_expert_parallel": True}),
            ("qwen3_5-moe", "tp2,ep2", 1, {}),
        )
    ],
]


@contextmanager
def trainer(layout: str) -> Iterator[Ranks]:
    with Ranks("sync", "tests.sync.trainer_rank:SyncRank", Degrees.parse(layout).ranks) as ranks:
        ranks.results()
        yield ranks


class Served(threading.Thread):
    """The engine's end: makes the calls that the first rank asks for, until it goes."""

    def __init__(self, client: LLMSyncClient, before: Any = lambda name: None):
        super().__init__(daemon=True)
        self.client, self.before = client, before
        self.listener = Listener(family="AF_UNIX")
        self.address = str(self.listener.address)
        self.start()

    def run(self) -> None:
        with self.listener, self.listener.accept() as pipe:
            support.serve(pipe, self.client, self.before)


def check(engine: Engine, folder: Path, ranks: Ranks) -> None:
    """The engine's logprobs are the trainer's, and its tensors those of the saved weights."""
    results = engine.run([Request(prompt, max_tokens=6) for prompt in PROMPTS])
    sequences = [[*r.prompt, *(token.id for token in r.tokens)] for r in results]
    for result, row in zip(results, ranks.call("score", sequences), strict=True):
        got = torch.tensor([token.logprob for token in result.tokens])
        assert_same_bits(got, row[-len(got) :])
    if engine._model is not None:  # of one worker
        expected = named_tensors(load_checkpoint(folder))
        found = named_tensors(engine._model.core)
        assert found.keys() == expected.keys()
        assert_all_same_bits(list(found.values()), [expected[name] for name in found])


@pytest.mark.parametrize(("model", "layout", "workers", "how"), CASES)
def test_every_rank_sends_its_own(tmp_path, monkeypatch, pytestconfig, model, layout, workers, how):
    monkeypatch.setenv("PYTHONPATH", str(pytestconfig.rootpath))
    architecture, fields = MODELS[model]
    layers = 4 if "vpp" in layout else 2
    raw = {**tiny_config(architecture), "num_hidden_layers": layers, **fields}
    folder = random_checkpoint(tmp_path / "start", raw, "bfloat16", seed=1)
    size = sum(t.nbytes for t in named_tensors(load_checkpoint(folder)).values())
    with (
        trainer(layout) as ranks,
        Engine(
            folder,
            dtype="bfloat16",
            tensor_parallel_size=workers,
            weight_transfer_config={"backend": "isomodels"},
            **how,
            **LIMITS,
        ) as engine,
    ):
        client = LLMSyncClient(engine.llm)
        ranks.call("open", str(folder), "bfloat16", layout)
        ranks.call("connect", Served(client).address)
        check(engine, folder, ranks)  # the same weights before any sync; fills the prefix cache
        for step in range(2):
            out = tmp_path / str(step)
            ranks.call("step", SEQUENCES, str(out))
            assert ranks.call("send", str(out)) == size  # each bit of the model once
            assert client.weight_version() == str(out)
            check(engine, out, ranks)


@pytest.mark.slow
def test_ranks_that_lack_or_die_leave_the_old_weights(tmp_path, monkeypatch, pytestconfig):
    """A rank that sends nothing, and one that is killed before the engine reads its memory."""
    monkeypatch.setenv("PYTHONPATH", str(pytestconfig.rootpath))
    raw = {**tiny_config("Qwen3ForCausalLM"), "num_hidden_layers": 2}
    folder = random_checkpoint(tmp_path / "start", raw, "bfloat16", seed=1)
    arguments = {"dtype": "bfloat16", "weight_transfer_config": {"backend": "isomodels"}}
    with Engine(folder, **arguments, **LIMITS) as engine:
        client = LLMSyncClient(engine.llm)
        with trainer("tp2") as ranks:
            ranks.call("open", str(folder), "bfloat16", "tp2")
            ranks.call("connect", Served(client).address)
            ranks.call("step", SEQUENCES, str(tmp_path / "out"))
            with pytest.raises(IsoError, match="not filled exactly once") as refused:
                ranks.call("send", "lacking", without=1)
            assert "keeps its old ones" in str(refused.value)
        tensors_of_start(engine, folder)

        with trainer("tp2") as ranks:
            ranks.call("open", str(folder), "bfloat16", "tp2")

            def kill(name: str) -> None:
                if name == "update_weights":
                    ranks.remotes[1].kill()

            served = Served(client, kill)
            ranks.call("connect", served.address)
            ranks.call("step", SEQUENCES, str(tmp_path / "out"))
            with pytest.raises((IsoError, ProcessError)):
                ranks.call("send", "killed")
            served.join(60)  # the engine has answered, if to nobody
            for remote in ranks.remotes:
                remote.log.unlink(missing_ok=True)
        assert engine._model.refusal is None
        tensors_of_start(engine, folder)
        assert client.weight_version() == "default"
        assert support.held_files() == []


def tensors_of_start(engine: Engine, folder: Path) -> None:
    expected = named_tensors(load_checkpoint(folder))
    for name, tensor in named_tensors(engine._model.core).items():
        assert_same_bits(tensor, expected[name], name)
