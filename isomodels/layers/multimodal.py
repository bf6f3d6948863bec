"""Text-only use of multimodal checkpoints: their config, and tensors that are only carried."""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import torch
from pydantic import BaseModel, ConfigDict, Field, model_validator

from isomodels.config import WITHOUT_ARITHMETIC
from isomodels.layers.carried import CarriedTensors
from isomodels.layers.hybrid_config import HybridConfig
from isomodels.layers.hybrid_decoder import HybridForCausalLM
from isomodels.layers.parallel import ALONE, Layout
from isomodels.layers.weights import carried_rules
from isomodels.weights_conv.rules import Either, ForeignTable, Rule, Source, Tied

# Tokens that stand for images in a text; a checkpoint's tokenizer knows them too.
_TOKENS = ("image_token_id", "video_token_id", "vision_start_token_id", "vision_end_token_id")
_DTYPES = ("dtype", "torch_dtype")


class VisionConfig(BaseModel):
    """The sizes of a vision tower; what else its config says reaches no text."""

    model_config = ConfigDict(extra="ignore", frozen=True, strict=True)

    depth: int = Field(ge=0)
    hidden_size: int = Field(gt=0)
    intermediate_size: int = Field(gt=0)
    in_channels: int = Field(gt=0)
    patch_size: int = Field(gt=0)
    temporal_patch_size: int = Field(gt=0)
    spatial_merge_size: int = Field(gt=0)
    out_hidden_size: int = Field(gt=0)
    num_position_embeddings: int = Field(gt=0)


class MultimodalConfig(HybridConfig):
    """The text model of a config whose `text_config` lies beside a `vision_config`."""

    vision_config: VisionConfig

    @model_validator(mode="before")
    @classmethod
    def _text(cls, raw: Any) -> Any:
        fields = {key: value for key, value in dict(raw).items() if key not in _TOKENS}
        text = fields.pop("text_config", None)
        if not isinstance(text, dict):
            raise ValueError("text_config is missing")
        own_type, kind = text.get("model_type"), f"{fields.get('model_type')}_text"
        if own_type not in (None, kind):
            raise ValueError(f"model_type of text_config is {own_type!r} instead of {kind!r}")
        text = {k: v for k, v in text.items() if k not in ("architectures", "model_type")}
        # transformers would take the text's without a word
        for key in (fields.keys() & {*text, "tie_word_embeddings", *_DTYPES}) - WITHOUT_ARITHMETIC:
            if text.setdefault(key, fields[key]) != fields[key]:
                raise ValueError(f"{key} and that of text_config differ")
        return {**fields, **text}


class MultimodalForCausalLM(HybridForCausalLM):
    """The text model; with `carry_mtp`, the vision tower's tensors are kept for saves too."""

    def __init__(
        self,
        config: MultimodalConfig,
        *,
        dtype: torch.dtype,
        device: torch.device | None = None,
        carry_mtp: bool = False,
        layout: Layout = ALONE,
    ):
        super().__init__(config, dtype=dtype, device=device, carry_mtp=carry_mtp, layout=layout)
        if carry_mtp and layout.stage.embeds:
            self.visual = CarriedTensors(vision_sources(config.vision_config), dtype, device)


def vision_sources(config: VisionConfig) -> dict[str, Source]:
    """HF tensors below `model.visual.`, as in transformers' `modeling_qwen3_5.py`."""
    width, inner = config.hidden_size, config.intermediate_size
    merged = width * config.spatial_merge_size**2
    patch = (config.in_channels, config.temporal_patch_size, *[config.patch_size] * 2)
    shapes: dict[str, tuple[int, ...]] = {
        "patch_embed.proj.weight": (width, *patch),
        "patch_embed.proj.bias": (width,),
        "pos_embed.weight": (config.num_position_embeddings, width),
    }
    for index in range(config.depth):
        block = f"blocks.{index}"
        shapes |= _affine(f"{block}.norm1", width) | _affine(f"{block}.norm2", width)
        shapes |= _affine(f"{block}.attn.qkv", 3 * width, width)
        shapes |= _affine(f"{block}.attn.proj", width, width)
        shapes |= _affine(f"{block}.mlp.linear_fc1", inner, width)
        shapes |= _affine(f"{block}.mlp.linear_fc2", width, inner)
    shapes |= _affine("merger.norm", width) | _affine("merger.linear_fc1", merged, merged)
    shapes |= _affine("merger.linear_fc2", config.out_hidden_size, merged)
    return {name: Source(name, shape) for name, shape in shapes.items()}


def _affine(name: str, *shape: int) -> dict[str, tuple[int, ...]]:
    return {f"{name}.weight": shape, f"{name}.bias": shape[:1]}


def multimodal_rules(rules: tuple[Rule, ...], vision: VisionConfig) -> tuple[Rule, ...]:
    """The table of a text model, for files that hold it as `model.language_model`."""
    carried = carried_rules("visual", vision_sources(vision), "model.visual")
    return tuple(map(_renamed, rules)) + carried


def multimodal_megatron_table(table: ForeignTable) -> ForeignTable:
    """Megatron's table of a text model, for models that hold it as `language_model`."""
    rules = tuple(
        replace(_renamed(rule), name=f"language_model.{rule.name}") for rule in table.rules
    )
    return ForeignTable(rules, table.aliases)


def _name(hf_name: str) -> str:
    inside = hf_name.startswith("model.")
    return hf_name.replace("model.", "model.language_model.", 1) if inside else hf_name


def _renamed(rule: Any) -> Any:
    if isinstance(rule, Either):
        return Either(_renamed(rule.apart), _renamed(rule.fused))
    if isinstance(rule, Tied):
        return replace(rule, to=_name(rule.to))
    if hasattr(rule, "hf_name"):
        return replace(rule, hf_name=_name(rule.hf_name or rule.name))
    if hasattr(rule, "parts"):
        return replace(rule, parts=tuple(replace(p, name=_name(p.name)) for p in rule.parts))
    slices = tuple(tuple(replace(p, name=_name(p.name)) for p in parts) for parts in rule.slices)
    return replace(rule, slices=slices)


def multimodal_tiny(architecture: str, text: Mapping[str, Any]) -> dict[str, Any]:
    """Content of a small config.json around that of a text model."""
    model_type = text["model_type"].removesuffix("_text")
    return {
        "architectures": [architecture],
        "model_type": model_type,
        "text_config": {k: v for k, v in text.items() if k != "architectures"},
        "tie_word_embeddings": text["tie_word_embeddings"],
        **{name: number for number, name in enumerate(_TOKENS, 1)},
        "vision_config": {
            "model_type": model_type,
            "depth": 1,
            "hidden_size": 32,
            "hidden_act": "gelu_pytorch_tanh",
            "intermediate_size": 64,
            "num_heads": 2,
            "in_channels": 3,
            "patch_size": 4,
            "temporal_patch_size": 2,
            "spatial_merge_size": 2,
            "out_hidden_size": text["hidden_size"],
            "num_position_embeddings": 16,
        },
    }
