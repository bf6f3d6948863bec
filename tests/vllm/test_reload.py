"""New weights in a live engine: nothing of the old ones may be served."""

import json
import shutil

import pytest
import torch
from safetensors.torch import load_file, save_file

from isomodels.contract import Contract, contract_of
from isomodels.errors import CheckpointError, IsoError
from isomodels.vllm import Engine, Request
from isomodels.weights_conv.files import CONTRACT
from tests.checkpoints import make_mimo
from tests.vllm.support import assert_equal_bits, draw, load_core

SIZES = {"num_hidden_layers": 2, "hidden_size": 64, "intermediate_size": 128}
PROMPT = Request(draw(60, 1), max_tokens=6, temperature=0.0)


@pytest.fixture(scope="module")
def checkpoints(tmp_path_factory):
    """The same config with two sets of weights: qkv bias, no qk-norm, MTP layers to skip."""
    root = tmp_path_factory.mktemp("reload")
    return [make_mimo(root / str(seed), torch.bfloat16, seed=seed, **SIZES) for seed in (0, 1)]


@pytest.fixture(scope="module")
def engine(checkpoints):
    limits = {"max_model_len": 256, "max_num_batched_tokens": 64, "block_size": 16}
    with Engine(checkpoints[0], dtype="bfloat16", **limits) as engine:
        yield engine


@pytest.fixture
def cores(checkpoints, engine):
    """Both modules; the engine starts with the first."""
    engine.reload(checkpoints[0])
    return [load_core(path) for path in checkpoints]


def test_reload_drops_the_prefix_cache(engine, checkpoints, cores):
    first = engine.run([PROMPT])
    assert engine.run([PROMPT])[0].num_cached_tokens == 48
    addresses = [p.data_ptr() for p in engine._model.parameters()]
    engine.reload(checkpoints[1])
    assert addresses == [p.data_ptr() for p in engine._model.parameters()]
    (after,) = engine.run([PROMPT])
    assert after.num_cached_tokens == 0
    assert_equal_bits(cores[1], [after])
    assert_equal_bits(cores[0], first)
    assert [t.id for t in first[0].tokens] != [t.id for t in after.tokens]


def test_without_the_patch_a_stale_prefix_would_be_served(engine, checkpoints, cores):
    """The reason for the patch of EngineCore: this is what vLLM alone does."""
    from vllm.v1.engine.core import EngineCore

    engine.run([PROMPT])
    core = engine.llm.llm_engine.engine_core.engine_core
    unpatched = EngineCore.collective_rpc.__wrapped__
    unpatched(core, "reload_weights", kwargs={"weights_path": str(checkpoints[1])})
    (stale,) = engine.run([PROMPT])
    assert stale.num_cached_tokens == 48
    with pytest.raises(AssertionError, match="differ"):
        assert_equal_bits(cores[1], [stale])


def test_running_request_is_recomputed(engine, checkpoints, cores):
    """Tokens before the reload are of the old weights, tokens after it of the new ones alone."""
    engine.steps, engine._live = [], {}
    engine._add(0, Request(PROMPT.prompt, max_tokens=8, temperature=0.0))
    for _ in range(4):
        assert not any(output.finished for output in engine._engine.step())
    engine.reload(checkpoints[1])
    outputs = []
    while engine._engine.has_unfinished_requests():
        outputs += [o for o in engine._engine.step() if o.finished]
    (result,) = engine._collect(outputs[0])
    before = sum(token.preemptions == 0 for token in result.tokens)
    assert 0 < before < 8
    assert result.tokens[before].rows == len(PROMPT.prompt) + before
    for core, part in ((cores[0], slice(0, before)), (cores[1], slice(before, 8))):
        sequence = [*result.prompt, *(t.id for t in result.tokens)]
        (scored,) = _scored(core, sequence)
        got = [t.logprob for t in result.tokens][part]
        assert got == scored[len(PROMPT.prompt) - 1 :][part]


def _scored(core, sequence):
    from tests.vllm.support import packed_logprobs

    (rows,) = packed_logprobs(core, [sequence], [1.0])
    return [rows[:-1].gather(1, torch.tensor(sequence[1:])[:, None])[:, 0].tolist()]


