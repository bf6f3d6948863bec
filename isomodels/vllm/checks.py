"""What the engine must not be asked for: refused at start with one sentence, never ignored.

vLLM calls `IsoModelsConfig.verify_and_update_config` in the front end, once, before it starts
anything.
"""

from pathlib import Path
from typing import Any

from isomodels.config import read_config
from isomodels.errors import UnsupportedError
from isomodels.layers.parallel import ExpertParallel, Layout, TensorParallel, check_layout
from isomodels.registry import ArchSpec
from isomodels.validate.device import refuse_capability, refuse_triton, triton_version
from isomodels.vllm.plugin import MODEL_IMPL
from isomodels.vllm.routes import RECORD_ROUTES
from isomodels.vllm.versions import V2_RUNNER_VERSIONS, vllm_version
from isomodels.vllm.weights import LOADED_LATER

# What each mode becomes inside vLLM; see `IsoModelsForCausalLM.compute_logits`.
_LOGPROBS_MODES = {"raw_logprobs": "raw_logits", "processed_logprobs": "processed_logits"}


class IsoModelsConfig:
    """The configuration hook of our resolved architectures (vLLM: `VerifyAndUpdateConfig`)."""

    @staticmethod
    def verify_and_update_model_config(model_config: Any) -> None:
        """Nothing to do: everything is checked once the whole configuration exists."""

    @staticmethod
    def verify_and_update_config(vllm_config: Any) -> None:
        """Refuses what cannot run with equal bits, and sets how logprobs are made.

        Args:
            vllm_config: vLLM's configuration; `logprobs_mode`, `logits_processors` and
                `load_format` are changed.

        Raises:
            UnsupportedError: naming the option and the remedy.
            ConfigError: config.json is not one isomodels can run.
            CheckpointError: the weights on disk cannot be read.
        """
        _refuse_options(vllm_config)
        from isomodels.vllm.mla import leave_own_mla

        spec, config = read_checkpoint_config(vllm_config.model_config)
        _refuse_mismatch(vllm_config, config)
        if spec.family == "hybrid":
            from isomodels.vllm import recurrent

            recurrent.prepare(vllm_config)
        later = bool(vllm_config.additional_config.get(LOADED_LATER))
        # vLLM's "auto" would fall back to pickles.
        vllm_config.load_config.load_format = "dummy" if later else "safetensors"
        path = Path(vllm_config.model_config.model)
        # before vLLM starts processes; a hub name is checked by `load_weights`
        if path.is_dir() and not later:
            check_files(path)
        leave_own_mla(vllm_config)
        _set_logprobs(vllm_config)
        _set_cuda_graphs(vllm_config)
        # Its sums have another order, and nothing here calls it: no buffers for it either.
        vllm_config.parallel_config.disable_custom_all_reduce = True


def read_checkpoint_config(model_config: Any) -> tuple[ArchSpec, Any]:
    """Reads config.json strictly, past the defaults of transformers' config objects.

    Args:
        model_config: vLLM's `ModelConfig`; its `model` is a folder or a hub name.

    Returns:
        The architecture and its config.

    Raises:
        ConfigError: a missing, unknown or unimplemented field.
        UnsupportedError: an unknown architecture.
    """
    if Path(model_config.model).is_dir():
        return read_config(model_config.model)
    from transformers import PretrainedConfig

    raw, _ = PretrainedConfig.get_config_dict(model_config.model, revision=model_config.revision)
    raw.pop("_commit_hash", None)
    return read_config(raw)


def _refuse_options(vllm_config: Any) -> None:
    refusals = (
        *_device_refusals(vllm_config),
        *_parallel_refusals(vllm_config.parallel_config),
        *_model_refusals(vllm_config),
        *_engine_refusals(vllm_config),
    )
    for refused, sentence in refusals:
        if refused:
            raise UnsupportedError(f"isomodels: {sentence}")


def _device_refusals(vllm_config: Any) -> tuple[tuple[bool, str], ...]:
    from vllm import envs
    from vllm.platforms import current_platform

    if current_platform.is_cuda():  # by NVML: nothing may start CUDA in the front end
        capability = current_platform.get_device_capability()
        refuse_capability(tuple(capability), current_platform.get_device_name())
        refuse_triton(triton_version())
    return (
        (
            not (current_platform.is_cpu() or current_platform.is_cuda()),
            f"the device {current_platform.device_type} was not checked: use vLLM for CPU or CUDA",
        ),
        (
            bool(vllm_config.use_v2_model_runner) and vllm_version() not in V2_RUNNER_VERSIONS,
            f"the V2 model runner of vLLM {vllm_version()} was not checked: set "
            "VLLM_USE_V2_MODEL_RUNNER=0",
        ),
        (
            bool(envs.VLLM_BATCH_INVARIANT),
            "VLLM_BATCH_INVARIANT=1 replaces PyTorch operators under the kernels, which are "
            "batch invariant without it: unset it",
        ),
        (
            current_platform.is_cpu() and envs.VLLM_FLOAT32_MATMUL_PRECISION != "highest",
            f"VLLM_FLOAT32_MATMUL_PRECISION={envs.VLLM_FLOAT32_MATMUL_PRECISION} rounds fp32 "
            "products: unset it",
        ),
    )


