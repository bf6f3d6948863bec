"""isomodels through Megatron-Bridge, the way in that SkyRL, verl and NeMo-RL take.

    bridge = iso_bridge("path/to/checkpoint")              # an ordinary AutoBridge
    provider = bridge.to_megatron_provider()
    provider.finalize()
    models = provider.provide_distributed_model(ddp_config=..., bf16=True)
    for name, tensor in bridge.export_hf_weights(models): ...

Importing this file registers each architecture under a name of its own ("IsoQwen3ForCausalLM"), so
that Megatron-Bridge's own Qwen3 stays what it is. Checkpoints whose config transformers cannot
read by itself (MiMo) do not come this way: use `isomodels.megatron.model_provider`.

Checked on Megatron-Bridge 0.6.2 with megatron-core 0.19.2, in one process and in parallel layouts.
"""

import importlib.metadata
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from megatron.bridge import AutoBridge
from megatron.bridge.models.conversion.mapping_registry import MegatronMappingRegistry
from megatron.bridge.models.conversion.model_bridge import MegatronModelBridge
from megatron.bridge.models.conversion.param_mapping import MegatronParamMapping
from megatron.bridge.models.model_provider import ModelProviderMixin
from megatron.bridge.models.transformer_config import TransformerConfig
from megatron.core.utils import unwrap_model
from torch import Tensor, nn
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

from isomodels.checkpoint import load_into, open_checkpoint, save_checkpoint
from isomodels.config import read_config
from isomodels.contract.stored import require_stored
from isomodels.errors import ConfigError, HostError, UnsupportedError
from isomodels.megatron.checks import architecture_fields, check_transformer_config
from isomodels.megatron.model import IsoLanguageModel
from isomodels.megatron.provider import build_core, rank_layout, trainer_contract
from isomodels.megatron.stages import gather_model
from isomodels.registry import ArchSpec, architectures
from isomodels.weights_conv.rules import Resolved, Tied

CHECKED_VERSIONS = ("0.6.2",)
PREFIX = "Iso"  # of the architecture names under which this package is registered


@dataclass
class IsoModelProvider(TransformerConfig, ModelProviderMixin[IsoLanguageModel]):
    """Megatron-Bridge's provider: a `TransformerConfig` that builds the model.

    Attributes:
        checkpoint: the folder that it describes.
        vocab_size: the checkpoint's; never padded.
        seq_length: longest sequence that the trainer will send.
        share_embeddings_and_output_weights: the checkpoint's.
        should_pad_vocab: must stay False.
        cast: allow `params_dtype` to differ from the checkpoint's dtype.
    """

    checkpoint: str = ""
    vocab_size: int = 0
    seq_length: int = 0
    share_embeddings_and_output_weights: bool = False
    rotary_base: float = 0.0
    should_pad_vocab: bool = False
    make_vocab_size_divisible_by: int = 1
    cast: bool = False
    moe_token_dispatcher_type: str = "alltoall"  # the default refuses variable_seq_lengths
    _pg_collection: Any = None

    def finalize(self) -> None:
        """Computes derived fields, then refuses what the model cannot honour.

        Raises:
            ConfigError: where fields describe another model than the checkpoint.
            UnsupportedError: for a feature without equal bits, or not implemented.
        """
        super().finalize()
        _, hf_config = read_config(self.checkpoint)
        check_transformer_config(self, hf_config)
        if self.should_pad_vocab or self.vocab_size != hf_config.vocab_size:
            raise UnsupportedError(
                "isomodels does not pad the vocabulary: set should_pad_vocab to False and "
                f"vocab_size to {hf_config.vocab_size}"
            )
        for name, stated in (
            ("rotary_base", hf_config.rope_theta),
            ("share_embeddings_and_output_weights", hf_config.tie_word_embeddings),
        ):
            if getattr(self, name) != stated:
                raise ConfigError(f"{name} is {getattr(self, name)}, the checkpoint has {stated}")
        if self.seq_length > hf_config.max_position_embeddings:
            raise UnsupportedError(
                f"seq_length {self.seq_length} is longer than max_position_embeddings = "
                f"{hf_config.max_position_embeddings}"
            )
        if self.params_dtype != hf_config.torch_dtype and not self.cast:
            raise UnsupportedError(
                f"the checkpoint is {hf_config.dtype}, params_dtype is {self.params_dtype}: "
                "set cast to True, or convert the checkpoint first"
            )

    def provide(
        self,
        pre_process: bool | None = None,
        post_process: bool | None = None,
        vp_stage: int | None = None,
    ) -> IsoLanguageModel:
        """This rank's part of the model without weights; the bridge's hook loads them."""
        spec, hf_config = read_config(self.checkpoint)
        check_transformer_config(self, hf_config)
        ends = (pre_process, post_process, vp_stage)
        layout = rank_layout(self, hf_config, self._pg_collection, *ends)
        core = build_core(spec, hf_config, self.params_dtype, layout)
        return IsoLanguageModel(self, core, self._pg_collection, vp_stage=vp_stage)


