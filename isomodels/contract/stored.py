"""The contract in a checkpoint's folder: what its weights are, and which bits they were made for.

A training states all sections. A conversion keeps those of its source, and of a source without
states the semantic section alone: it computed nothing. A section that is empty is not stated.
"""

from pathlib import Path
from typing import Any

import torch

from isomodels.contract.build import contract_for, semantic_of
from isomodels.contract.compare import differences
from isomodels.contract.document import Contract
from isomodels.errors import ContractError
from isomodels.registry import ArchSpec
from isomodels.weights_conv.files import CONTRACT

_SHOWN = 5
_REMEDY = {
    "semantic": (
        "config.json was changed since, or belongs to another model: bring back the one that was "
        "written with the weights"
    ),
    "numerical_policy": (
        "go on with the isomodels, torch, Triton and kind of device that made them; or, where "
        f"other bits are as good, remove {CONTRACT} from the folder"
    ),
}


def read_stored(folder: Path | str) -> Contract | None:
    """The contract in a folder; None where there is none, as in any published checkpoint.

    Raises:
        ContractError: a file that cannot be read, or was changed since.
    """
    file = Path(folder) / CONTRACT
    try:
        return Contract.from_json(file.read_bytes(), str(file))
    except (FileNotFoundError, NotADirectoryError):
        return None
    except OSError as error:
        raise ContractError(f"cannot read {file}: {error.strerror}") from None


def require_stored(
    folder: Path | str,
    spec: ArchSpec,
    config: Any,
    device: torch.device | str,
    *,
    dtype: torch.dtype | None = None,
    cast: bool = False,
) -> None:
    """Go on only if a model that takes a folder's weights is the one that the folder states.

    Args:
        folder: of a checkpoint; one without a contract states nothing.
        spec, config, device, dtype: of the model, as for `contract_for`.
        cast: other bits were asked for: only the semantic section counts.

    Raises:
        ContractError: naming what differs, the first values in full, and the remedy.
    """
    stored = read_stored(folder)
    if stored is None:
        return
    if cast or not stored.numerical_policy:
        own = Contract(semantic_of(spec, config), {}, {})
        stored = Contract(stored.semantic, {}, {})
    else:
        own = contract_for(spec, config, device, dtype=dtype)
    _require(folder, stored, own)


def carried(folder: Path | str, spec: ArchSpec, config: Any, *, exact: bool) -> Contract:
    """What a copy of a folder's weights states.

    Args:
        folder: of the source.
        spec, config: of the copy.
        exact: whether it has the bits of the source; rounded ones were never run.

    Raises:
        ContractError: the source states another model than its config does.
    """
    own = Contract(semantic_of(spec, config), {}, {})
    stored = read_stored(folder)
    if stored is None:
        return own
    _require(folder, Contract(stored.semantic, {}, {}), own)
    return stored if exact else own


def _require(folder: Path | str, stored: Contract, own: Contract) -> None:
    found = [d for d in differences(stored, own) if d.section != "deployment"]
    if not found:
        return
    sections = list(dict.fromkeys(d.section for d in found))
    shown = "; ".join(str(d) for d in found[:_SHOWN])
    more = f"; and {len(found) - _SHOWN} more" if len(found) > _SHOWN else ""
    raise ContractError(
        f"{folder} was written under another contract, which differs in {', '.join(sections)} "
        f"(written against here): {shown}{more}. {_REMEDY[sections[0]]}"
    )
