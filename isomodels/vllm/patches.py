"""Every change to vLLM itself, each with its reason. Checked on vLLM 0.30.0, 0.31.0 and 0.32.0.

* `_ModelRegistry.inspect_model_cls` and `resolve_model_cls`: vLLM runs its own class for any
  `model_impl` it does not know. It has no hook between this option and the class.
* `EngineCore.collective_rpc`: weights change under a live engine through this call alone, whatever
  the door (`LLM`, HTTP). vLLM keeps the prefix cache and running requests of the old weights;
  a token's history would then be of two models. And an unsound folder is refused here, where
  nothing has changed yet. A sync's weights and their version change in this one call, so that no
  step has the one without the other. A worker's refusal is its answer, not an exception: vLLM
  would read the first and leave the others' answers for the next call. A handshake or a start ends
  an update that a trainer left open. The same call, with a method of ours, tells the workers'
  contracts: vLLM has no hook for questions to a model.
* `Executor.sleep`: see `isomodels/vllm/sleeping.py`.

All act only for `model_impl == "isomodels"`; a value that is nearly that is refused. On a vLLM
that was not checked, only the first is installed, and it refuses.
"""

import functools
import pickle
import sys
from collections.abc import Mapping, Sequence
from difflib import get_close_matches
from pathlib import Path
from typing import Any

from isomodels.errors import CheckpointError, HostError, UnsupportedError
from isomodels.vllm import sleeping
from isomodels.vllm.plugin import MODEL_IMPL
from isomodels.vllm.questions import question
from isomodels.vllm.versions import CHECKED_VERSIONS, check_vllm, vllm_version

# An own name for the resolved architecture: vLLM's hooks are keyed by it, so that ours run and
# those of vLLM's own class of the same architecture do not.
RESOLVED_PREFIX = "IsoModels"

# Worker methods that change weights, and those of a sync (isomodels/vllm/weight_transfer.py).
_WEIGHT_CHANGES = {"reload_weights", "update_weights"}
_RELOAD = {"weights_iterator": None, "weights_path": None, "is_checkpoint_format": True}
_SYNC = {
    "init_weight_transfer_engine",
    "start_weight_update",
    "update_weights",
    "finish_weight_update",
}

_MARK = "_isomodels_patched"


def install() -> None:
    """Installs the patches once in this process."""
    from vllm.model_executor.models.registry import _ModelRegistry

    if not hasattr(_ModelRegistry, _MARK):
        setattr(_ModelRegistry, _MARK, True)
        for name in ("inspect_model_cls", "resolve_model_cls"):
            _patch_registry(_ModelRegistry, name)
    # The engine core's own process has loaded this module before it loads plug-ins. Elsewhere the
    # import is dear and only made once the option is seen (see `_resolve`).
    if "vllm.v1.engine.core" in sys.modules and vllm_version() in CHECKED_VERSIONS:
        _patch_engine_core()


def _patch_registry(registry: Any, name: str) -> None:
    original = getattr(registry, name)

    @functools.wraps(original)
    def wrapped(self: Any, architectures: str | list[str], model_config: Any) -> Any:
        asked = getattr(model_config, "model_impl", None)
        if asked != MODEL_IMPL:
            _refuse_misspelt(asked)
            return original(self, architectures, model_config)
        resolved = _resolve(self, architectures)
        return original(self, [resolved], model_config)

    setattr(registry, name, wrapped)


def _refuse_misspelt(model_impl: object) -> None:
    """vLLM would run its own class without a word; what else it does not know may be another's."""
    if get_close_matches(str(model_impl).lower(), [MODEL_IMPL], cutoff=0.8):
        raise UnsupportedError(f"model_impl {str(model_impl)!r} is unknown: say {MODEL_IMPL!r}")