class RuleMapping(MegatronParamMapping[Any]):
    """One conversion rule of the architecture as Megatron-Bridge wants it."""

    def __init__(self, megatron_param: str, hf_param: str | dict[str, str], rule: Resolved):
        super().__init__(megatron_param, hf_param)
        self.rule: Any = rule

    @classmethod
    def of(cls, rule: Resolved) -> "RuleMapping":
        """The mapping of a rule; parts of a fused tensor are keyed by their place."""
        names = {str(place): source.name for place, source in enumerate(rule.sources)}
        hf_param = names if len(names) > 1 else names["0"]
        return cls(f"core.{rule.name}", hf_param, rule)

    def resolve(self, captures: tuple[str, ...]) -> "RuleMapping":
        """Names hold no wildcard, so there is nothing to fill in."""
        return type(self)(self.megatron_param, self.hf_param, self.rule)

    def hf_to_megatron(self, hf_weights: Any, megatron_module: nn.Module) -> Tensor:
        """HF tensors -> module tensor."""
        parts = list(hf_weights.values()) if isinstance(hf_weights, dict) else [hf_weights]
        return self.rule.join(parts)

    def megatron_to_hf(
        self, megatron_weights: Tensor | None, megatron_module: nn.Module | None
    ) -> dict[str, Tensor]:
        """Module tensor -> HF tensors by name."""
        tensors = self.rule.split(megatron_weights)
        return {
            source.name: tensor.contiguous()
            for source, tensor in zip(self.rule.sources, tensors, strict=True)
        }


class IsoBridge(MegatronModelBridge):
    """Builds providers and moves weights, from the strict config and rules of isomodels."""

    MODEL_CONFIG_CLASS = None  # a provider, not a ModelConfig with a builder
    # AutoBridge's own save would write the registered name into config.json; see IsoAutoBridge
    SUPPORTS_HF_PRETRAINED_EXPORT = False

    def provider_bridge(self, hf_pretrained: Any) -> IsoModelProvider:
        """The provider of a checkpoint."""
        path = _folder(hf_pretrained)
        _, config = read_config(path)
        return IsoModelProvider(
            **architecture_fields(config),
            hidden_dropout=0.0,
            attention_dropout=0.0,
            params_dtype=config.torch_dtype,
            pipeline_dtype=config.torch_dtype,
            bf16=config.torch_dtype == torch.bfloat16,
            checkpoint=str(path),
            vocab_size=config.vocab_size,
            seq_length=config.max_position_embeddings,
            share_embeddings_and_output_weights=config.tie_word_embeddings,
            rotary_base=config.rope_theta,
        )

    def mapping_registry(self) -> MegatronMappingRegistry:
        """The architecture's conversion rules."""
        rules = open_checkpoint(_folder(self.hf_pretrained)).rules
        return MegatronMappingRegistry(
            *(RuleMapping.of(rule) for rule in rules if not isinstance(rule, Tied))
        )

    def load_weights_hf_to_megatron(
        self,
        hf_pretrained: Any,
        megatron_model: Any,
        allowed_mismatched_params: list[str] | None = None,
    ) -> list[Any]:
        """Loads strictly: Megatron-Bridge's own loader only warns of a tensor without a place.

        Raises:
            CheckpointError: a missing, left-over, misshapen or mistyped tensor.
            ContractError: weights that a training wrote under a contract of other bits.
        """
        if allowed_mismatched_params:
            raise UnsupportedError("isomodels loads every parameter; none may be mismatched")
        models = megatron_model if isinstance(megatron_model, list) else [megatron_model]
        path = _folder(hf_pretrained)
        spec, hf_config = read_config(path)
        for model in unwrap_model(models):
            config, device = model.config, next(model.core.parameters()).device
            dtype, cast = config.params_dtype, config.cast
            require_stored(path, spec, hf_config, device, dtype=dtype, cast=cast)
            load_into(model.core, path, cast=cast)
        return models