def _parallel_refusals(parallel: Any) -> tuple[tuple[bool, str], ...]:
    sizes = {
        "--pipeline-parallel-size": parallel.pipeline_parallel_size,
        "--data-parallel-size": parallel.data_parallel_size,
        "--decode-context-parallel-size": parallel.decode_context_parallel_size,
        "--prefill-context-parallel-size": parallel.prefill_context_parallel_size,
    }
    ranks, executor = parallel.tensor_parallel_size, parallel.distributed_executor_backend
    return (
        *((size > 1, f"{name} {size} is not supported: use 1") for name, size in sizes.items()),
        (
            ranks > 1 and executor not in (None, "mp"),
            f"--distributed-executor-backend {executor} was not checked: use mp",
        ),
        (
            getattr(parallel, "nnodes", 1) > 1,
            "--nnodes was not checked: use the GPUs of one host",
        ),
        (
            parallel.enable_dbo or getattr(parallel, "ubatch_size", 0) > 1,
            "--enable-dbo and --ubatch-size are not supported: leave them out",
        ),
        (
            parallel.enable_eplb or parallel.expert_placement_strategy != "linear",
            "experts keep their places: leave out --enable-eplb and --expert-placement-strategy",
        ),
        (
            bool(getattr(parallel, "enable_ep_weight_filter", False)),
            "--enable-ep-weight-filter is not supported, since every worker checks the whole "
            "checkpoint: leave it out",
        ),
        (
            bool(getattr(parallel, "enable_batch_sharded_sampling", False)),
            "--enable-batch-sharded-sampling is not supported: leave it out",
        ),
    )


def _model_refusals(vllm_config: Any) -> tuple[tuple[bool, str], ...]:
    model = vllm_config.model_config
    load_format = vllm_config.load_config.load_format
    cache_dtype = vllm_config.cache_config.cache_dtype
    own_dtype = str(model.dtype).removeprefix("torch.")
    return (
        (vllm_config.lora_config is not None, "LoRA is not supported: leave out --enable-lora"),
        (
            vllm_config.speculative_config is not None,
            "speculative decoding is not supported: leave out --speculative-config",
        ),
        (
            model.quantization is not None or vllm_config.quant_config is not None,
            f"quantised weights ({model.quantization}) are not supported: use a float32 or "
            "bfloat16 checkpoint (`isomodels convert` makes one of block-scaled float8) and leave "
            "out --quantization",
        ),
        (
            cache_dtype not in ("auto", own_dtype),
            f"--kv-cache-dtype {cache_dtype} is not supported: use auto",
        ),
        (bool(model.hf_overrides), "--hf-overrides is not supported: edit config.json"),
        (
            model.hf_config_path not in (None, model.model),
            "--hf-config-path is not supported: put config.json into the checkpoint",
        ),
        (
            model.config_format not in ("auto", "hf"),
            f"--config-format {model.config_format} is not supported: use auto",
        ),
        (
            bool(model.model_class_overrides),
            "--model-class-overrides cannot be used with --model-impl isomodels: leave it out",
        ),
        (
            model.runner_type != "generate" or model.convert_type != "none",
            f"--runner {model.runner_type} --convert {model.convert_type} is not supported: "
            "only --runner generate is",
        ),
        (
            model.multimodal_config is not None,
            "multimodal input is not supported: use a text-only checkpoint",
        ),
        (
            model.enable_prompt_embeds,
            "--enable-prompt-embeds is not supported: send token ids or text",
        ),
        (
            load_format not in ("auto", "hf", "safetensors"),
            f"--load-format {load_format} is not supported: use safetensors files and auto",
        ),
        (
            bool(getattr(model, "model_weights", "")),
            "--model-weights is not supported: put the weights beside config.json",
        ),
        (
            model.logprobs_mode not in _LOGPROBS_MODES,
            f"--logprobs-mode {model.logprobs_mode} is not supported: use raw_logprobs or "
            "processed_logprobs",
        ),
    )


