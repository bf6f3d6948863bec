"""Weights from a trainer into running engines: all or nothing, in place, checked by digests."""

from isomodels.sync.digest import digest
from isomodels.sync.sender import Sent, WeightSender

__all__ = ["Sent", "WeightSender", "digest"]