def _folder(hf_pretrained: Any) -> Path:
    name = getattr(hf_pretrained, "model_name_or_path", None)
    if not name or not Path(name).is_dir():
        raise ConfigError(
            f"isomodels reads a checkpoint folder, and {name!r} is none: download it first"
        )
    return Path(name)


def _register(spec: ArchSpec) -> None:
    register = MegatronModelBridge.register_bridge(
        source=PREFIX + spec.architecture,
        target=IsoLanguageModel,
        provider=IsoModelProvider,
        model_type=spec.model_type,
    )
    # registering writes names on the class, so each architecture needs its own
    register(type(f"{PREFIX}{spec.architecture}Bridge", (IsoBridge,), {}))


def _check_version() -> None:
    version = importlib.metadata.version("megatron-bridge")
    if version not in CHECKED_VERSIONS:
        raise HostError(
            f"megatron-bridge {version} was not checked with isomodels; "
            f"install one of: {', '.join(CHECKED_VERSIONS)}"
        )


class IsoAutoBridge(AutoBridge[IsoLanguageModel]):
    """An `AutoBridge` that writes checkpoints under the architecture's real name."""

    def save_hf_pretrained(self, model: Any, path: str | Path, **_: Any) -> None:
        """Writes a Hugging Face checkpoint with `isomodels.checkpoint.save_checkpoint`.

        All ranks call it; the first puts the model together, writes it, and states the contract.

        Args:
            model: what `provide_distributed_model` returned.
            path: folder to write.
        """
        models = unwrap_model(model if isinstance(model, list) else [model])
        whole, folder = gather_model(models), _folder(self.hf_pretrained)
        if whole is not None:
            contract = trainer_contract(folder, models[0]).to_json()
            save_checkpoint(whole, path, like=folder, contract=contract)
        dist.barrier()

    def export_hf_weights(self, model: Any, *args: Any, **kwargs: Any) -> Any:
        """As `AutoBridge.export_hf_weights`, of a model that one rank holds.

        Raises:
            UnsupportedError: for a model that several ranks share.
        """
        models = model if isinstance(model, list) else [model]
        if not all(inner.layout.whole for inner in unwrap_model(models)):
            raise UnsupportedError(
                "export_hf_weights streams a model that one rank holds: send one in parts "
                "with isomodels.sync, or write it with save_hf_pretrained"
            )
        return super().export_hf_weights(model, *args, **kwargs)


def iso_bridge(checkpoint: str | Path, **kwargs: Any) -> IsoAutoBridge:
    """An `AutoBridge` whose models are those of isomodels.

    Args:
        checkpoint: a Hugging Face checkpoint directory.
        kwargs: passed to `AutoBridge.from_hf_pretrained`.

    Raises:
        ConfigError: for a configuration that cannot be read.
        UnsupportedError: for an architecture that Megatron-Bridge cannot be asked for.
    """
    spec, _ = read_config(checkpoint)
    if spec.model_type not in CONFIG_MAPPING:
        raise UnsupportedError(
            f"transformers cannot read the config of {spec.architecture}, so Megatron-Bridge "
            "cannot either: use isomodels.megatron.model_provider"
        )
    return IsoAutoBridge.from_hf_pretrained(
        checkpoint, architectures=[PREFIX + spec.architecture], **kwargs
    )


_check_version()
for _spec in architectures().values():
    if _spec.model_type in CONFIG_MAPPING:
        _register(_spec)
