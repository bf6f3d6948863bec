"""Recurrent state in vLLM: what a sequence needs of its past beside keys and values.

vLLM keeps one block of state for each running sequence and layer, and copies whole blocks where a
prefix is shared (mamba_cache_mode "align"). The state here is complete at every token, so a cached
prefix may end anywhere, also inside a chunk of the gated delta rule.
"""

import math
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor
from vllm.config import VllmConfig
from vllm.model_executor.layers.attention_layer_base import AttentionLayerBase
from vllm.model_executor.layers.mamba.abstract import MambaBase
from vllm.model_executor.layers.mamba.mamba_utils import get_temporal_copy_spec
from vllm.platforms import current_platform
from vllm.v1.attention.backend import (
    AttentionBackend,
    AttentionCGSupport,
    AttentionMetadataBuilder,
    CommonAttentionMetadata,
)
from vllm.v1.attention.backends.registry import MambaAttentionBackendEnum
from vllm.v1.attention.backends.utils import mamba_get_block_table_tensor
from vllm.v1.kv_cache_interface import KVCacheSpec

from isomodels.batch import PagedStates
from isomodels.errors import UnsupportedError
from isomodels.kernels.gated_delta import Layout
from isomodels.layers.gated_delta import state_layout
from isomodels.layers.hybrid_config import HybridConfig
from isomodels.vllm.attention import StepMetadata
from isomodels.vllm.checks import read_checkpoint_config
from isomodels.vllm.mla import cache_layer
from isomodels.vllm.model import IsoModelsForCausalLM


@dataclass
class StateStep:
    """Where the states of a step's sequences lie: [num_seqs] int32."""

    slots: Tensor


class StateBuilder(AttentionMetadataBuilder[StateStep]):
    """Finds each sequence's block from device tensors, without reading one back."""

    # A captured graph holds `slots`, which is filled anew for each replay. The lanes that vLLM
    # pads it with have no new tokens, so that whatever block they name is not touched.
    _cudagraph_support = AttentionCGSupport.UNIFORM_SINGLE_TOKEN_DECODE

    def __init__(
        self,
        kv_cache_spec: KVCacheSpec,
        layer_names: list[str],
        vllm_config: VllmConfig,
        device: torch.device,
    ):
        super().__init__(kv_cache_spec, layer_names, vllm_config, device)
        most = vllm_config.scheduler_config.max_num_seqs
        padded = vllm_config.compilation_config.max_cudagraph_capture_size or 0
        self.slots = torch.zeros(max(most, padded), dtype=torch.int32, device=device)
        if device.type == "cuda":
            # Where a builder has this field, the V2 runner finds the blocks of all groups in one
            # launch, at an address that stays: [num_seqs, 1].
            self.mamba_aligned_state_indices: Tensor | None = None

    def build(
        self,
        common_prefix_len: int,
        common_attn_metadata: CommonAttentionMetadata,
        fast_build: bool = False,
        **_: Any,
    ) -> StateStep:
        """See the base class."""
        step = common_attn_metadata
        found = getattr(self, "mamba_aligned_state_indices", None)
        if found is not None:
            return StateStep(found[: step.num_reqs, 0])
        blocks = mamba_get_block_table_tensor(
            step.block_table_tensor[: step.num_reqs],
            step.seq_lens[: step.num_reqs],
            self.kv_cache_spec,
            self.vllm_config.cache_config.mamba_cache_mode,
        )
        slots = self.slots[: step.num_reqs]
        slots.copy_(blocks[:, 0])
        return StateStep(slots)


class StateBackend(AttentionBackend):
    """What vLLM asks of a backend. The arithmetic is in the module: there is no impl class."""

    @staticmethod
    def get_name() -> str:
        """vLLM's name for a backend that is not its own."""
        return "CUSTOM"

    @staticmethod
    def get_impl_cls() -> type:
        """There is none: vLLM asks for it only through its own layers."""
        raise NotImplementedError

    @staticmethod
    def get_builder_cls() -> type[StateBuilder]:
        """The class that finds the blocks of a step."""
        return StateBuilder

    @classmethod
    def is_ssm(cls) -> bool:
        """A block is one sequence's state, not a run of tokens."""
        return True


_ALIGNMENT = 16  # bytes: how kernels like to find the tensors of a state


class StateLayer(MambaBase):
    """The states of one decoder layer: `kv_cache` is one tensor of bytes, [num_blocks, bytes].

    One and not one for each tensor of a state, because vLLM looks at each step at each tensor of
    each sequence, whether it is to be copied to another block.
    """

    def __init__(self, name: str, layout: Layout):
        self.name = name
        self.layout = layout
        self.kv_cache: tuple[Tensor, ...] = ()
        self._bound: tuple[Tensor | None, tuple[Tensor, ...]] = (None, ())

    def states(self) -> tuple[Tensor, ...]:
        """The tensors of all states, [num_blocks, ...] each, in the order of the layout."""
        (blocks,) = self.kv_cache
        if self._bound[0] is not blocks:  # vLLM binds anew
            self._bound = (blocks, _carve(blocks, self.layout))
        return self._bound[1]

    def get_state_shape(self) -> tuple[tuple[int, ...], ...]:
        """See the base class."""
        return ((_offsets(self.layout)[-1],),)

    def get_state_dtype(self) -> tuple[torch.dtype, ...]:
        """See the base class."""
        return (torch.uint8,)

    @property
    def mamba_type(self) -> MambaAttentionBackendEnum:
        """A label: the backend is our own."""
        return MambaAttentionBackendEnum.LINEAR

    def get_attn_backend(self) -> type[AttentionBackend]:
        """See the base class."""
        return StateBackend


