"""Where two sides part: digests of every operation for chosen tokens."""

from isomodels.trace.collect import Choice
from isomodels.trace.compare import Comparison, compare
from isomodels.trace.modules import hash_row, trace_rows
from isomodels.trace.record import record
from isomodels.trace.recording import Recording

__all__ = [
    "Choice",
    "Comparison",
    "Recording",
    "compare",
    "hash_row",
    "record",
    "trace_rows",
]
