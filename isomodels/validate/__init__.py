"""The battery that proves each kernel on the user's own device.

`isomodels validate` runs all of it and keeps the report in the user's cache; a host calls
`require_validated` before it builds a model.
"""

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from isomodels.validate.report import Report
    from isomodels.validate.start import require_validated, validate

__all__ = ["Report", "require_validated", "validate"]


def __getattr__(name: str) -> Any:
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from isomodels.validate import report, start

    return report.Report if name == "Report" else getattr(start, name)
