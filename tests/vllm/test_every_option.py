"""Each option of vLLM is of one kind, so that a new version brings none unnoticed.

An option is refused, or honoured with equal bits (here the odd values, elsewhere the common ones),
or has no way to the bits of a logprob. The same for each parameter of a request.
"""

import dataclasses
import re
from typing import Any

import pytest
from vllm import SamplingParams
from vllm.engine.arg_utils import EngineArgs
from vllm.exceptions import VLLMValidationError

from isomodels.vllm import Engine
from isomodels.vllm.requests import check_processed, check_raw
from tests.checkpoints import make_qwen3
from tests.vllm import test_refusals
from tests.vllm.support import bits, draw, load_core, packed_logprobs

REFUSED = {
    *(name for options, _ in test_refusals.OPTIONS for name in options),
    *("config_format", "hf_config_path", "convert", "kv_transfer_config", "offload_group_size"),
    *("enable_eplb", "nnodes"),
    *("enable_batch_sharded_sampling", "decode_context_parallel_size", "data_parallel_rank"),
    *("enable_sleep_mode", "enable_cumem_allocator"),  # by vLLM on a CPU; tests/vllm/test_engine.py
    # of models with recurrent state: tests/hybrid
    *("mamba_cache_dtype", "mamba_ssm_cache_dtype", "mamba_cache_mode", "use_replayssm"),
}
# What a step holds and which kernels of its own vLLM may choose; all at once, on one engine.
ODD: dict[str, Any] = {
    "block_size": 7,
    "num_gpu_blocks_override": 60,
    "max_model_len": 128,
    "max_num_batched_tokens": 23,
    "max_num_seqs": 6,
    "long_prefill_token_threshold": 9,
    "prefill_schedule_interval": 2,
    "scheduling_policy": "priority",
    "max_logprobs": -1,
    "use_fp64_gumbel": True,
    "moe_backend": "triton",
    "linear_backend": "triton",
    "attention_backend": "FLASH_ATTN",
    "gdn_prefill_backend": "triton",
    "kv_cache_dtype_skip_layers": ["0"],
    "disable_hybrid_kv_cache_manager": True,
    "enforce_eager": False,
    "optimization_level": 3,
    "compilation_config": {"mode": 1, "custom_ops": ["none"], "pass_config": {}},
}
# Proven elsewhere: the model, its weights, layouts, modes and whatever else other tests set.
ELSEWHERE = r"""
    model|model_impl|dtype|revision|tensor_parallel_size|enable_expert_parallel|additional_config
    enable_prefix_caching|enable_chunked_prefill|async_scheduling|aux_output_config
    enable_return_routed_experts|return_sampling_mask|seed|cudagraph_.*|max_cudagraph_.*
"""
# Refuse themselves, or speak only where something is on that is refused.
NEVER_HEARD = r"""
    .*loras?(_.*)?|spec_.*|per_request_spec_.*|quantization_config|allow_deprecated_quantization
    pooler_config|diffusion_config|engram_config|mm_.*|.*_mm_.*|.*media.*|video_.*|ec_.*
    language_model_only|d?cp_.*|dcp_.*|data_parallel_.*|dp_sync_.*|dbo_.*|disable_nccl_for_dp_.*
    enable_elastic_ep|elastic_ep_.*|eplb_config|.*fault_tolerance.*|(cpu_)?offload_.*
    kv_offloading_backend|(replayssm|mamba)_.*|enable_mamba_.*|enable_hc_sp|swa_bounded_replay
    disable_sliding_window|enable_trace_replay|watermark_config|sleep_.*|enable_nccl_comm_suspend
"""
# Where vLLM runs and what it logs; how text becomes tokens, and tokens are chosen; how weights,
# which are checked by name and content, come from the disk; kernels of vLLM's own layers.
NO_WAY_TO_BITS = r"""
    master_.*|node_rank|numa_.*|device_ids|(cpu_)?distributed_timeout_seconds|_api_process_.*
    worker_.*|ray_.*|shutdown_timeout|max_parallel_loading_workers|enable_shm_.*|fail_on_environ_.*
    scheduler_.*|max_num_.*|long_prefill_.*|watermark|stream_interval|performance_mode
    prefix_.*|gpu_memory_utilization|kv_cache_memory_bytes|kv_events_config
    .*log(s|_.*|ging)?(_.*)?|.*metrics.*|.*traces?(_.*)?|custom_histogram_buckets|profiler_config
    enable_layerwise_nvtx_tracing|jit_monitor_.*|kv_cache_metrics.*|use_tqdm_on_load
    tokenizer.*|skip_tokenizer_init|served_model_name|trust_remote_code|.*_revision|hf_token
    (override_)?generation_config|structured_outputs_config|reasoning_.*|io_processor_plugin
    renderer_num_workers|tokens_only
    download_dir|safetensors_.*|model_loader_extra_config|ignore_patterns|pt_load_map_location
    attention_config|kernel_config|ir_op_priority|.*_backend|.*flashinfer.*|disable_custom_all_reduce
    disable_cascade_attn
"""
KNOWN = re.compile("|".join(f"{ELSEWHERE} {NEVER_HEARD} {NO_WAY_TO_BITS}".split()))

