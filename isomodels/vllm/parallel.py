"""Tensor and expert parallelism in vLLM: its processes and groups, our exchanges over them."""

from typing import Any

from vllm.config import VllmConfig

from isomodels.layers.parallel import ExpertParallel, Layout, TensorParallel


def layout_of(vllm_config: VllmConfig) -> Layout:
    """What this worker holds.

    vLLM's own collectives, of which some add, are not on the path of a forward: the group that its
    launcher made is all that is taken.
    """
    parallel = vllm_config.parallel_config
    if parallel.tensor_parallel_size == 1:
        return Layout()
    from vllm.distributed import get_tp_group

    coordinator = get_tp_group()
    ranks = (coordinator.rank_in_group, coordinator.world_size, coordinator.device_group)
    # Without expert parallelism each rank has all experts, whole, and computes all tokens.
    experts = ExpertParallel(replicated=True)
    if parallel.enable_expert_parallel and _has_experts(vllm_config):
        experts = ExpertParallel(*ranks, replicated=True)
    return Layout(TensorParallel(*ranks), experts)


def _has_experts(vllm_config: Any) -> bool:
    from isomodels.vllm.checks import read_checkpoint_config

    return read_checkpoint_config(vllm_config.model_config)[1].routing is not None