@pytest.mark.parametrize(
    "damage", ["absent", "other config", "truncated", "dtype", "missing", "bits"]
)
@pytest.mark.parametrize("door", ["isomodels", "collective_rpc"])
def test_refused_reload_keeps_the_old_weights(engine, checkpoints, cores, tmp_path, damage, door):
    path = _damaged(checkpoints[1], tmp_path / "damaged", damage)
    if door == "isomodels":
        with pytest.raises(IsoError):
            engine.reload(path)
    else:
        with pytest.raises(IsoError) as error:
            engine.llm.collective_rpc("reload_weights", kwargs={"weights_path": str(path)})
        assert str(path) in str(error.value)
        assert "\n" not in str(error.value)
    results = engine.run([PROMPT, Request(draw(20, 2), max_tokens=3)])
    assert_equal_bits(cores[0], results)
    engine.llm.collective_rpc("reload_weights")  # from where the weights were last taken
    assert_equal_bits(cores[0], engine.run([PROMPT]))


def _damaged(source, path, damage):
    if damage == "absent":
        return path
    if damage == "other config":
        return make_mimo(path, torch.bfloat16, **{**SIZES, "rope_theta": 10000})
    shutil.copytree(source, path)
    if damage == "bits":  # a training's folder, under another version of an operation
        made = contract_of(path).to_dict()
        made["numerical_policy"]["schedules"]["linear"]["version"] = 99
        other = Contract(made["semantic"], made["numerical_policy"], made["deployment"])
        (path / CONTRACT).write_text(other.to_json())
        return path
    file = path / "model.safetensors"
    if damage == "truncated":
        file.write_bytes(file.read_bytes()[:-64])
        return path
    tensors = load_file(file)
    name = "model.layers.1.mlp.up_proj.weight"
    if damage == "dtype":
        tensors[name] = tensors[name].float()
    else:
        del tensors[name]
    save_file(tensors, file, metadata={"format": "pt"})
    return path


@pytest.mark.parametrize("place", ["args", "kwargs"])
def test_unsound_folder_changes_nothing(engine, cores, tmp_path, place):
    """It is refused before vLLM touches the weights: even the prefix cache is as it was."""
    engine.run([PROMPT])
    path = str(tmp_path / "nobody" / "absent")
    given = {"args": (None, path)} if place == "args" else {"kwargs": {"weights_path": path}}
    with pytest.raises(CheckpointError, match=rf"^there is no folder {path}$"):
        engine.llm.collective_rpc("reload_weights", **given)
    (hit,) = engine.run([PROMPT])
    assert hit.num_cached_tokens == 48
    assert_equal_bits(cores[0], [hit])


def test_other_config_is_named(engine, tmp_path):
    path = make_mimo(tmp_path, torch.bfloat16, **{**SIZES, "rope_theta": 10000})
    assert json.loads((path / "config.json").read_text())["rope_theta"] == 10000
    with pytest.raises(CheckpointError, match=r"config\.json differs"):
        engine.reload(path)


WRONG = (
    {"kwargs": {"path": "x"}},
    {"kwargs": {"weights_path": 5}},
    {"kwargs": {"weights_path": ["x"]}},
    {"kwargs": {"weights_iterator": "x"}},
    {"kwargs": {"weights_iterator": [], "is_checkpoint_format": False}},
    {"kwargs": ["x"]},
    {"args": ("x",)},
    {"args": (None, None, False)},
    {"args": (None, None, True, 1)},
)


def test_wrong_arguments_change_nothing(engine, cores):
    """As anyone may send them over HTTP, or a script that was written for stock vLLM."""
    engine.run([PROMPT])
    for given in WRONG:
        with pytest.raises(CheckpointError, match="takes the folder of a checkpoint as weights_pa"):
            engine.llm.collective_rpc("reload_weights", **given)
    (hit,) = engine.run([PROMPT])
    assert hit.num_cached_tokens == 48
    assert_equal_bits(cores[0], [hit])