# Of a request: what changes the logits that are sampled from, ...
SAMPLED: dict[str, Any] = {
    "presence_penalty": 1.0,
    "frequency_penalty": 1.0,
    "top_p": 0.5,
    "top_k": 5,
    "min_p": 0.3,
    "min_tokens": 4,
    "logit_bias": {5: 50.0, 9: -100.0},
    "allowed_token_ids": [1, 2, 3],
    "bad_words": ["t7"],
}
# ... what else is asked of the engine, ...
ASKED: dict[str, Any] = {
    "temperature": 0.4,
    "n": 2,
    "logprobs": 5,
    "prompt_logprobs": 2,
    "flat_logprobs": True,
    "stop_token_ids": [4],
    "skip_reading_prefix_cache": True,
    "watermarking": True,
}
# ... what is refused or has tests of its own, and what only vLLM's front end reads.
OTHERS = r"""
    repetition_penalty|seed|structured_outputs|thinking_token_budget|prompt_logprob_.*
    logprob_token_ids|trace_decode_token_ids|routed_experts_prompt_start
    _.*|stop|ignore_eos|max_tokens|detokenize|.*special_tokens.*|include_stop_.*|output_.*
    stream_interval|skip_clone|extra_args|repetition_detection
"""

OPTIONS = {field.name for field in dataclasses.fields(EngineArgs)}
PARAMETERS = set(SamplingParams.__struct_fields__)


def test_each_option_is_of_one_kind():
    rest = OPTIONS - REFUSED - ODD.keys()
    unknown = sorted(name for name in rest if not KNOWN.fullmatch(name))
    assert not unknown, "refuse these options of vLLM in isomodels/vllm/checks.py, or place them"


def test_each_parameter_of_a_request_is_of_one_kind():
    rest = PARAMETERS - SAMPLED.keys() - ASKED.keys()
    known = re.compile("|".join(OTHERS.split()))
    assert not sorted(name for name in rest if not known.fullmatch(name))


@pytest.mark.parametrize("name", [*SAMPLED, "repetition_penalty"])
def test_what_changes_logits_is_refused_in_processed_mode(name):
    params = SamplingParams(**{name: {**SAMPLED, "repetition_penalty": 1.1}[name]})
    with pytest.raises(VLLMValidationError, match=name):
        check_processed(params)
    if name in SAMPLED:
        check_raw(params)


def test_odd_options_and_requests_of_every_kind(tmp_path, monkeypatch):
    """Every logprob that comes back, of all at once in one engine."""
    monkeypatch.setenv("TORCHDYNAMO_DISABLE", "1")
    path = make_qwen3(tmp_path / "model", num_hidden_layers=2)
    core = load_core(path)
    common = {"logprobs": 0, "max_tokens": 7, "ignore_eos": True, "detokenize": False}
    known = {name: value for name, value in {**SAMPLED, **ASKED}.items() if name in PARAMETERS}
    asked = [{}, *({name: value} for name, value in known.items())]
    asked.append({"logprob_token_ids": [3, 5, 7], "logprobs": 3})
    odd = {name: value for name, value in ODD.items() if name in OPTIONS}
    with Engine(path, dtype="float32", **odd) as engine:
        outputs = engine.llm.generate(
            [{"prompt_token_ids": draw(20 + 5 * i, i % 3)} for i in range(len(asked))],
            [SamplingParams(**{**common, **options}) for options in asked],
            use_tqdm=False,
        )
        refused = SamplingParams(repetition_penalty=1.1)
        with pytest.raises(VLLMValidationError, match="repetition_penalty cannot be used"):
            engine.llm.generate([{"prompt_token_ids": [1, 2, 3]}], refused, use_tqdm=False)
    compared = 0
    for output in outputs:
        prompt = output.prompt_token_ids
        for sample in output.outputs:
            tokens = [*prompt, *sample.token_ids]
            (expected,) = packed_logprobs(core, [tokens], [1.0])
            entries = [*(output.prompt_logprobs or [])[1:], *sample.logprobs]
            for place, entry in enumerate(reversed(entries), 2):
                ids = [token for token in entry if entry[token].logprob > -float("inf")]
                got = [entry[token].logprob for token in ids]
                assert (bits(got) == bits(expected[len(tokens) - place, ids])).all()
                compared += len(ids)
    assert compared > 7 * len(asked)