def _resolve(registry: Any, architectures: str | list[str]) -> str:
    """HF architecture names of a checkpoint -> name under which our class is registered."""
    check_vllm()
    from vllm.model_executor.models.config import MODELS_CONFIG_MAP

    from isomodels.registry import get_spec
    from isomodels.vllm.checks import IsoModelsConfig
    from isomodels.vllm.model import IsoModelsForCausalLM
    from isomodels.vllm.recurrent import IsoModelsHybridForCausalLM

    names = [architectures] if isinstance(architectures, str) else list(architectures)
    spec = get_spec(names[0].removeprefix(RESOLVED_PREFIX) if names else "")
    resolved = RESOLVED_PREFIX + spec.architecture
    if resolved not in registry.models:
        # The class, not its name: vLLM would start a second process to import the name.
        hybrid = spec.family == "hybrid"
        model = IsoModelsHybridForCausalLM if hybrid else IsoModelsForCausalLM
        registry.register_model(resolved, model)
        MODELS_CONFIG_MAP[resolved] = IsoModelsConfig
    _patch_engine_core()
    return resolved


def _patch_engine_core() -> None:
    from vllm.v1.engine.core import EngineCore

    if hasattr(EngineCore, _MARK):
        return
    setattr(EngineCore, _MARK, True)
    sleeping.install()
    original = EngineCore.collective_rpc

    @functools.wraps(original)
    def collective_rpc(
        self: Any,
        method: Any,
        timeout: float | None = None,
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        ours = self.vllm_config.model_config.model_impl == MODEL_IMPL
        if ours and (asked := question(method)) is not None:
            return original(self, asked, timeout, args, kwargs)
        if not ours or method not in _WEIGHT_CHANGES | _SYNC:
            return original(self, method, timeout, args, kwargs)
        if method == "reload_weights":
            _check_reload(args, kwargs or {})
        try:
            if method not in _SYNC:
                return original(self, method, timeout, args, kwargs)
            answers = original(self, SyncCall(method), timeout, args, kwargs)
            for _, error in answers:
                if error is not None:
                    raise error
            if method == "update_weights":
                self.set_weight_version((kwargs or {})["update_info"]["version"])
            return [answer for answer, _ in answers]
        finally:
            if method in _WEIGHT_CHANGES:
                self.reset_prefix_cache(reset_running_requests=True)

    EngineCore.collective_rpc = collective_rpc


class SyncCall:
    """A worker's method that gives (answer, None) or (None, exception).

    Not the exception itself: vLLM would take it for its worker's failure.
    """

    def __init__(self, method: str):
        self.method = method

    def __call__(self, worker: Any, *args: Any, **kwargs: Any) -> tuple[Any, Exception | None]:
        """In one worker."""
        worker = getattr(worker, "worker", worker)  # vLLM's wrapper of it
        if self.method in ("init_weight_transfer_engine", "start_weight_update"):
            worker._weight_update_active = False
        try:
            return getattr(worker, self.method)(*args, **kwargs), None
        except Exception as error:
            worker._weight_update_active = False
            try:
                pickle.loads(pickle.dumps(error))
            except Exception:  # it could not reach another process
                return None, HostError(f"{type(error).__name__}: {error}")
            return None, error


def _check_reload(args: Sequence[Any], kwargs: Mapping[str, Any]) -> None:
    """Checks the arguments of a worker's `reload_weights`.

    Its third, `is_checkpoint_format`, would write weights over the old ones unchecked, and an
    unknown one would fail in the worker.
    """
    from isomodels.vllm.checks import check_files

    wrong = not isinstance(kwargs, Mapping) or len(args) > len(_RELOAD)
    given = {} if wrong else dict(zip(_RELOAD, args, strict=False)) | dict(kwargs)
    weights, path, checked = (given.pop(name, of) for name, of in _RELOAD.items())
    wrong = wrong or bool(given) or checked is not True or isinstance(weights, str)
    if wrong or not (path is None or isinstance(path, str | Path)):
        raise CheckpointError(
            "reload_weights takes the folder of a checkpoint as weights_path and nothing else: "
            '"kwargs": {"weights_path": PATH}'
        )
    if path is not None:  # else the weights are read again from where they came
        check_files(Path(path))
