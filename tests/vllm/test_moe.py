"""A model with experts in the engine. Rows: field reports by number."""

import contextlib
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

from isomodels.errors import CheckpointError
from isomodels.layers.routes import record_routes, routers
from isomodels.trace import trace_rows
from isomodels.vllm import Engine, Request
from isomodels.vllm.routes import RECORD_ROUTES
from tests.checkpoints import make_qwen3_moe
from tests.vllm.support import assert_equal_bits, draw, load_core
from tests.vllm.test_refusals import configure

ROOT = Path(__file__).parents[2]
LIMITS = {
    "max_model_len": 256,
    "max_num_seqs": 8,
    "max_num_batched_tokens": 48,
    "block_size": 16,
    "num_gpu_blocks_override": 24,
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return make_qwen3_moe(tmp_path_factory.mktemp("checkpoint"), torch.bfloat16)


@pytest.fixture(scope="module")
def pair(folder):
    from tests.moe.qwen3_moe.models import load_ours

    core = load_ours(folder).requires_grad_(False)
    with Engine(folder, dtype="bfloat16", record_routes=True, **LIMITS) as engine:
        yield engine, core


def hidden(core, ids):
    from isomodels.batch import Batch

    bounds = torch.tensor([0, len(ids)], dtype=torch.int32)
    return core(torch.tensor(ids), torch.arange(len(ids)), Batch.packed(bounds))


def own_routes(core, ids) -> np.ndarray:
    """[n, layers, k] of one sequence alone."""
    with record_routes(core) as recorded:
        hidden(core, ids)
    return recorded.take().numpy()


def assert_equal_routes(core, results) -> int:
    """All routes of `results` against the core's; every computed token has one in each layer."""
    compared = 0
    for result in results:
        ids = [*result.prompt, *(token.id for token in result.tokens)]
        expected, seen = own_routes(core, ids), set(range(result.num_cached_tokens))
        for first, routes in result.routes:
            part = expected[first : first + len(routes)]
            assert routes.dtype == part.dtype == np.int32
            assert np.array_equal(routes, part), f"request {result.request} at {first}"
            seen |= set(range(first, first + len(routes)))
            compared += part.shape[0] * part.shape[1]
        assert seen == set(range(len(ids) - 1)), "a token was computed without a route"
    return compared


def mixed_requests():
    """Prompts in chunks, scored and not, beside decodes; too many for the pages at the end."""
    scored = [Request(draw(n, n), max_tokens=3, prompt_logprobs=True) for n in (1, 16, 17, 100)]
    crowd = [Request(draw(45 + i, i), max_tokens=40, arrival=4) for i in range(5)]
    return scored + crowd


@contextlib.contextmanager
def calls_below(part: str):
    """Counts the calls of Python functions whose file lies below `part`."""
    counted = []

    def note(frame, event, _):
        if event == "call" and part in frame.f_code.co_filename:
            counted.append(frame.f_code.co_qualname)

    sys.setprofile(note)
    try:
        yield counted
    finally:
        sys.setprofile(None)


def test_rows_32_and_33_bits_and_routes_of_every_case(pair):
    engine, core = pair
    assert engine.llm.reset_prefix_cache()
    results = engine.run(mixed_requests(), seed=3)
    assert assert_equal_bits(core, results) > 300
    assert assert_equal_routes(core, results) > 800
    cases = {r.case(i) for r in results for i in range(len(r.tokens))}
    cases |= {r.prompt_case() for r in results}
    assert cases >= {"engine_prefill", "engine_chunked_prefill", "engine_decode", "engine_resume"}


def test_routes_of_a_shared_prefix(pair):
    engine, core = pair
    assert engine.llm.reset_prefix_cache()
    prefix = draw(60, 1)
    requests = [
        Request(prefix + draw(3 + i, i), max_tokens=5, n=1 + i % 2, arrival=6 * i) for i in range(4)
    ]
    results = engine.run(requests, seed=5)
    assert max(r.num_cached_tokens for r in results) >= 48
    assert_equal_bits(core, results)
    assert assert_equal_routes(core, results) > 100


def test_vllms_own_fused_moe_never_runs(pair):
    engine, _ = pair
    modules = {type(m).__module__ for m in engine._model.modules()}
    assert not {name for name in modules if name.startswith("vllm")}
    own = str(Path("isomodels/layers/moe.py"))
    with calls_below("fused_moe") as theirs:
        engine.run([Request(draw(20, 1), max_tokens=4)])
    with calls_below(own) as ours:
        engine.run([Request(draw(20, 2), max_tokens=4)])
    assert theirs == []
    assert {"MoE.forward", "Router.forward", "Experts.forward"} <= set(ours)


def test_the_count_can_fail():
    from vllm.model_executor.layers.fused_moe import layer

    with calls_below("fused_moe") as theirs:
        layer.determine_expert_counts(8, 0, 0, False)
    assert theirs[0] == "determine_expert_counts"


def test_row_59_routers_are_what_vllm_hangs_its_recorder_on(pair):
    from vllm.model_executor.layers.fused_moe import routed_experts_capturer

    source = getattr(routed_experts_capturer, "RoutedExpertsCaptureSource", None)
    if source is None:
        pytest.skip("this vLLM has no such recorder")
    found = routers(pair[0]._model)
    assert [router.layer_id for router in found] == [1, 2]
    assert all(isinstance(router, source) for router in found)


def test_trace_agrees_with_the_module(pair):
    engine, core = pair
    prompt = draw(40, 9)
    for decode in (False, True):
        with trace_rows(core, -1) as own:
            core.logprobs(hidden(core, prompt))
        assert engine.trace(prompt, decode=decode) == own
    assert {"model.layers.1.mlp.gate", "model.layers.1.mlp.experts"} <= set(own)


def test_row_65_a_reload_takes_either_form(pair, folder, tmp_path):
    engine, core = pair
    new, fused = (
        make_qwen3_moe(tmp_path / str(f), torch.bfloat16, fused=f, seed=1) for f in (False, True)
    )
    assert len(load_file(fused / "model.safetensors")) < len(load_file(new / "model.safetensors"))
    for path in (fused, new, folder):
        engine.reload(path)
        results = engine.run([Request(draw(40, 6), max_tokens=4, prompt_logprobs=True)])
        loaded = load_core(path)
        assert_equal_bits(loaded, results)
        assert_equal_routes(loaded, results)
    short = make_qwen3_moe(tmp_path / "short", torch.bfloat16, num_experts_per_tok=2)
    with pytest.raises(CheckpointError, match=r"config\.json differs"):
        engine.reload(short)
    assert_equal_bits(core, engine.run([Request(draw(40, 6), max_tokens=4)]))


@pytest.mark.parametrize(
    ("v2", "recorded", "message"),
    [
        (False, False, "needs vLLM's V2 model runner"),
        (True, True, "hang on the same hook"),
        (True, False, None),
    ],
)
def test_vllms_own_record_of_routes(folder, monkeypatch, v2, recorded, message):
    from vllm.config import VllmConfig

    from isomodels.vllm.checks import _engine_refusals

    if "aux_output_config" not in VllmConfig.__dataclass_fields__:
        pytest.skip("this vLLM has no such record")
    config = configure(folder, dtype="bfloat16", additional_config={RECORD_ROUTES: recorded})
    config.aux_output_config.enable_return_routed_experts = True
    # the V2 runner itself cannot run here
    monkeypatch.setattr(VllmConfig, "use_v2_model_runner", v2)
    told = [sentence for refused, sentence in _engine_refusals(config) if refused]
    assert len(told) == (message is not None)
    assert all(message in sentence for sentence in told)


def check_returned_routes(folder: Path) -> None:
    """In a process with the V2 runner: what vLLM itself returns are our routes."""
    from vllm import SamplingParams

    from tests.moe.qwen3_moe.models import load_ours

    core = load_ours(folder).requires_grad_(False)
    prompts = [{"prompt_token_ids": draw(30 + 40 * i, i)} for i in range(3)]  # one in two chunks
    params = SamplingParams(max_tokens=6, temperature=0.0, ignore_eos=True, detokenize=False)
    with Engine(folder, dtype="bfloat16", enable_return_routed_experts=True, **LIMITS) as engine:
        assert engine.model_runner == "V2"
        for output in engine.llm.generate(prompts, params, use_tqdm=False):
            (sample,) = output.outputs
            ids = [*output.prompt_token_ids, *sample.token_ids]
            expected, theirs = own_routes(core, ids), sample.routed_experts
            assert theirs.shape == (len(ids) - 1, 3, 3)  # all layers; the dense one is left at 0
            assert np.array_equal(theirs[:, 1:], expected[:-1])


@pytest.mark.slow
@pytest.mark.skipif(find_spec("triton") is None, reason="Triton is not installed")
def test_row_33_vllms_own_record_returns_our_routes(folder):
    code = (
        "import tests.vllm.v2_on_cpu, pathlib\n"
        "from tests.vllm.test_moe import check_returned_routes\n"
        "if __name__ == '__main__':\n"
        f"    check_returned_routes(pathlib.Path({str(folder)!r}))\n"
    )
    result = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, cwd=ROOT, check=False
    )
    assert result.returncode == 0, result.stderr[-4000:]
