"""In Megatron-Bridge's place: what `isomodels.megatron.bridge` takes of it, and no more.

Calls come in the order of version 0.6.2: a provider's fields are open until `finalize`, its hooks
run between the build and the wrappers. The model and Megatron's wrappers are real.
"""

import importlib
import importlib.metadata
import sys
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from types import ModuleType, SimpleNamespace
from typing import Any, ClassVar, Generic, TypeVar

import pytest
import torch
from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.transformer.module import Float16Module
from megatron.core.transformer.transformer_config import TransformerConfig as MegatronsConfig

from tests.recipes.recipes import stand_in

Model = TypeVar("Model")


@dataclass
class TransformerConfig(MegatronsConfig):
    """Derived fields are computed by `finalize`."""

    def __post_init__(self) -> None:
        pass

    def finalize(self) -> None:
        MegatronsConfig.__post_init__(self)


class ModelProviderMixin(Generic[Model]):
    """Builds, lets the hooks load, and wraps."""

    def register_pre_wrap_hook(self, hook: Callable[[list[Any]], list[Any]]) -> None:
        self._hooks = [*getattr(self, "_hooks", []), hook]

    def provide_distributed_model(
        self,
        ddp_config: DistributedDataParallelConfig | None = None,
        wrap_with_ddp: bool = True,
        fp16: bool | None = None,
        bf16: bool | None = None,
    ) -> list[Any]:
        this: Any = self
        this._pg_collection = ProcessGroupCollection.use_mpu_process_groups()
        if bf16 is not None:
            dtype = torch.bfloat16 if bf16 else torch.float32
            this.bf16, this.params_dtype, this.pipeline_dtype = bf16, dtype, dtype
        models = [this.provide(pre_process=True, post_process=True)]
        for hook in getattr(self, "_hooks", []):
            models = hook(models)
        if this.bf16:
            models = [Float16Module(self, model) for model in models]
        if wrap_with_ddp:
            models = [DistributedDataParallel(self, ddp_config, model) for model in models]
        return models


class MegatronModelBridge:
    """One architecture's."""

    known: ClassVar[dict[str, type]] = {}
    hf_pretrained: Any = None

    @classmethod
    def register_bridge(cls, *, source: str, **_: Any) -> Callable[[type], type]:
        def register(bridge: type) -> type:
            cls.known[source] = bridge
            return bridge

        return register


class AutoBridge(Generic[Model]):
    """Finds an architecture's bridge by the name in its config."""

    def __init__(self, path: Any, architecture: str):
        self.hf_pretrained = SimpleNamespace(model_name_or_path=str(path))
        self._model_bridge = MegatronModelBridge.known[architecture]()
        self._model_bridge.hf_pretrained = self.hf_pretrained

    @classmethod
    def from_hf_pretrained(cls, path: Any, architectures: list[str], **_: Any) -> Any:
        return cls(path, architectures[0])

    def to_megatron_provider(self, load_weights: bool = True) -> Any:
        provider = self._model_bridge.provider_bridge(self.hf_pretrained)
        if load_weights:
            provider.perform_initialization = False
            load = self._model_bridge.load_weights_hf_to_megatron
            provider.register_pre_wrap_hook(partial(load, self.hf_pretrained))
        return provider

    def load_hf_weights(self, model: list[Any]) -> list[Any]:
        load = self._model_bridge.load_weights_hf_to_megatron
        load(self.hf_pretrained, model, allowed_mismatched_params=None)
        return model


class MegatronParamMapping(Generic[Model]):
    """Of an export, which nothing here asks for."""


def install(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """`isomodels.megatron.bridge`, imported anew over the stand-ins."""
    conversion = "megatron.bridge.models.conversion"
    stand_in(monkeypatch, "megatron.bridge", AutoBridge=AutoBridge)
    for module, name, value in (
        ("megatron.bridge.models.transformer_config", "TransformerConfig", TransformerConfig),
        ("megatron.bridge.models.model_provider", "ModelProviderMixin", ModelProviderMixin),
        (f"{conversion}.model_bridge", "MegatronModelBridge", MegatronModelBridge),
        (f"{conversion}.mapping_registry", "MegatronMappingRegistry", object),
        (f"{conversion}.param_mapping", "MegatronParamMapping", MegatronParamMapping),
    ):
        stand_in(monkeypatch, module, **{name: value})
    version = importlib.metadata.version
    monkeypatch.setattr(
        importlib.metadata,
        "version",
        lambda name: "0.6.2" if name == "megatron-bridge" else version(name),
    )
    path = "isomodels.megatron.bridge"
    package = importlib.import_module("isomodels.megatron")
    monkeypatch.setattr(package, "bridge", None, raising=False)  # put back what was there
    monkeypatch.setitem(sys.modules, path, ModuleType(path))
    del sys.modules[path]
    return importlib.import_module(path)
