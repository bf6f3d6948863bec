"""From the tensors vLLM reads to the module's parameters, through the architecture's rules."""

from collections.abc import Iterable, Iterator
from typing import Any

import torch
from torch import Tensor, nn

from isomodels.errors import CheckpointError
from isomodels.registry import ArchSpec, load_object
from isomodels.weights_conv.tables import iter_checked

# Key of vLLM's `additional_config`: no weights are read. Whoever sets it fills the module once the
# engine has started, before the first request.
LOADED_LATER = "isomodels_loaded_later"


def convert(
    spec: ArchSpec,
    config: Any,
    weights: Iterable[tuple[str, Tensor]],
    dtype: torch.dtype,
    device: torch.device,
) -> Iterator[tuple[str, Tensor]]:
    """Checks a whole checkpoint, then converts it tensor by tensor.

    What only a trainer carries (MTP layers) is checked and left.

    Args:
        spec, config: the architecture and its config.
        weights: Hugging Face names and tensors.
        dtype: of every tensor.
        device: where the tensors are put together.

    Returns:
        Names of the module's parameters and their values.

    Raises:
        CheckpointError: naming each tensor that is missing, left over, repeated, or of another
            shape or dtype.
    """
    hf: dict[str, Tensor] = {}
    for name, tensor in weights:
        if name in hf:
            raise CheckpointError(f"the weights hold {name} twice")
        hf[name] = tensor
    rules = load_object(spec.weights)(config)
    return iter_checked(rules, hf, dtype=dtype, carried=False, device=device)


def restore_after_failed_reload(model: nn.Module, model_config: Any) -> None:
    """Puts the old weights back in place when a reload was refused.

    vLLM moves all parameters to the meta device before it calls `load_weights`. At the first load
    there is nothing to restore, and the engine does not start.
    """
    if any(parameter.is_meta for parameter in model.parameters()):
        from vllm.model_executor.model_loader.reload import finalize_layerwise_reload

        finalize_layerwise_reload(model, model_config)
