"""Which architectures exist: HF architecture name -> where its config, model and rules are.

Found by folder: every package below `dense`, `moe` and `hybrid` states a `SPEC`, or a tuple of them
where one module comes in several kinds of checkpoints. Only strings live here, so that hosts may
ask without importing torch.
"""

import importlib
import pkgutil
from dataclasses import dataclass
from functools import cache
from typing import Any

from isomodels.errors import ConfigError, UnsupportedError

FAMILIES = ("dense", "moe", "hybrid")


@dataclass(frozen=True)
class ArchSpec:
    """One architecture; `config` to `tiny` are "module:name" strings for `load_object`.

    Attributes:
        architecture: HF class name, as in the `architectures` of config.json.
        family: "dense", "moe" or "hybrid".
        model_type: HF model type.
        config: strict config class.
        model: the PyTorch module.
        weights: function config -> conversion rules.
        tiny: content of a small config.json, for random checkpoints.
        transformers: the transformers class that computes the same function, as a reference.
    """

    architecture: str
    family: str
    model_type: str
    config: str
    model: str
    weights: str
    tiny: str
    transformers: str


@cache
def architectures() -> dict[str, ArchSpec]:
    """All supported architectures by HF class name.

    Raises:
        ConfigError: for a folder without a `SPEC`, or two folders of one architecture.
    """
    found: dict[str, ArchSpec] = {}
    homes: dict[str, str] = {}
    for family in FAMILIES:
        package = importlib.import_module(f"isomodels.{family}")
        for module in pkgutil.iter_modules(package.__path__):
            home = f"isomodels/{family}/{module.name}"
            stated = getattr(importlib.import_module(home.replace("/", ".")), "SPEC", None)
            specs = stated if isinstance(stated, tuple) else (stated,)
            if not all(isinstance(spec, ArchSpec) for spec in specs):
                raise ConfigError(
                    f"{home} states no architecture: give its __init__.py a SPEC = ArchSpec(...), "
                    "or move it elsewhere"
                )
            for spec in specs:
                if spec.architecture in found:
                    raise ConfigError(
                        f"{homes[spec.architecture]} and {home} both state {spec.architecture}: "
                        "correct the SPEC of one, or remove its folder"
                    )
                found[spec.architecture], homes[spec.architecture] = spec, home
    return found


def get_spec(architecture: str) -> ArchSpec:
    """The spec of an HF architecture name.

    Raises:
        UnsupportedError: naming the architectures that exist.
        ConfigError: as `architectures`.
    """
    known = architectures()
    if architecture not in known:
        raise UnsupportedError(
            f"unknown architecture {architecture!r}; isomodels has {', '.join(sorted(known))}"
        )
    return known[architecture]


def find_spec(name: str) -> ArchSpec:
    """The spec of an HF architecture name or of an HF model type, each of which names one.

    Raises:
        UnsupportedError, ConfigError: as `get_spec`.
    """
    for spec in architectures().values():
        if name == spec.model_type:
            return spec
    return get_spec(name)


def load_object(reference: str) -> Any:
    """Import "module:name"."""
    module, name = reference.split(":")
    return getattr(importlib.import_module(module), name)
