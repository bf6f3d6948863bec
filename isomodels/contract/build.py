"""Makes the contract of a model on a device."""

import platform
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from isomodels import __version__
from isomodels.config import read_config
from isomodels.contract.document import Contract
from isomodels.contract.operations import CASES, operations_of
from isomodels.errors import ContractError, UnsupportedError
from isomodels.kernels.schedule import SCHEDULES
from isomodels.layers.parallel import expert_degrees, named_tensors, tensor_degrees
from isomodels.registry import ArchSpec, load_object
from isomodels.validate.battery import operators
from isomodels.validate.device import facts, refuse_device, triton_version, with_index
from isomodels.weights_conv.bits import dtype_name

# A dtype belongs to the policy; the rest of a config to the model.
_POLICY_FIELDS = ("dtype",)
_DEVICE_POLICY = ("backend", "compute_capability", "isa", "torch", "triton")


def contract_of(
    source: Path | str | Mapping[str, Any],
    device: torch.device | str = "cpu",
    *,
    dtype: torch.dtype | None = None,
    host: Mapping[str, Any] | None = None,
    capability: tuple[int, int] | None = None,
) -> Contract:
    """The contract of a checkpoint, or of the content of its config.json; see `contract_for`.

    Raises:
        ConfigError, UnsupportedError: a config or a device that isomodels cannot run.
        ContractError: an operation without a schedule on this backend.
    """
    spec, config = read_config(source)
    return contract_for(spec, config, device, dtype=dtype, host=host, capability=capability)


def contract_for(
    spec: ArchSpec,
    config: Any,
    device: torch.device | str,
    *,
    dtype: torch.dtype | None = None,
    host: Mapping[str, Any] | None = None,
    capability: tuple[int, int] | None = None,
) -> Contract:
    """The contract of a model on a device.

    The operations are read from a run of the module on the meta device, and their schedules from
    the operations themselves.

    Args:
        spec, config: as `read_config` gives them.
        device: where the model runs; its backend and architecture are part of the policy.
        dtype: of the model; None for the checkpoint's.
        host: what the deployment says of its host: name, version, layout.
        capability: CUDA compute capability, to state a contract for a GPU that is not here.

    Raises:
        UnsupportedError: a device that isomodels cannot run on.
        ContractError: an operation without a schedule on this backend.
    """
    dtype = dtype or config.torch_dtype
    core = load_object(spec.model)(config, dtype=dtype, device=torch.device("meta"))
    where = _device_facts(torch.device(device), capability)
    forms = operations_of(core, torch.device(device).type)
    parameters = named_tensors(core)
    return Contract(
        semantic=_semantic(spec, config, parameters),
        numerical_policy={
            "dtype": dtype_name(dtype),
            "pinned": {n: dtype_name(p.dtype) for n, p in parameters.items() if p.dtype != dtype},
            "device": {key: where[key] for key in _DEVICE_POLICY if key in where},
            "cases": CASES,
            "forms": forms,
            "schedules": schedules_of(forms, where["backend"]),
            "layouts": {
                "tensor_parallel": tensor_degrees(config),
                "expert_parallel": expert_degrees(config),
            },
        },
        deployment={
            "isomodels": __version__,
            "python": platform.python_version(),
            "device": {k: v for k, v in where.items() if k not in _DEVICE_POLICY},
            "host": dict(host or {}),
        },
    )


def semantic_of(spec: ArchSpec, config: Any) -> dict[str, Any]:
    """The semantic section alone, which no device moves.

    Args:
        spec, config: as `read_config` gives them.
    """
    meta = torch.device("meta")
    core = load_object(spec.model)(config, dtype=config.torch_dtype, device=meta)
    return _semantic(spec, config, named_tensors(core))


def _semantic(spec: ArchSpec, config: Any, parameters: Mapping[str, Tensor]) -> dict[str, Any]:
    fields = config.model_dump(mode="json")
    return {
        "architecture": spec.architecture,
        "family": spec.family,
        "config": {k: v for k, v in fields.items() if k not in _POLICY_FIELDS},
        "parameters": {name: list(p.shape) for name, p in parameters.items()},
    }


def _device_facts(device: torch.device, capability: tuple[int, int] | None) -> dict[str, Any]:
    if capability is None:
        refuse_device(device)
        return facts(with_index(device))
    if device.type != "cuda":
        raise UnsupportedError(f"a compute capability belongs to a GPU, not to {device.type}")
    return {
        "backend": "triton",
        "compute_capability": "{}.{}".format(*capability),
        "torch": torch.__version__,
        "triton": triton_version() or "",
    }


def schedules_of(forms: Mapping[str, Any], backend: str) -> dict[str, Any]:
    """What the operations themselves declare: {operator: version and constants}.

    Args:
        forms: as `operations_of` makes them.
        backend: "torch" or "triton".

    Raises:
        ContractError: an operation without a schedule there.
    """
    operators()  # declares the schedules of all kernel files
    used = {op for form in forms.values() for part in form.values() for op in part}
    missing = sorted(op for op in used if (op, backend) not in SCHEDULES)
    if missing:
        raise ContractError(
            f"{', '.join(missing)}: no schedule on the {backend} backend, so nothing says what "
            "decides their bits: run this model on a device whose backend has them"
        )
    found = {op: SCHEDULES[op, backend] for op in sorted(used)}
    return {
        op: {"version": schedule.version, "constants": dict(schedule.constants)}
        for op, schedule in found.items()
    }


def served(contract: Contract, case: str, way: str = "logprobs") -> set[str]:
    """The operators that a case runs by contract.

    Args:
        contract: as `contract_of` makes it.
        case: one of `CASES`.
        way: "logprobs" or, in the engine's processed mode, "processed_logprobs".
    """
    form = contract.numerical_policy["forms"][contract.numerical_policy["cases"][case]]
    return {*form["forward"], *form[way]}
