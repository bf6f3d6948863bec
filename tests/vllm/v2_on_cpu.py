"""vLLM's V2 model runner on a machine without a GPU: its Triton kernels in Triton's interpreter.

Import this first in a process of its own: vLLM looks for Triton when it is imported, and takes a
CPU build of it for a sign that the V2 runner can run.
"""

import os
import types

os.environ["TRITON_INTERPRET"] = "1"
os.environ["VLLM_USE_V2_MODEL_RUNNER"] = "1"

from triton.backends import backends


class _Driver:
    """What vLLM asks a backend's driver; the interpreter launches without one."""

    @staticmethod
    def is_active() -> bool:
        return True


backends.clear()
backends["cpu"] = types.SimpleNamespace(driver=_Driver, compiler=None)
