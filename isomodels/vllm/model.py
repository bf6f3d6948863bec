"""The model class that vLLM builds: a host without arithmetic around a module of isomodels."""

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor, nn
from vllm.config import VllmConfig
from vllm.forward_context import get_forward_context
from vllm.model_executor.model_loader.weight_utils import default_weight_loader

from isomodels.batch import Batch
from isomodels.contract import Contract, contract_for
from isomodels.contract.operations import operators_of
from isomodels.contract.served import COUNT_OPERATIONS, ServedOperations
from isomodels.contract.stored import require_stored
from isomodels.errors import CheckpointError
from isomodels.layers.parallel import named_tensors
from isomodels.registry import load_object
from isomodels.validate import require_validated
from isomodels.vllm.attention import StepMetadata
from isomodels.vllm.checks import read_checkpoint_config
from isomodels.vllm.mla import cache_layer
from isomodels.vllm.parallel import layout_of
from isomodels.vllm.routes import RECORD_ROUTES, RouteBuffer
from isomodels.vllm.tracing import TRACE, EngineTrace
from isomodels.vllm.versions import vllm_version
from isomodels.vllm.weights import convert, restore_after_failed_reload


class IsoModelsForCausalLM(nn.Module):
    """Any architecture of isomodels, as vLLM wants a model.

    Args:
        vllm_config: vLLM's configuration, already checked by `IsoModelsConfig`.
        prefix: prefix of vLLM's layer names.

    Raises:
        ConfigError, UnsupportedError: the checkpoint's config.json is not one isomodels can run.
        UnsupportedError: the kernels do not pass their checks on this device.
    """

    def __init__(self, *, vllm_config: VllmConfig, prefix: str = ""):
        super().__init__()
        model_config = vllm_config.model_config
        self.model_config = model_config
        self.spec, self.config = read_checkpoint_config(model_config)
        self.max_model_len = model_config.max_model_len
        self.loaded_from = model_config.model
        # The engine hands back what `compute_logits` returns in both modes that IsoModelsConfig
        # leaves; in processed mode the logits are normalised after the temperature.
        self.normalize = model_config.logprobs_mode == "raw_logits"
        if not self.normalize:
            # The V2 model runner asks a model for its state, which owns the sampler.
            self.get_model_state_cls = self.normalizing_state
        self.device = device = torch.device(vllm_config.device_config.device)
        # Here, in the worker, which has the device; the front end must not start CUDA.
        dtype = model_config.dtype
        require_validated(
            device,
            dtype=dtype,
            head_dim=self.config.common_head_dim,
            operators=operators_of(self.spec, self.config, dtype, device, "paged"),
            trains=False,
        )
        self.layout = layout_of(vllm_config)
        self.core = load_object(self.spec.model)(
            self.config, dtype=model_config.dtype, device=device, layout=self.layout
        ).requires_grad_(False)
        self.layers = self.cache_layers(f"{prefix}.layers".removeprefix("."), model_config.dtype)
        self.routes: RouteBuffer | None = None
        if vllm_config.additional_config.get(RECORD_ROUTES) and self.config.routing:
            most = vllm_config.scheduler_config.max_num_batched_tokens
            self.routes = RouteBuffer(self.core, most, vllm_config.device_config.device)
        extra = vllm_config.additional_config
        self.served = ServedOperations(self.core) if extra.get(COUNT_OPERATIONS) else None
        most = vllm_config.scheduler_config.max_num_batched_tokens
        self.trace = EngineTrace(self.core, most, captured=True) if extra.get(TRACE) else None
        context = vllm_config.compilation_config.static_forward_context
        context.update({layer.name: layer for layer in self.layers})
        parallel = vllm_config.parallel_config
        self.degrees = {"tensor_parallel": parallel.tensor_parallel_size}
        self.refusal: str | None = None  # why nothing may be served: no whole weights

    @staticmethod
    def normalizing_state() -> type:
        """The class of the V2 model runner's state that samples from normalised logprobs."""
        from isomodels.vllm.sampling_v2 import NormalizingState  # the V2 runner's modules

        return NormalizingState

    def cache_layers(self, prefix: str, dtype: torch.dtype) -> list[Any]:
        """What vLLM allocates memory for: the pages of each decoder layer, those of keys first."""
        layers, ranks = range(self.config.num_hidden_layers), self.layout.tensor.size
        return [cache_layer(f"{prefix}.{i}.kv_cache", self.config, dtype, ranks) for i in layers]

    def step(self, metadata: dict[str, Any]) -> StepMetadata:
        """What vLLM's builders made of a step, by layer name -> what the core needs."""
        return metadata[self.layers[0].name]

    def embed_input_ids(self, input_ids: Tensor) -> Tensor:
        """[T] -> [T, H]."""
        return self.core.model.embed_tokens(input_ids.long())

    def forward(
        self,
        input_ids: Tensor,
        positions: Tensor,
        intermediate_tensors: None = None,
        inputs_embeds: None = None,
    ) -> Tensor:
        """Hidden states after the final norm.

        Args:
            input_ids, positions: [T], padded tokens included.
            intermediate_tensors, inputs_embeds: always None: refused at start.

        Returns:
            [T, H]; rows of padded tokens are zero.
        """
        metadata = get_forward_context().attn_metadata
        if metadata is None:  # vLLM measures memory before it has pages
            return self.core(input_ids.long(), positions, self._packed(len(input_ids)))
        step = self.step(metadata)
        real = step.num_actual_tokens
        if self.routes is not None:
            self.routes.keep_slots(step.batch)
        hidden = self.core(input_ids[:real].long(), positions[:real], step.batch)
        if real == len(input_ids):
            return hidden
        padded = hidden.new_zeros(len(input_ids), hidden.shape[1])
        padded[:real] = hidden
        return padded

    def compute_logits(self, hidden_states: Tensor) -> Tensor:
        """[T, H] -> [T, V] fp32: logprobs at temperature 1, or logits in processed mode.

        Raises:
            CheckpointError: the weights are of two versions.
        """
        if self.refusal is not None:  # here: a CUDA graph replays `forward` without calling it
            raise CheckpointError(self.refusal)
        if self.normalize:
            return self.core.logprobs(hidden_states)
        return self.core.logits(hidden_states)

    def contract(self) -> Contract:
        """What decides the bits of this engine."""
        parameter = next(self.core.parameters())
        return contract_for(
            self.spec,
            self.config,
            parameter.device,
            dtype=self.model_config.dtype,
            host={"name": "vllm", "version": vllm_version(), **self.degrees},
        )

    def load_weights(self, weights: Iterable[tuple[str, Tensor]]) -> set[str]:
        """Loads a whole checkpoint, at start and on a reload.

        Args:
            weights: Hugging Face names and tensors, in any order.

        Returns:
            The names of all parameters.

        Raises:
            CheckpointError: a missing, left-over, misshapen or mistyped tensor, or (on a reload)
                a checkpoint of another config. The old weights then stay in place.
            ContractError: a folder that a training wrote under another contract; as above.
        """
        try:
            _, config = read_checkpoint_config(self.model_config)
            if config.model_dump() != self.config.model_dump():
                raise CheckpointError(
                    f"{self.model_config.model}: config.json differs from the one the engine "
                    "started with: start a new engine for another model"
                )
            dtype = self.model_config.dtype
            require_stored(self.model_config.model, self.spec, config, self.device, dtype=dtype)
            # At start on the device, where putting experts together is fast. A reload has the
            # whole checkpoint in host memory before the first weight changes: nothing fails then.
            reload = any(parameter.is_meta for parameter in self.core.parameters())
            device = torch.device("cpu") if reload else self.device
            tensors = convert(self.spec, config, weights, dtype, device)
            if reload:
                tensors = iter(list(tensors))
        except Exception:
            restore_after_failed_reload(self, self.model_config)
            self.model_config.model = self.loaded_from
            raise
        self.loaded_from = self.model_config.model
        own, loaded = named_tensors(self.core), set()
        for name, tensor in self.core.own_tensors(tensors):
            loaded.add(f"core.{name}")
            parameter = own[name]
            # vLLM wraps this loader on a reload; a plain copy would write to meta tensors.
            loader = getattr(parameter, "weight_loader", default_weight_loader)
            loader(parameter, tensor)
        self.refusal = None  # whatever was there before
        return loaded

    def _packed(self, num_tokens: int) -> Batch:
        """Sequences as long as the engine may get: the most that a step can cost."""
        bounds = [*range(0, num_tokens, self.max_model_len), num_tokens]
        device = next(self.core.parameters()).device
        return Batch.packed(torch.tensor(bounds, dtype=torch.int32, device=device))
