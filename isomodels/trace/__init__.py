"""Where two sides part: digests of every operation for chosen tokens.

The names below are loaded on first use: `Choice` needs no torch.
"""

import importlib
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from isomodels.trace.choice import Choice
    from isomodels.trace.comparison import Comparison, compare
    from isomodels.trace.context import record
    from isomodels.trace.modules import hash_row, trace_rows
    from isomodels.trace.recording import Recording

_HOMES = {  # no module may have the name of one of these: its import would hide it
    "Choice": "isomodels.trace.choice",
    "Comparison": "isomodels.trace.comparison",
    "Recording": "isomodels.trace.recording",
    "compare": "isomodels.trace.comparison",
    "hash_row": "isomodels.trace.modules",
    "record": "isomodels.trace.context",
    "trace_rows": "isomodels.trace.modules",
}

__all__ = [
    "Choice",
    "Comparison",
    "Recording",
    "compare",
    "hash_row",
    "record",
    "trace_rows",
]


def __getattr__(name: str) -> object:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(_HOMES[name]), name)
