"""Pages of an engine, from the battery that ships."""

from isomodels.validate.pages import Pages, permuted_empty

__all__ = ["Pages", "permuted_empty"]
