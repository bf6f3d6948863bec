"""Entry point of the group `vllm.general_plugins`.

vLLM calls `register` in the front end, the engine core, every worker and its inspection process,
and some of them more than once: it is idempotent, cheap and starts no device.
"""

from functools import cache
from typing import Any

from isomodels.registry import ArchSpec, architectures

MODEL_IMPL = "isomodels"


def register() -> None:
    """Makes `--model-impl isomodels` known to vLLM. Nothing changes for any other value."""
    from isomodels.vllm import patches

    patches.install()
    _register_configs()
    _register_weight_transfer()


def _register_weight_transfer() -> None:
    """Weights from a trainer: `isomodels/vllm/weight_transfer.py`, imported when it is used."""
    from vllm.distributed.weight_transfer.factory import WeightTransferEngineFactory as Factory

    if MODEL_IMPL not in Factory._registry:
        module = "isomodels.vllm.weight_transfer"
        Factory.register_engine(MODEL_IMPL, module, "IsoModelsWeightTransfer")


def _register_configs() -> None:
    """vLLM reads configs through transformers, which does not know every `model_type` of ours."""
    from transformers import AutoConfig
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING

    for spec in architectures().values():
        if spec.model_type not in CONFIG_MAPPING:
            AutoConfig.register(spec.model_type, _config_class(spec))


@cache
def _config_class(spec: ArchSpec) -> Any:
    """The config class of the same function in transformers, under the architecture's own name."""
    import transformers

    base = getattr(transformers, _config_name(spec.transformers))
    members = {"model_type": spec.model_type, "__module__": __name__}
    return type(_config_name(spec.architecture), (base,), members)


def _config_name(architecture: str) -> str:
    return architecture.removesuffix("ForCausalLM") + "Config"


def __getattr__(name: str) -> Any:
    """A config class by name: a pickled config may reach a process before `register` runs there."""
    for spec in architectures().values():
        if name == _config_name(spec.architecture):
            return _config_class(spec)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