def _offsets(layout: Layout) -> list[int]:
    """Where each tensor begins in a block, in bytes, and where the last ends."""
    offsets = [0]
    for shape, dtype in layout:
        end = offsets[-1] + math.prod(shape) * dtype.itemsize
        offsets.append(-(-end // _ALIGNMENT) * _ALIGNMENT)
    return offsets


def _carve(blocks: Tensor, layout: Layout) -> tuple[Tensor, ...]:
    """blocks [num_blocks, bytes] -> views [num_blocks, *shape], one an entry of the layout."""
    return tuple(
        blocks[:, start : start + math.prod(shape) * dtype.itemsize].view(dtype).unflatten(1, shape)
        for start, (shape, dtype) in zip(_offsets(layout)[:-1], layout, strict=True)
    )


class IsoModelsHybridForCausalLM(IsoModelsForCausalLM):
    """An architecture of isomodels with recurrent state; vLLM reads the flags off the class."""

    is_hybrid = True
    has_inner_state = True
    supports_mamba_prefix_caching = True

    config: HybridConfig

    @classmethod
    def get_mamba_state_shape_from_config(cls, vllm_config: VllmConfig) -> tuple:
        """Shape of one layer's state, before the model exists."""
        return StateLayer("", _layout(vllm_config)).get_state_shape()

    @classmethod
    def get_mamba_state_dtype_from_config(cls, vllm_config: VllmConfig) -> tuple:
        """Dtype of one layer's state, before the model exists."""
        return StateLayer("", _layout(vllm_config)).get_state_dtype()

    @classmethod
    def get_mamba_state_copy_func(cls) -> tuple:
        """How a block is copied: whole."""
        return (get_temporal_copy_spec,)

    @classmethod
    def get_mamba_state_copy_funcs(cls, mamba_types: set) -> dict:
        """The same by type of state."""
        return dict.fromkeys(mamba_types, cls.get_mamba_state_copy_func())

    @staticmethod
    def normalizing_state() -> type:
        """See the base class: one that also copies states from block to block."""
        from isomodels.vllm.sampling_v2 import NormalizingHybridState

        return NormalizingHybridState

    def cache_layers(self, prefix: str, dtype: torch.dtype) -> list[AttentionLayerBase]:
        """Pages for the attention layers, then states for the others."""
        config, ranks = self.config, self.layout.tensor.size
        keys = [
            cache_layer(f"{prefix}.{i}.kv_cache", config, dtype, ranks)
            for i in config.layers_of("full_attention")
        ]
        layout = state_layout(config, dtype, current_platform.device_type, ranks)
        states = [
            StateLayer(f"{prefix}.{i}.state", layout) for i in config.layers_of("linear_attention")
        ]
        return [*keys, *states]

    def step(self, metadata: dict[str, Any]) -> StepMetadata:
        """The step of the attention layers, with the states of the others."""
        step = super().step(metadata)
        layers = [layer for layer in self.layers if isinstance(layer, StateLayer)]
        states = PagedStates(
            # Read at each step: vLLM binds the states after the model exists.
            tensors=[layer.states() for layer in layers],
            # vLLM may give each layer a block of its own.
            slots=[metadata[layer.name].slots for layer in layers],
        )
        return replace(step, batch=replace(step.batch, states=states))


def _layout(vllm_config: VllmConfig) -> Layout:
    _, config = read_checkpoint_config(vllm_config.model_config)
    dtype, ranks = vllm_config.model_config.dtype, vllm_config.parallel_config.tensor_parallel_size
    return state_layout(config, dtype, current_platform.device_type, ranks)


def prepare(vllm_config: Any) -> None:
    """Checks the options of recurrent state, and tells vLLM how states are cached and that
    positions are those of text.

    Raises:
        UnsupportedError: naming the option and the remedy.
    """
    cache = vllm_config.cache_config
    own_dtype = str(vllm_config.model_config.dtype).removeprefix("torch.")
    refusals = (
        (
            cache.mamba_ssm_cache_dtype not in ("auto", "float32"),
            f"--mamba-ssm-cache-dtype {cache.mamba_ssm_cache_dtype} is not supported: the state "
            "is float32, use auto",
        ),
        (
            cache.mamba_cache_dtype not in ("auto", own_dtype),
            f"--mamba-cache-dtype {cache.mamba_cache_dtype} is not supported: use auto",
        ),
        (
            bool(getattr(cache, "use_replayssm", False)),
            "--use-replayssm is not supported: leave it out",
        ),
        (
            cache.mamba_cache_mode not in ("none", "align"),
            f"--mamba-cache-mode {cache.mamba_cache_mode} is not supported: a step leaves one "
            "state, use align",
        ),
    )
    for refused, sentence in refusals:
        if refused:
            raise UnsupportedError(f"isomodels: {sentence}")
    if cache.enable_prefix_caching:
        # before vLLM chooses: versions with a mode "all" take that
        cache.mamba_cache_mode = "align"
    # vLLM would hand over three rows of positions, which are one for text.
    model = vllm_config.model_config
    for config in (model.hf_config, model.hf_text_config):
        for name in ("mrope_section", "mrope_interleaved"):
            (getattr(config, "rope_parameters", None) or {}).pop(name, None)
