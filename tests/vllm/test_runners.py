"""Both of vLLM's model runners in both logprobs modes; on a GPU with CUDA graphs and without.

Without a GPU the V2 runner has a process of its own, where Triton interprets its kernels.
"""

import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest
import torch

from isomodels.vllm import Engine, Request
from tests.vllm.support import (
    assert_equal_bits,
    bits,
    draw,
    load_core,
    needs_v2_runner,
    packed_logprobs,
)

ON_GPU = torch.cuda.is_available()
V2_ON_CPU = "tests.vllm.v2_on_cpu"
INTERPRETED = V2_ON_CPU in sys.modules
pytestmark = [pytest.mark.gpu] if ON_GPU else []

RUNNERS = ["V1", pytest.param("V2", marks=needs_v2_runner)]
TRAINED = Path(__file__).parents[1] / "data" / "tiny-qwen3"
LIMITS = {
    "max_model_len": 512,
    "max_num_seqs": 16,
    "max_num_batched_tokens": 101,
    "block_size": 16,
    "num_gpu_blocks_override": 40,
}
GPU_LIMITS = {
    "enforce_eager": False,
    "gpu_memory_utilization": 0.02,
    "kv_cache_memory_bytes": 2**26,
}


def requests(raw: bool, count: int, longest: int) -> list[Request]:
    """Chunked prompts beside decodes, at all kinds of temperatures."""
    lengths = (3, 16, 48, 100, 101, 102, 300)
    return [
        Request(
            draw(lengths[i % 7] + i, i % 9),
            max_tokens=2 + 5 * i % longest,
            temperature=(1.0, 0.6, 0.0, 1.7, 0.3)[i % 5],
            # The interpreter cannot run vLLM's kernel for it.
            top_p=0.8 if raw and not INTERPRETED and i % 4 == 0 else 1.0,
            prompt_logprobs=raw and i % 3 == 0,
            arrival=i // 3,
        )
        for i in range(count)
    ]


def check_resumed_cached_and_traced(engine, core):
    crowd = [Request(draw(94 + i, i), max_tokens=23) for i in range(5)]
    results = engine.run(crowd, seed=2)
    assert sum(step.resumed_requests for step in engine.steps)
    assert_equal_bits(core, results)
    again = [Request(draw(70, 3), max_tokens=2, arrival=5 * i) for i in range(2)]
    cached = engine.run(again, seed=2, graphs=False)
    assert cached[1].num_cached_tokens == 64
    assert not any(step.replayed for step in engine.steps)
    assert_equal_bits(core, cached)
    prompt = draw(102, 1)  # its last chunk has one row, like a decode
    assert engine.trace(prompt) == engine.trace(prompt, decode=True)


@pytest.mark.parametrize("mode", ["raw_logprobs", "processed_logprobs"])
@pytest.mark.parametrize("runner", RUNNERS)
def test_every_case(runner, mode, monkeypatch):
    if not ON_GPU and (runner == "V2") != INTERPRETED:
        pytest.skip("the other process has the other runner")
    monkeypatch.setenv("VLLM_USE_V2_MODEL_RUNNER", str(int(runner == "V2")))
    core = load_core(TRAINED, "cuda" if ON_GPU else "cpu")
    raw = mode == "raw_logprobs"
    asked = requests(raw, *((7, 9) if INTERPRETED else (24, 37)))
    limits = {**LIMITS, **(GPU_LIMITS if ON_GPU else {})}
    temperatures = [1.0 if raw else request.temperature for request in asked]
    with Engine(TRAINED, dtype="bfloat16", logprobs_mode=mode, **limits) as engine:
        assert engine.model_runner == runner
        results = engine.run(asked, seed=1)
        assert any(step.replayed for step in engine.steps) == ON_GPU
        assert_equal_bits(core, results, temperatures)
        if raw:
            check_resumed_cached_and_traced(engine, core)
        engine.reload(TRAINED)
        after = engine.run(asked[:4], seed=1)
        assert_equal_bits(core, after, temperatures[:4])


@pytest.mark.gpu
@pytest.mark.parametrize("runner", RUNNERS)
def test_async_scheduling(runner, monkeypatch):
    """A server's default: a step is scheduled before the last one's tokens are known."""
    from vllm import SamplingParams

    monkeypatch.setenv("VLLM_USE_V2_MODEL_RUNNER", str(int(runner == "V2")))
    core = load_core(TRAINED, "cuda")
    params = SamplingParams(max_tokens=24, ignore_eos=True, logprobs=0, detokenize=False)
    prompts = [draw(n, n) for n in (3, 50, 101, 102, 200, 96, 97, 98, 99)]
    limits = {**LIMITS, **GPU_LIMITS, "async_scheduling": True}
    with Engine(TRAINED, dtype="bfloat16", **limits) as engine:
        assert engine.model_runner == runner
        made = engine.llm.generate(
            [{"prompt_token_ids": prompt} for prompt in prompts], params, use_tqdm=False
        )
        assert sum(step.resumed_requests for step in engine.steps)
    samples = [output.outputs[0] for output in made]
    sequences = [[*p, *s.token_ids] for p, s in zip(prompts, samples, strict=True)]
    rows = packed_logprobs(core, sequences, [1.0] * len(prompts))
    for prompt, sample, row in zip(prompts, samples, rows, strict=True):
        got = [e[t].logprob for e, t in zip(sample.logprobs, sample.token_ids, strict=True)]
        places = range(len(prompt) - 1, len(prompt) - 1 + len(got))
        expected = [row[i, t].item() for i, t in zip(places, sample.token_ids, strict=True)]
        assert (bits(got) == bits(expected)).all()


@needs_v2_runner
@pytest.mark.timeout(600)
@pytest.mark.skipif(ON_GPU, reason="the same tests run on the GPU itself")
@pytest.mark.skipif(INTERPRETED, reason="this is that process")
@pytest.mark.skipif(find_spec("triton") is None, reason="Triton is not installed")
def test_the_v2_runner_in_the_interpreter():
    command = [sys.executable, "-m", "pytest", "-q", "-x", "-p", "no:cacheprovider"]
    command += ["-p", V2_ON_CPU, __file__, "-k", "V2"]
    result = subprocess.run(command, capture_output=True, text=True)
    assert result.returncode == 0, result.stdout[-4000:]
    assert "2 passed" in result.stdout
