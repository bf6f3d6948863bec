"""Builds the Megatron model of a checkpoint: the `model_provider` that Megatron's trainers take."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.transformer.transformer_config import TransformerConfig
from torch import nn

from isomodels.checkpoint import load_into, open_checkpoint
from isomodels.config import read_config
from isomodels.contract import Contract, contract_for
from isomodels.contract.operations import operators_of
from isomodels.contract.stored import require_stored
from isomodels.errors import ConfigError, UnsupportedError
from isomodels.layers.parallel import ALONE, Layout
from isomodels.megatron import check_megatron
from isomodels.megatron.checks import architecture_fields, check_transformer_config
from isomodels.megatron.layout import layout_of
from isomodels.megatron.model import IsoLanguageModel
from isomodels.registry import ArchSpec, load_object
from isomodels.validate import require_validated


def transformer_config(config: Any, **overrides: Any) -> TransformerConfig:
    """Megatron's configuration of a model.

    Args:
        config: the strict HF configuration from `isomodels.config.read_config`.
        overrides: fields of `TransformerConfig` that win over the ones from `config`.

    Raises:
        ConfigError: for a name that `TransformerConfig` does not have.
        UnsupportedError: for a value that the model cannot honour.
    """
    dtype = overrides.get("params_dtype", config.torch_dtype)
    fields = {
        **architecture_fields(config),
        "hidden_dropout": 0.0,
        "attention_dropout": 0.0,
        "params_dtype": dtype,
        "pipeline_dtype": dtype,
        "bf16": dtype == torch.bfloat16,
        # no load balancing unless it is asked for
        **({} if config.routing is None else {"moe_router_load_balancing_type": "none"}),
        "moe_router_bias_update_rate": 0.0,
        **overrides,
    }
    unknown = sorted(fields.keys() - TransformerConfig.__dataclass_fields__.keys())
    if unknown:
        raise ConfigError(f"TransformerConfig has no field {', '.join(unknown)}")
    built = TransformerConfig(**fields)
    check_transformer_config(built, config)
    return built


def rank_layout(
    config: Any,
    hf_config: Any,
    pg_collection: Any | None,
    pre_process: bool | None,
    post_process: bool | None,
    vp_stage: int | None,
) -> Layout:
    """Which part of the model this rank holds, as a trainer asks its provider.

    Args:
        config: the `TransformerConfig`.
        hf_config: the strict HF configuration of the checkpoint.
        pg_collection: Megatron's process groups; the global ones by default.
        pre_process, post_process: whether it embeds and has the head; None for what the place says.
        vp_stage: which virtual stage, or None.

    Raises:
        UnsupportedError: for ends that do not fit the rank's place, or groups of other sizes than
            the config's.
    """
    needed = ["tp", "pp", "ep", "cp"]
    groups = pg_collection or ProcessGroupCollection.use_mpu_process_groups(needed)
    layout = layout_of(config, groups, hf_config.num_hidden_layers, vp_stage)
    ends = (layout.stage.embeds, layout.stage.heads)
    for asked, has in zip((pre_process, post_process), ends, strict=True):
        if asked is not None and asked != has:
            raise UnsupportedError(
                f"pre_process={pre_process} and post_process={post_process} do not fit this rank's "
                "place among the pipeline stages: layers are divided evenly, in order"
            )
    return layout


def build_core(
    spec: ArchSpec, config: Any, dtype: torch.dtype, layout: Layout = ALONE
) -> nn.Module:
    """The isomodels module of an architecture, for training, without weights.

    Args:
        spec, config: the architecture and its config.
        dtype: of the parameters.
        layout: which part of the model this rank holds.

    Raises:
        UnsupportedError: the device, kernels that do not pass their checks on it, or a layout that
            does not divide the model.
    """
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    require_validated(
        device,
        dtype=dtype,
        head_dim=config.common_head_dim,
        operators=operators_of(spec, config, dtype, device, "packed"),
    )
    model = load_object(spec.model)
    return model(config, dtype=dtype, device=device, carry_mtp=True, layout=layout)


def model_provider(
    checkpoint: str | Path, *, load_weights: bool = True, cast: bool = False
) -> Callable[..., IsoLanguageModel]:
    """A provider for Megatron's `get_model` and for trainers that take one by path.

    Args:
        checkpoint: a Hugging Face checkpoint directory.
        load_weights: read its weights; without, they are whatever memory held.
        cast: allow a checkpoint of another dtype than `params_dtype`.

    Returns:
        `provider(pre_process=True, post_process=True, vp_stage=None, config=None,
        pg_collection=None)`; `config` defaults to `transformer_config` of the checkpoint.

        The provider raises ConfigError or UnsupportedError for a `config` that describes another
        model or asks for what is not implemented, UnsupportedError on a device where the kernels
        do not pass their checks, and CheckpointError for a `params_dtype` that the checkpoint does
        not have, without `cast`; ContractError for weights that a training wrote under another
        contract.

    Raises:
        ConfigError: for a config.json that cannot be read, or with a field that is missing,
            unknown or not implemented.
        UnsupportedError: for an architecture that isomodels does not have.
        CheckpointError: with `load_weights`, for damaged files, or tensors that do not fit the
            config.
    """
    if load_weights:
        opened = open_checkpoint(checkpoint)
        spec, hf_config = opened.spec, opened.config
        del opened  # the provider lives long: keep no file open
    else:
        spec, hf_config = read_config(checkpoint)

    def provider(
        pre_process: bool = True,
        post_process: bool = True,
        vp_stage: int | None = None,
        config: Any | None = None,
        pg_collection: Any | None = None,
    ) -> IsoLanguageModel:
        if config is None:
            config = transformer_config(hf_config)
        else:
            check_transformer_config(config, hf_config)
        layout = rank_layout(config, hf_config, pg_collection, pre_process, post_process, vp_stage)
        core = build_core(spec, hf_config, config.params_dtype, layout)
        if load_weights:
            dtype, device = config.params_dtype, next(core.parameters()).device
            require_stored(checkpoint, spec, hf_config, device, dtype=dtype, cast=cast)
            load_into(core, checkpoint, cast=cast)
        return IsoLanguageModel(config, core, pg_collection, vp_stage=vp_stage)

    return provider


def trainer_contract(checkpoint: str | Path, model: IsoLanguageModel) -> Contract:
    """What decides the bits of a trainer.

    Args:
        checkpoint: the folder whose model it trains.
        model: a part of it, without Megatron's wrappers.
    """
    spec, hf_config = read_config(checkpoint)
    config, device = model.config, next(model.core.parameters()).device
    host = {
        "name": "megatron-core",
        "version": check_megatron(),
        "tensor_parallel": config.tensor_model_parallel_size,
        "expert_parallel": config.expert_model_parallel_size,
    }
    return contract_for(spec, hf_config, device, dtype=config.params_dtype, host=host)
