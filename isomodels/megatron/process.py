"""Starts and stops Megatron's process groups in this process."""

import os

import torch
import torch.distributed as dist
from megatron.core import parallel_state

from isomodels.errors import HostError


def start_process() -> None:
    """Initialises torch.distributed and Megatron for data parallelism.

    Ranks come from the environment of `torch.distributed.run`, or it is one process alone. Without
    a GPU, CUDA devices are redirected to the CPU.

    Raises:
        HostError: if this process already runs either.
    """
    if parallel_state.model_parallel_is_initialized() or dist.is_initialized():
        raise HostError("this process already runs Megatron; close the other Trainer first")
    if torch.cuda.is_available():
        torch.cuda.set_device(int(os.environ.get("LOCAL_RANK", "0")))
        backend = "nccl"
    else:
        from isomodels.megatron import cpu_redirect

        cpu_redirect.install()
        backend = "gloo"
    if "RANK" in os.environ:
        dist.init_process_group(backend)
    else:
        alone = torch._C._distributed_c10d.HashStore()
        dist.init_process_group(backend, store=alone, rank=0, world_size=1)
    parallel_state.initialize_model_parallel()


def stop_process() -> None:
    """Undoes `start_process`."""
    parallel_state.destroy_model_parallel()
    dist.destroy_process_group()
    if not torch.cuda.is_available():
        from isomodels.megatron import cpu_redirect

        cpu_redirect.uninstall()