def _engine_refusals(vllm_config: Any) -> tuple[tuple[bool, str], ...]:
    processed = vllm_config.model_config.logprobs_mode == "processed_logprobs"
    passes = vllm_config.compilation_config.pass_config
    uva, prefetch = vllm_config.offload_config.uva, vllm_config.offload_config.prefetch
    aux_output = getattr(vllm_config, "aux_output_config", None)  # of vLLM 0.32
    returns_routes = bool(aux_output and aux_output.enable_return_routed_experts)
    return (
        (
            returns_routes and not vllm_config.use_v2_model_runner,
            "--enable-return-routed-experts needs vLLM's V2 model runner: set "
            "VLLM_USE_V2_MODEL_RUNNER=1",
        ),
        (
            returns_routes and bool(vllm_config.additional_config.get(RECORD_ROUTES)),
            f"--enable-return-routed-experts and {RECORD_ROUTES} hang on the same hook: "
            "leave one out",
        ),
        (
            bool(getattr(passes, "enable_sp", False)),  # gone in 0.32
            "sequence parallelism (pass_config.enable_sp) is not supported: leave it out",
        ),
        (
            vllm_config.kv_transfer_config is not None
            or vllm_config.cache_config.kv_offloading_size is not None,
            "KV transfer and offloading are not supported: leave out --kv-transfer-config and "
            "--kv-offloading-size",
        ),
        (
            vllm_config.cache_config.kv_sharing_fast_prefill,
            "--kv-sharing-fast-prefill is not supported, since no layers share keys: leave it out",
        ),
        (
            uva.cpu_offload_gb > 0 or prefetch.offload_group_size > 0,
            "weight offloading is not supported: leave out --cpu-offload-gb and "
            "--offload-group-size",
        ),
        (
            _foreign_transfer(vllm_config.weight_transfer_config),
            "--weight-transfer-config has one backend that cannot mix two models' weights: "
            """use '{"backend": "isomodels"}'""",
        ),
        (
            processed and _has_logits_processors(vllm_config.model_config),
            "custom logits processors cannot be used with --logprobs-mode processed_logprobs: "
            "use raw_logprobs",
        ),
    )


def _foreign_transfer(transfer: Any) -> bool:
    return transfer is not None and transfer.backend != MODEL_IMPL


def _has_logits_processors(model_config: Any) -> bool:
    from importlib.metadata import entry_points

    return bool(model_config.logits_processors or entry_points(group="vllm.logits_processors"))


def _refuse_mismatch(vllm_config: Any, config: Any) -> None:
    _check_degrees(vllm_config, config)
    model = vllm_config.model_config
    if model.dtype != config.torch_dtype:
        asked = str(model.dtype).removeprefix("torch.")
        raise UnsupportedError(
            f"isomodels: the checkpoint is {config.dtype} and the engine would run {asked}: "
            f"pass --dtype {config.dtype}"
        )
    if model.max_model_len > config.max_position_embeddings:
        raise UnsupportedError(
            f"isomodels: --max-model-len {model.max_model_len} exceeds max_position_embeddings "
            f"{config.max_position_embeddings} of the checkpoint: lower it"
        )


def _check_degrees(vllm_config: Any, config: Any) -> None:
    """Refuses tensor and expert parallelism that do not divide the model."""
    parallel = vllm_config.parallel_config
    ranks = parallel.tensor_parallel_size
    if ranks == 1:
        return
    divided = parallel.enable_expert_parallel and config.routing is not None
    experts = ExpertParallel(size=ranks if divided else 1)
    try:
        check_layout(config, Layout(TensorParallel(size=ranks), experts))
    except UnsupportedError as error:
        raise UnsupportedError(f"isomodels: --tensor-parallel-size {ranks}: {error}") from None


def check_files(path: Path) -> None:
    """Checks a checkpoint folder by config and headers: every tensor there, none left over.

    Raises:
        ConfigError, UnsupportedError: config.json is not one isomodels can run.
        CheckpointError: there is no folder, or its weights are damaged, pickled, or do not fit
            config.json.
    """
    from isomodels.checkpoint import open_checkpoint

    open_checkpoint(path)


def _set_logprobs(vllm_config: Any) -> None:
    from vllm.platforms import current_platform

    from isomodels.vllm.sampling import CHECK_RAW, NORMALIZE, REFUSE_SEEDS

    model = vllm_config.model_config
    processors = list(model.logits_processors or ())
    processed = model.logprobs_mode == "processed_logprobs"
    if vllm_config.use_v2_model_runner:
        # in processed mode the sampler normalises
        check = "CheckProcessed" if processed else "CheckRaw"
        processors.append(f"isomodels.vllm.sampling_v2:{check}")
    else:
        processors += NORMALIZE if processed else (CHECK_RAW,)
        if current_platform.is_cpu() and vllm_config.scheduler_config.enable_chunked_prefill:
            processors.append(REFUSE_SEEDS)
    model.logits_processors = processors
    model.logprobs_mode = _LOGPROBS_MODES[model.logprobs_mode]


def _set_cuda_graphs(vllm_config: Any) -> None:
    """Graphs of whole decode steps; nothing is compiled: every operator is a kernel already."""
    from vllm.config import CompilationMode, CUDAGraphMode
    from vllm.platforms import current_platform

    if not current_platform.is_cuda():
        return
    compilation = vllm_config.compilation_config
    if compilation.mode not in (None, CompilationMode.NONE):
        raise UnsupportedError(
            f"isomodels: compilation mode {compilation.mode.name} is not supported: leave it out"
        )
    graphs = (None, CUDAGraphMode.NONE, CUDAGraphMode.FULL_DECODE_ONLY)
    if compilation.cudagraph_mode not in graphs:
        raise UnsupportedError(
            f"isomodels: cudagraph_mode {compilation.cudagraph_mode.name} is not supported: "
            "use FULL_DECODE_ONLY or NONE"
        )
    compilation.mode = CompilationMode.NONE
    if compilation.cudagraph_mode is None:
        compilation.cudagraph_mode = CUDAGraphMode.FULL_DECODE_ONLY
