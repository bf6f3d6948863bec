"""From the tensors vLLM reads to the module's parameters, through the architecture's rules."""

from collections.abc import Iterable, Mapping
from typing import Any

from torch import Tensor, nn

from isomodels.errors import CheckpointError
from isomodels.registry import ArchSpec, load_object
from isomodels.weights_conv.rules import to_module


def convert(
    spec: ArchSpec,
    config: Any,
    weights: Iterable[tuple[str, Tensor]],
    parameters: Mapping[str, Tensor],
) -> dict[str, Tensor]:
    """Converts a whole checkpoint.

    Args:
        spec, config: the architecture and its config.
        weights: Hugging Face names and tensors.
        parameters: the module's parameters, for names, shapes and dtypes (meta tensors will do).

    Returns:
        One tensor for each parameter, of its shape and dtype.

    Raises:
        CheckpointError: naming each tensor that is missing, left over, or of another shape or
            dtype.
    """
    hf: dict[str, Tensor] = {}
    for name, tensor in weights:
        if name in hf:
            raise CheckpointError(f"tensor {name} occurs twice")
        hf[name] = tensor
    tensors = to_module(load_object(spec.weights)(config), hf)
    problems = []
    for name, parameter in parameters.items():
        tensor = tensors.get(name)
        if tensor is None:
            problems.append(f"{name} is missing")
        elif tensor.shape != parameter.shape:
            problems.append(f"{name} has shape {list(tensor.shape)}, not {list(parameter.shape)}")
        elif tensor.dtype != parameter.dtype:
            problems.append(f"{name} is {tensor.dtype}, not {parameter.dtype}")
    if problems:
        raise CheckpointError("checkpoint does not fit the model: " + "; ".join(problems))
    # What the rules carry for a trainer alone (MTP layers) has no parameter here.
    return {name: tensors[name] for name in parameters}


def restore_after_failed_reload(model: nn.Module, model_config: Any) -> None:
    """Puts the old weights back in place when a reload was refused.

    vLLM moves all parameters to the meta device before it calls `load_weights`. At the first load
    there is nothing to restore, and the engine does not start.
    """
    if any(parameter.is_meta for parameter in model.parameters()):
        from vllm.model_executor.model_loader.reload import finalize_layerwise_reload

        finalize_layerwise_reload(model, model_config)
