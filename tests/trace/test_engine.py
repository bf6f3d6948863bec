"""A real engine recorded in chunks, decodes and preemption, against the module and Megatron.

On a GPU its decodes replay CUDA graphs that hold the digests.
"""

import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from isomodels.batch import Batch
from isomodels.checkpoint import load_checkpoint
from isomodels.contract import contract_of
from isomodels.contract.served import COUNT_OPERATIONS, installed, served_faults
from isomodels.errors import IsoError
from isomodels.kernels.linear import linear
from isomodels.kernels.swiglu import swiglu
from isomodels.layers import linear as linear_layers
from isomodels.trace import Recording, compare, record
from isomodels.vllm import Engine, Request
from tests.vllm.support import draw

ON_GPU = torch.cuda.is_available()
pytestmark = [pytest.mark.gpu] if ON_GPU else []

ISOMODELS = Path(sys.executable).with_name("isomodels")
TRAINED = Path(__file__).parents[1] / "data" / "tiny-qwen3"
DEVICE = "cuda" if ON_GPU else "cpu"
LIMITS = {
    "max_model_len": 256,
    "max_num_seqs": 8,
    "max_num_batched_tokens": 64,
    "block_size": 16,
    "num_gpu_blocks_override": 17,
}
GPU_LIMITS = {
    "enforce_eager": False,
    "gpu_memory_utilization": 0.02,
    "kv_cache_memory_bytes": 2**26,
}
# 70 tokens in two chunks; together more than all pages, so that one is preempted
REQUESTS = [Request(draw(n, n), max_tokens=m) for n, m in ((70, 24), (60, 40), (50, 50), (40, 40))]


@pytest.fixture(scope="module")
def engine():
    extra = {COUNT_OPERATIONS: True, **({"isomodels_trace": True} if ON_GPU else {})}
    limits = {**LIMITS, **(GPU_LIMITS if ON_GPU else {}), "additional_config": extra}
    with Engine(TRAINED, dtype="bfloat16", **limits) as engine:
        yield engine


@pytest.fixture(scope="module")
def core():
    return load_checkpoint(TRAINED).to(DEVICE)


def recorded(engine, path, asked, **choice):
    """The sequences that were sampled, and what was recorded of them."""
    engine.llm.collective_rpc("isomodels_trace_start", kwargs=choice)
    results = engine.run(asked, seed=1)
    engine.llm.collective_rpc("isomodels_trace_stop", kwargs={"path": str(path)})
    sequences = [[*result.prompt, *(token.id for token in result.tokens)] for result in results]
    return sequences, Recording.load(path)


def of_module(core, path, sequences):
    ids = torch.tensor([i for sequence in sequences for i in sequence], device=DEVICE)
    bounds = torch.tensor([0, *map(len, sequences)], device=DEVICE).cumsum(0).int()
    with record(core, path), torch.no_grad():
        core(ids, Batch.positions(bounds), Batch.packed(bounds))
    return Recording.load(path)


def test_every_operation_agrees_with_the_module_in_every_case(engine, core, tmp_path):
    engine.llm.reset_prefix_cache()
    sequences, ours = recorded(engine, tmp_path / "engine", REQUESTS)
    assert sum(step.resumed_requests for step in engine.steps)
    assert any(step.replayed for step in engine.steps) == ON_GPU
    theirs = of_module(core, tmp_path / "module", sequences)
    for left, right in ((ours, theirs), (theirs, ours)):
        found = compare(left, right)
        assert found.first is None, found.first
        # the last token of each is sampled and never computed
        assert found.tokens == sum(len(sequence) - 1 for sequence in sequences)
        assert (found.only_left, found.only_right, found.weights) == ((), (), ())
        assert found.operations == 2 + 9 * core.config.num_hidden_layers + 1
    # a preempted sequence's tokens ran twice
    decoder = next(e for e in ours.entries if e.form.section == "decoder")
    assert len(decoder.tokens) > len(ours.position)
    heads = sum(len(e.tokens) for e in ours.entries if e.form.section == "head")
    assert heads >= sum(request.max_tokens for request in REQUESTS)


@pytest.mark.skipif(ON_GPU, reason="replaces a kernel of the CPU")
def test_one_bit_in_one_kernel_of_the_engine_is_named(engine, core, tmp_path):
    """Layer 2's swiglu turns a bit of the last row of each step: that of the newest token."""
    layers, calls = core.config.num_hidden_layers, 0

    def faulty(gate_up):
        nonlocal calls
        out = swiglu._init_fn(gate_up)
        if calls % layers == 2:
            out.view(torch.int16)[-1, 5] ^= 1
        calls += 1
        return out

    engine.llm.reset_prefix_cache()
    other = torch.library.Library("isomodels", "IMPL")
    try:
        other.impl("swiglu", faulty, "CPU", allow_override=True)
        contract = contract_of(TRAINED)
        foreign = {name: who for name, who in installed(contract).items() if who != "isomodels"}
        assert set(foreign) == {"swiglu"}
        sequences, ours = recorded(engine, tmp_path / "engine", REQUESTS[:1])
    finally:
        other._destroy()
    assert set(installed(contract_of(TRAINED)).values()) == {"isomodels"}
    found = compare(ours, of_module(core, tmp_path / "module", sequences))
    first = found.first
    assert first is not None
    assert (first.module, first.left_operator) == ("model.layers.2.mlp.act", "swiglu")
    assert first.position == 63  # the last of the first chunk
    assert first.earlier == 63
    assert [value.differs for value in first.inputs] == [False]
    shown = subprocess.run(
        [ISOMODELS, "trace", "diff", str(tmp_path / "engine"), str(tmp_path / "module")],
        capture_output=True,
        text=True,
    )
    assert shown.returncode == 1
    assert "first difference: token 63 " in shown.stdout
    assert "operation: model.layers.2.mlp.act swiglu, output 0" in shown.stdout


