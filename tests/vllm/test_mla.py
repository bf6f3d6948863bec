"""Latent attention in the engine. Rows: field reports by number."""

import json
import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from vllm.v1.kv_cache_interface import MLAAttentionSpec

from isomodels.errors import CheckpointError, UnsupportedError
from isomodels.vllm import Engine, Request
from tests.kernel.battery import assert_same_bits
from tests.moe.mla.models import load_ours, make
from tests.vllm.support import assert_equal_bits, draw
from tests.vllm.test_moe import LIMITS, assert_equal_routes, calls_below, mixed_requests
from tests.vllm.test_refusals import configure

BIAS = "model.layers.1.mlp.gate.e_score_correction_bias"


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return make("deepseek", tmp_path_factory.mktemp("deepseek"), torch.bfloat16)


@pytest.fixture(scope="module")
def pair(folder):
    core = load_ours(folder).requires_grad_(False)
    with Engine(folder, dtype="bfloat16", record_routes=True, **LIMITS) as engine:
        yield engine, core


def test_chunked_prefill_and_prefix_caching_are_on(pair):
    """vLLM turns both off on the CPU where its own latent attention would run."""
    config = pair[0].llm.llm_engine.vllm_config
    assert config.scheduler_config.enable_chunked_prefill
    assert config.cache_config.enable_prefix_caching
    assert config.scheduler_config.max_num_batched_tokens == LIMITS["max_num_batched_tokens"]


def test_row_59_a_token_leaves_one_latent_in_each_layer(pair):
    engine, core = pair
    width = core.config.kv_lora_rank + core.config.qk_rope_head_dim
    for layer in engine._model.layers:
        spec = layer.get_kv_cache_spec(engine.llm.llm_engine.vllm_config)
        assert isinstance(spec, MLAAttentionSpec)
        assert spec.page_size_bytes == LIMITS["block_size"] * width * 2
        assert layer.kv_cache.shape == (LIMITS["num_gpu_blocks_override"], 1, 16, width)
    # of the released sizes: 576 numbers of bfloat16, whatever the number of heads
    released = MLAAttentionSpec(block_size=1, num_kv_heads=1, head_size=576, dtype=torch.bfloat16)
    assert released.page_size_bytes == 576 * 2


def test_rows_32_and_33_bits_and_routes_of_every_case(pair):
    engine, core = pair
    assert engine.llm.reset_prefix_cache()
    results = engine.run(mixed_requests(), seed=3)
    assert assert_equal_bits(core, results) > 300
    assert assert_equal_routes(core, results) > 800
    cases = {r.case(i) for r in results for i in range(len(r.tokens))}
    cases |= {r.prompt_case() for r in results}
    assert cases >= {"engine_prefill", "engine_chunked_prefill", "engine_decode", "engine_resume"}


def test_a_shared_prefix(pair):
    engine, core = pair
    assert engine.llm.reset_prefix_cache()
    prefix = draw(60, 1)
    requests = [Request(prefix + draw(3 + i, i), max_tokens=5, arrival=6 * i) for i in range(3)]
    results = engine.run(requests, seed=5)
    assert max(r.num_cached_tokens for r in results) >= 48
    assert_equal_bits(core, results)


def test_none_of_vllms_own_attention_or_experts_runs(pair):
    engine, _ = pair
    for part in ("v1/attention/backends/mla", "model_executor/layers/attention", "fused_moe"):
        with calls_below(part) as theirs:
            engine.run([Request(draw(20, 1), max_tokens=4)])
        assert theirs == [], part
    with calls_below(str(Path("isomodels/layers/mla.py"))) as ours:
        engine.run([Request(draw(20, 2), max_tokens=4)])
    assert {"LatentAttention.forward", "LatentCore.forward", "RotaryPart.forward"} <= set(ours)


def test_row_63_block_scaled_float8_is_converted_first(folder, tmp_path):
    shutil.copytree(folder, tmp_path / "fp8")
    raw = json.loads((folder / "config.json").read_text())
    raw["quantization_config"] = {
        "activation_scheme": "dynamic",
        "fmt": "e4m3",
        "quant_method": "fp8",
        "weight_block_size": [128, 128],
    }
    (tmp_path / "fp8" / "config.json").write_text(json.dumps(raw))
    with pytest.raises(UnsupportedError, match=r"quantised weights \(fp8\).*isomodels convert"):
        configure(tmp_path / "fp8", dtype="bfloat16")


def test_row_37_new_weights_and_the_bias_in_all_its_bits(pair, folder, tmp_path):
    engine, core = pair
    other = make("deepseek", tmp_path / "other", torch.bfloat16, seed=1)
    bias = load_file(other / "model.safetensors")[BIAS]
    assert len(bias.bfloat16().unique()) < len(bias.unique())
    engine.reload(other)
    try:
        assert_same_bits(engine._model.core.get_buffer(BIAS), bias, "reloaded")
        results = engine.run([Request(draw(40, 4), max_tokens=4, prompt_logprobs=True)])
        assert assert_equal_bits(load_ours(other).requires_grad_(False), results) > 40
        wide = make("deepseek", tmp_path / "wide", torch.bfloat16, routed_scaling_factor=1.0)
        with pytest.raises(CheckpointError, match="config"):
            engine.reload(wide)
    finally:
        engine.reload(folder)
    assert assert_equal_bits(core, engine.run([Request(draw(20, 5), max_tokens=4)])) > 0
