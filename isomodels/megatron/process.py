"""Starts and stops Megatron's process groups in this process."""

import gc
import os
from functools import cache
from itertools import count

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from torch._C._distributed_c10d import HashStore, PrefixStore, Store
from torch.distributed.rendezvous import rendezvous

from isomodels.errors import HostError

_starts = count()


def start_process() -> None:
    """Initialises torch.distributed and Megatron for data parallelism.

    Ranks come from the environment of `torch.distributed.run`, or it is one process alone. Without
    a GPU, CUDA devices are redirected to the CPU.

    Raises:
        HostError: if this process already runs either.
    """
    if parallel_state.model_parallel_is_initialized() or dist.is_initialized():
        raise HostError("this process already runs Megatron; close the other Trainer first")
    # Megatron's objects refer to one another: one that was closed keeps its groups and their
    # threads until they are collected.
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.set_device(int(os.environ.get("LOCAL_RANK", "0")))
        backend = "nccl"
    else:
        from isomodels.megatron import cpu_redirect

        cpu_redirect.install()
        backend = "gloo"
    store, rank, ranks = _rendezvous()
    # a prefix of its own: a second start would read the addresses that the first one left
    own = PrefixStore(f"isomodels/{next(_starts)}", store)
    dist.init_process_group(backend, store=own, rank=rank, world_size=ranks)
    parallel_state.initialize_model_parallel()


@cache
def _rendezvous() -> tuple[Store, int, int]:
    """(store, rank, number of ranks)."""
    if "RANK" not in os.environ:
        return HashStore(), 0, 1
    return next(rendezvous("env://"))


def stop_process() -> None:
    """Undoes `start_process`."""
    parallel_state.destroy_model_parallel()
    dist.destroy_process_group()
    if not torch.cuda.is_available():
        from isomodels.megatron import cpu_redirect

        cpu_redirect.uninstall()
