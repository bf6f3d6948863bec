"""Where two runs of one core part: a hash of every submodule's output at one token.

Both hosts trace the same core, so their names agree and the first name whose hash differs is the
operation at fault.
"""

import hashlib
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn


@contextmanager
def trace_rows(core: nn.Module, row: int) -> Iterator[dict[str, str]]:
    """Records each submodule's output row while the context is open.

    Args:
        core: names are relative to it; a submodule that is called again adds "#2", "#3", ...
        row: index on the token axis, the first axis of every output.

    Yields:
        {submodule name: hash}, filled in the order in which the submodules finish.
    """
    hashes: dict[str, str] = {}

    def keep(name: str, output: Any) -> None:
        calls = 1
        key = name
        while key in hashes:
            calls += 1
            key = f"{name}#{calls}"
        hashes[key] = hash_row(output, row)

    handles = [
        module.register_forward_hook(lambda _, __, output, name=name: keep(name, output))
        for name, module in core.named_modules()
        if name
    ]
    try:
        yield hashes
    finally:
        for handle in handles:
            handle.remove()


def hash_row(output: Tensor | tuple[Tensor, ...], row: int) -> str:
    """SHA-256 over the bytes of one row, of each tensor in turn where there are several."""
    digest = hashlib.sha256()
    for tensor in (output,) if isinstance(output, Tensor) else output:
        chosen = tensor[row].detach().cpu().contiguous()
        digest.update(chosen.view(-1).view(torch.uint8).numpy().tobytes())
    return digest.hexdigest()
