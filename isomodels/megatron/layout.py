"""Which part of a model a rank of Megatron holds: degrees of parallelism and process groups."""

from typing import Any

from torch import nn

from isomodels.errors import UnsupportedError
from isomodels.layers.parallel import (
    ExpertParallel,
    Layout,
    Stage,
    TensorParallel,
    shards,
)
from isomodels.megatron.degrees import Degrees


def check_degrees(config: Any, hf_config: Any) -> None:
    """Refuse degrees of a `TransformerConfig` that do not divide the model.

    Raises:
        UnsupportedError: naming those that do.
    """
    Degrees(
        tp=config.tensor_model_parallel_size,
        pp=config.pipeline_model_parallel_size,
        vpp=config.virtual_pipeline_model_parallel_size or 1,
        ep=config.expert_model_parallel_size,
    ).check_model(hf_config)


def layout_of(config: Any, groups: Any, num_layers: int, vp_stage: int | None) -> Layout:
    """What this rank holds.

    Args:
        config: Megatron's `TransformerConfig`.
        groups: its process groups (`pg_collection`).
        num_layers: of the whole model.
        vp_stage: which virtual stage, or None.

    Raises:
        UnsupportedError: for process groups of other sizes than the config's.
    """
    for name, size in (
        ("tp", config.tensor_model_parallel_size),
        ("pp", config.pipeline_model_parallel_size),
        ("ep", config.expert_model_parallel_size),
        ("cp", 1),
    ):
        group = getattr(groups, name)
        ranks = 1 if group is None else group.size()
        if ranks != size:
            raise UnsupportedError(
                f"the process group {name} has {ranks} ranks, TransformerConfig asks for {size}: "
                "initialise Megatron with the sizes of the config"
            )
    tensor, experts = TensorParallel(), ExpertParallel()
    if groups.tp is not None and groups.tp.size() > 1:
        ranks = (groups.tp.rank(), groups.tp.size(), groups.tp)
        tensor = TensorParallel(*ranks, sequence=config.sequence_parallel)
    if groups.ep is not None and groups.ep.size() > 1:
        experts = ExpertParallel(groups.ep.rank(), groups.ep.size(), groups.ep)
    return Layout(tensor, experts, _stage(config, groups, num_layers, vp_stage))


def _stage(config: Any, groups: Any, num_layers: int, vp_stage: int | None) -> Stage:
    stages = 1 if groups.pp is None else groups.pp.size()
    if stages == 1:
        if vp_stage is not None:
            raise UnsupportedError(f"vp_stage={vp_stage} is of pipeline stages, and there is one")
        return Stage()
    virtual = config.virtual_pipeline_model_parallel_size or 1
    chunks = stages * virtual
    # virtual stage v of stage p comes after those of v - 1 of all stages
    number = (vp_stage or 0) * stages + groups.pp.rank()
    layers = num_layers // chunks
    first = number * layers
    return Stage(first, first + layers, embeds=number == 0, heads=number == chunks - 1)


def mark_parameters(core: nn.Module, layout: Layout) -> None:
    """Tell Megatron what is cut, what is replicated, and whose gradients it must add.

    Norms of the residual stream see a rank's slice of the tokens under sequence parallelism:
    Megatron adds their gradients in one message for the whole model.
    """
    from megatron.core.tensor_parallel import set_tensor_model_parallel_attributes

    parts = shards(core)
    for name, parameter in core.named_parameters():
        # Experts have gradients of other tokens on every tensor parallel rank.
        if layout.tensor.size > 1 and ".experts." in name:
            set_tensor_model_parallel_attributes(parameter, True, 0, 1)
        elif layout.tensor.size > 1 and name in parts:
            set_tensor_model_parallel_attributes(parameter, True, parts[name].dim, 1)
        if layout.tensor.sequence and _on_slices(name):
            parameter.sequence_parallel = True  # type: ignore[attr-defined]


def _on_slices(name: str) -> bool:
    norms = ("input_layernorm.weight", "post_attention_layernorm.weight")
    return name.endswith(norms) or name == "model.norm.weight"
