"""Hybrids under both of vLLM's model runners; on a GPU with CUDA graphs.

Without a GPU the V2 runner has a process of its own, where Triton interprets its kernels.
"""

import subprocess
import sys
from importlib.util import find_spec

import pytest
import torch

from isomodels.vllm import Engine, Request
from tests.vllm.support import assert_equal_bits, draw, load_core, needs_v2_runner
from tests.vllm.test_runners import GPU_LIMITS, INTERPRETED, ON_GPU, RUNNERS, V2_ON_CPU

pytestmark = [pytest.mark.gpu] if ON_GPU else []

LIMITS = {
    "max_model_len": 256,
    "max_num_batched_tokens": 64,
    "max_num_seqs": 8,
    "block_size": 16,
    "enable_prefix_caching": True,
    "enable_chunked_prefill": True,
    "num_gpu_blocks_override": 36,
    "skip_tokenizer_init": True,
    **(GPU_LIMITS if ON_GPU else {}),
}


def asked(raw: bool, count: int, longest: int) -> list[Request]:
    """Prompts around the edges of blocks and chunks, at all kinds of temperatures."""
    lengths = (3, 16, 47, 65, 1, 64, 130)
    return [
        Request(
            draw(lengths[i % 7], i),
            max_tokens=2 + 7 * i % longest,
            temperature=(1.0, 0.6, 0.0, 1.7)[i % 4],
            prompt_logprobs=raw and i % 3 == 0,
            arrival=2 * i,
        )
        for i in range(count)
    ]


@pytest.mark.parametrize("mode", ["raw_logprobs", "processed_logprobs"])
@pytest.mark.parametrize("runner", RUNNERS)
def test_every_case(checkpoint, runner, mode, monkeypatch):
    if not ON_GPU and not INTERPRETED:
        pytest.skip("V1 on the CPU: test_hosts.py; V2: the process below")
    if INTERPRETED and runner == "V1":
        pytest.skip("this process has V2")
    monkeypatch.setenv("VLLM_USE_V2_MODEL_RUNNER", str(int(runner == "V2")))
    folder = checkpoint("qwen3_5", torch.bfloat16)
    core = load_core(folder, "cuda" if ON_GPU else "cpu")
    raw = mode == "raw_logprobs"
    # An interpreted copy of states is slow.
    requests = asked(raw, *((4, 20) if INTERPRETED else (30, 90)))
    temperatures = [1.0 if raw else request.temperature for request in requests]
    limits = {**LIMITS, "max_num_seqs": 2} if INTERPRETED else LIMITS
    with Engine(folder, dtype="bfloat16", logprobs_mode=mode, **limits) as engine:
        assert engine.model_runner == runner
        results = engine.run(requests, seed=1)
        assert any(step.replayed for step in engine.steps) == ON_GPU
        assert_equal_bits(core, results, temperatures)
        if INTERPRETED:
            return
        assert sum(step.resumed_requests for step in engine.steps)
        shared = draw(150, 9)
        again = [Request(shared + draw(5 + i, i), max_tokens=70, arrival=6 * i) for i in range(6)]
        cached = engine.run(again, seed=2)
        assert any(result.num_cached_tokens for result in cached)
        assert_equal_bits(core, cached)
        # a batch smaller than its graph: the lanes behind it touch no state
        few = engine.run([Request(draw(70 + i, i), max_tokens=100) for i in range(3)], seed=3)
        assert_equal_bits(core, few)
        if raw:
            prompt = draw(102, 1)
            assert engine.trace(prompt) == engine.trace(prompt, decode=True)
        engine.reload(folder)
        assert_equal_bits(core, engine.run(requests[:4], seed=1), temperatures[:4])


@needs_v2_runner
@pytest.mark.slow
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