def test_chosen_requests_and_positions(engine, core, tmp_path):
    sequences, ours = recorded(
        engine, tmp_path / "engine", REQUESTS[:2], requests="1-", positions="59:62"
    )
    assert [name[:2] for name in ours.sequences] == ["1-"]
    assert ours.position.tolist() == [59, 60, 61]
    found = compare(ours, of_module(core, tmp_path / "module", sequences))
    assert (found.tokens, found.differing) == (3, 0)


def test_a_recording_leaves_another_watcher_of_the_runner_in_place(engine, tmp_path):
    seen, execute = [], engine._runner.execute_model

    def watched(*args, **kwargs):
        seen.append(1)
        return execute(*args, **kwargs)

    engine._runner.execute_model = watched
    try:
        recorded(engine, tmp_path / "engine", REQUESTS[:1])
        before = len(seen)
        engine.run(REQUESTS[:1], seed=1)
    finally:
        del engine._runner.execute_model
    assert 0 < before < len(seen)


def test_what_served_is_what_the_contract_requests(engine, monkeypatch):
    contract = contract_of(TRAINED, DEVICE)
    engine.run(REQUESTS[:1], seed=1)
    ran = engine.llm.collective_rpc("isomodels_served")[0]
    assert served_faults(contract, ran, "engine") == []
    if ON_GPU:
        return  # a captured graph keeps what it has
    # another operation serves: the sums of its product have another order
    monkeypatch.setattr(linear_layers, "row_linear", linear)
    engine.run(REQUESTS[:1], seed=1)
    faults = served_faults(contract, engine.llm.collective_rpc("isomodels_served")[0], "engine")
    assert len(faults) == 1
    assert "8 row_linear" in faults[0] or "0 row_linear instead of 8" in faults[0]


def test_recordings_that_cannot_be_are_refused(engine, tmp_path):
    ask = engine.llm.collective_rpc
    with pytest.raises(IsoError, match="no recording is under way"):
        ask("isomodels_trace_stop", kwargs={"path": str(tmp_path / "a")})
    ask("isomodels_trace_start")
    with pytest.raises(IsoError, match="a recording is under way"):
        ask("isomodels_trace_start")
    with pytest.raises(IsoError, match="no chosen token"):
        ask("isomodels_trace_stop", kwargs={"path": str(tmp_path / "a")})
    with pytest.raises(IsoError, match="numbers and ranges"):
        ask("isomodels_trace_start", kwargs={"positions": "all"})
    engine.run(REQUESTS[:1], seed=1)  # and the engine lives on


def test_graphs_without_digests_are_refused():
    from types import SimpleNamespace

    from vllm.config import CUDAGraphMode

    from isomodels.vllm.tracing import start_on_worker

    worker = SimpleNamespace(
        vllm_config=SimpleNamespace(
            parallel_config=SimpleNamespace(world_size=1),
            compilation_config=SimpleNamespace(cudagraph_mode=CUDAGraphMode.FULL_DECODE_ONLY),
            model_config=SimpleNamespace(enforce_eager=False),
        ),
        get_model=lambda: SimpleNamespace(trace=None),
    )
    with pytest.raises(IsoError, match=r"isomodels_trace.*--enforce-eager"):
        start_on_worker(worker)
    worker.vllm_config.parallel_config.world_size = 2
    with pytest.raises(IsoError, match="several workers"):
        start_on_worker(worker)


def test_megatron_and_the_engine_by_the_command(tmp_path, engine):
    """One command a side, one for the difference: here the engine's side is this process's."""
    engine.llm.reset_prefix_cache()
    sequences, _ = recorded(engine, tmp_path / "engine", REQUESTS[:2])
    (tmp_path / "ids.json").write_text(json.dumps(sequences))
    command = [ISOMODELS, "trace", "record", str(TRAINED), str(tmp_path / "trainer")]
    command += ["--ids", str(tmp_path / "ids.json"), "--host", "megatron"]
    made = subprocess.run(command, capture_output=True, text=True)
    assert made.returncode == 0, made.stderr
    found = compare(*(Recording.load(tmp_path / name) for name in ("engine", "trainer")))
    assert found.tokens > 100
    assert (found.differing, found.only_left, found.only_right) == (0, (), ())
    # beside its targets' the trainer's recording has the logprobs of the whole vocabulary
    assert (found.own_left, found.own_right) == ({}, {"token_logprobs": 1})
