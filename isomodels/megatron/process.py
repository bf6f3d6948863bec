"""Starts and stops Megatron's process groups in this process."""

import gc
import os
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta
from functools import cache
from itertools import count

import torch
import torch.distributed as dist
import torch.distributed.distributed_c10d as distributed_c10d
from megatron.core import parallel_state
from torch._C._distributed_c10d import HashStore, PrefixStore, Store
from torch.distributed.rendezvous import rendezvous

from isomodels.errors import HostError, LostRankError, UnsupportedError
from isomodels.megatron.degrees import Degrees

_starts = count()
# Of gloo's errors, which are plain RuntimeErrors.
_OF_GLOO = ("third_party/gloo", "pair closure", "Connection closed by peer")


def start_process(degrees: Degrees = Degrees(), timeout_s: float = 600.0) -> None:
    """Initialises torch.distributed and Megatron.

    Ranks come from the environment of `torch.distributed.run`, or it is one process alone. Without
    a GPU, CUDA devices are redirected to the CPU.

    Args:
        degrees: how the ranks share the model; what is left of them is data parallelism.
        timeout_s: after which a collective that a rank does not enter fails.

    Raises:
        HostError: if this process already runs either.
        UnsupportedError: where the number of ranks does not fit the degrees.
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
    if ranks % (degrees.tp * degrees.pp):
        raise UnsupportedError(
            f"the layout {degrees} needs a multiple of {degrees.tp * degrees.pp} processes, there "
            f"are {ranks}: start them with torch.distributed.run"
        )
    # a prefix of its own: a second start would read the addresses that the first one left
    own = PrefixStore(f"isomodels/{next(_starts)}", store)
    timeout = timedelta(seconds=timeout_s)
    dist.init_process_group(backend, store=own, rank=rank, world_size=ranks, timeout=timeout)
    parallel_state.initialize_model_parallel(
        tensor_model_parallel_size=degrees.tp,
        pipeline_model_parallel_size=degrees.pp,
        virtual_pipeline_model_parallel_size=degrees.vpp if degrees.vpp > 1 else None,
        expert_model_parallel_size=degrees.ep,
        expert_tensor_parallel_size=1,  # experts are never cut
        distributed_timeout_minutes=timeout_s / 60,
    )


@contextmanager
def exchanging(doing: str) -> Iterator[None]:
    """Say in one sentence that an exchange failed because of another rank.

    Args:
        doing: what this rank was doing.

    Raises:
        LostRankError: in place of the backend's error.
    """
    rank, ranks = dist.get_rank(), dist.get_world_size()
    try:
        yield
    except RuntimeError as error:
        gloo = any(words in str(error) for words in _OF_GLOO)
        if not (gloo or isinstance(error, dist.DistError)):
            raise
        raise LostRankError(
            f"rank {rank} of {ranks}, in {doing}: another rank ended, or did not answer within "
            "the trainer's timeout_s: see the logs of the others; what was saved before is whole"
        ) from error


@cache
def _rendezvous() -> tuple[Store, int, int]:
    """(store, rank, number of ranks)."""
    if "RANK" not in os.environ:
        return HashStore(), 0, 1
    return next(rendezvous("env://"))


def stop_process(*, failed: bool = False) -> None:
    """Undoes `start_process`.

    Args:
        failed: this rank leaves in the middle of its work. The others may be waiting for it in an
            exchange, and NCCL, unless it is told to abort, would wait for them in turn: what went
            wrong would never be heard.
    """
    parallel_state.destroy_model_parallel()
    if failed and dist.get_backend() == "nccl":
        distributed_c10d._abort_process_group()
    else:
        dist.destroy_process_group()
    if not torch.cuda.is_available():
        from isomodels.megatron import cpu_redirect

        cpu_redirect.uninstall()
