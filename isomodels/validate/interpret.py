"""The Triton kernels on a CPU, in Triton's interpreter.

Triton reads TRITON_INTERPRET when it is first imported, so this needs a process of its own.
"""

import os

from isomodels.errors import UnsupportedError
from isomodels.validate.battery import operators


def use_interpreter() -> None:
    """Make every operator of this process run its Triton kernel for tensors on the CPU.

    Raises:
        UnsupportedError: Triton is missing, or was imported to compile.
    """
    if os.environ.get("TRITON_INTERPRET") != "1":
        raise UnsupportedError("the interpreter needs TRITON_INTERPRET=1 when Triton is imported")
    try:
        import triton.language  # noqa: F401
    except ImportError:
        raise UnsupportedError("Triton is not installed: pip install triton") from None
    for operator in operators().values():
        if "cuda" in operator._backend_fns:
            operator.register_kernel("cpu")(operator._backend_fns["cuda"])
