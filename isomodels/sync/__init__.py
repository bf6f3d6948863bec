"""Weights from a trainer into running engines: all or nothing, in place, checked by digests."""

from isomodels.sync.cuda_ipc import CudaIpc
from isomodels.sync.digest import digest
from isomodels.sync.network import Network
from isomodels.sync.sender import Sent, WeightSender
from isomodels.sync.shared import SharedMemory

__all__ = ["CudaIpc", "Network", "Sent", "SharedMemory", "WeightSender", "digest"]
