"""Launches without Triton's search, at each call, for the form of a kernel that fits its arguments.

The search costs more than the launch: a step that runs eagerly, as training and prefill do, has
some ten launches a layer.
"""

from collections.abc import Hashable
from typing import Any

import torch
from triton.runtime import JITFunction


class Launcher:
    """One kernel with one set of constants.

    Args:
        kernel: what `triton.jit` made.
        constants: its constexpr arguments, which follow all others, in their order.
        options: num_warps and the like.
    """

    def __init__(self, kernel: Any, constants: dict[str, Any], **options: Any) -> None:
        self.kernel, self.constants, self.options = kernel, constants, options
        self._values = tuple(constants.values())
        self._compiled: dict[Hashable, Any] = {}

    def __call__(self, grid: tuple[int, int, int], *arguments: Any, key: Hashable = None) -> None:
        """Launch.

        Args:
            grid: programs along each axis.
            arguments: of the kernel, less the constants.
            key: whatever Triton would compile another form for: dtypes, alignment of pointers to
                16 bytes, divisibility of specialised integers, arguments that are None.
        """
        if not isinstance(self.kernel, JITFunction):  # the interpreter's
            self.kernel[grid](*arguments, **self.constants)
            return
        at = torch.cuda.current_device(), key
        compiled = self._compiled.get(at)
        if compiled is None:
            made = self.kernel[grid](*arguments, **self.constants, **self.options)
            # Triton 3.7 gives a promise of it where it compiles in the background.
            self._compiled[at] = made.result() if hasattr(made, "result") else made
        else:
            compiled[grid](*arguments, *self._values)
