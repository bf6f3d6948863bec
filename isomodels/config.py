"""Strict reading of config.json: what a config does not say is an error, never a default.

transformers fills absent fields silently (an absent rope theta becomes 10000). Here each
architecture states the fields it implements as a pydantic model; a field that is missing, unknown,
or set to a value whose meaning is not implemented is a `ConfigError` that names it.
"""

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, Self

import torch
from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator

from isomodels.errors import ConfigError, UnsupportedError
from isomodels.registry import ArchSpec, get_spec, load_object

# They name files, tokens or training settings: none reaches the arithmetic of a forward.
WITHOUT_ARITHMETIC = frozenset(
    {
        "_name_or_path",
        "auto_map",
        "bos_token_id",
        "eos_token_id",
        "initializer_range",
        "max_window_layers",
        "pad_token_id",
        "transformers_version",
        "use_cache",
    }
)
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}


@dataclass(frozen=True)
class Routing:
    """How a token's experts are chosen and weighed; see `isomodels.kernels.router.route`.

    Attributes:
        num_experts, top_k: experts of a layer, and how many of them a token goes to.
        scoring: "softmax" or "sigmoid".
        normalize: whether the chosen scores are divided by their sum.
        scale: factor of the weights.
        correction_bias: whether a bias, kept in fp32, is added for the choice.
        n_group, topk_group: groups of experts, and how many of them a token may go to.
    """

    num_experts: int
    top_k: int
    scoring: Literal["softmax", "sigmoid"]
    normalize: bool
    scale: float = 1.0
    correction_bias: bool = False
    n_group: int = 1
    topk_group: int = 1


class DenseConfig(BaseModel):
    """Fields that every dense decoder of the Qwen line states; sizes are counts of elements."""

    model_config = ConfigDict(extra="forbid", frozen=True, strict=True, protected_namespaces=())

    architectures: list[str]
    model_type: str
    vocab_size: int = Field(gt=0)
    hidden_size: int = Field(gt=0)
    intermediate_size: int = Field(gt=0)
    num_hidden_layers: int = Field(gt=0)
    num_attention_heads: int = Field(gt=0)
    num_key_value_heads: int = Field(gt=0)
    head_dim: int = Field(gt=0, multiple_of=2)
    rms_norm_eps: float = Field(gt=0, allow_inf_nan=False)
    rope_theta: float = Field(gt=0, allow_inf_nan=False)
    max_position_embeddings: int = Field(gt=0)
    tie_word_embeddings: bool
    dtype: Literal["float32", "bfloat16"]

    attention_bias: bool
    hidden_act: Literal["silu"]
    attention_dropout: float = Field(default=0.0, ge=0, le=0)
    use_sliding_window: Literal[False] = False
    layer_types: list[Literal["full_attention"]] | None = None

    @model_validator(mode="before")
    @classmethod
    def _normalise(cls, raw: Any) -> Any:
        fields = {k: v for k, v in dict(raw).items() if k not in WITHOUT_ARITHMETIC}
        _take_rope(fields)
        if "torch_dtype" in fields:
            fields.setdefault("dtype", fields["torch_dtype"])
            if fields["dtype"] != fields.pop("torch_dtype"):
                raise ValueError("dtype and torch_dtype differ")
        window = fields.pop("sliding_window", None)
        if window is not None and fields.get("use_sliding_window") is not False:
            raise ValueError("sliding_window is not implemented")
        if fields.get("layer_types", 0) is None:
            del fields["layer_types"]
        return fields

    @model_validator(mode="after")
    def _consistent(self) -> Self:
        if self.num_attention_heads % self.num_key_value_heads:
            raise ValueError("num_attention_heads is no multiple of num_key_value_heads")
        if self.layer_types is not None and len(self.layer_types) != self.num_hidden_layers:
            raise ValueError("layer_types has not num_hidden_layers entries")
        return self

    @property
    def torch_dtype(self) -> torch.dtype:
        """Dtype of the checkpoint's tensors."""
        return DTYPES[self.dtype]

    @property
    def common_head_dim(self) -> int | None:
        """Size of a head's queries, keys and values; None where they have no common one."""
        return self.head_dim

    @property
    def page_shape(self) -> tuple[int, int]:
        """(heads, numbers of each) that a token leaves in an engine's pages of a layer: K and V."""
        return self.num_key_value_heads, 2 * self.head_dim

    @property
    def routing(self) -> Routing | None:
        """How tokens go to experts; None where there are none."""
        return None

    def is_sparse(self, layer_index: int) -> bool:
        """Whether a layer's feed-forward has experts."""
        return False


class MoEConfig(DenseConfig):
    """Fields that every decoder of the Qwen line with experts states beside the dense ones."""

    num_experts: int = Field(gt=0)
    num_experts_per_tok: int = Field(gt=0)
    moe_intermediate_size: int = Field(gt=0)
    # Settings of a training, which the trainer states anew; they reach no forward.
    router_aux_loss_coef: float = Field(default=0.0, ge=0)
    output_router_logits: bool = False
    # Not stated but told by transformers_version; of a file, not of the model it holds.
    fused_layout_known: bool = Field(default=False, exclude=True)

    @model_validator(mode="before")
    @classmethod
    def _experts(cls, raw: Any) -> Any:
        fields = dict(raw)
        version = str(fields.get("transformers_version") or "0").split(".")[0]
        fields["fused_layout_known"] = version.isdecimal() and int(version) >= 5
        # transformers 5 saves what it read as num_experts under another name.
        renamed = fields.pop("num_local_experts", None)
        if renamed is not None and fields.setdefault("num_experts", renamed) != renamed:
            raise ValueError("num_experts and num_local_experts differ")
        return fields

    @model_validator(mode="after")
    def _enough_experts(self) -> Self:
        if self.num_experts_per_tok > self.num_experts:
            raise ValueError(
                f"num_experts_per_tok {self.num_experts_per_tok} exceeds num_experts "
                f"{self.num_experts}"
            )
        return self

    @property
    def shared_experts_size(self) -> int | None:
        """Width of the experts that every token goes to, together; None without."""
        return None

    @property
    def shared_experts_gated(self) -> bool:
        """Whether a gate of its own weighs what the shared experts give a token."""
        return False


def _take_rope(fields: dict[str, Any]) -> None:
    """Bring rope_parameters (transformers 5) and rope_theta, rope_scaling (4) to `rope_theta`."""
    for key in ("rope_scaling", "rope_parameters"):
        source = fields.pop(key, None)
        if source is None:
            continue
        if not isinstance(source, dict):
            raise ValueError(f"{key} is no object")
        source = dict(source)
        rope_type = source.pop("rope_type", source.pop("type", "default"))
        if rope_type != "default":
            raise ValueError(f"rope_type {rope_type!r} is not implemented")
        theta = source.pop("rope_theta", None)
        if source:
            raise ValueError(f"rope field {sorted(source)[0]!r} is not implemented")
        if theta is not None and fields.setdefault("rope_theta", theta) != theta:
            raise ValueError(f"rope_theta and {key} differ")
    if fields.get("rope_theta") is None:
        raise ValueError("rope_theta is missing (transformers would take 10000 silently)")


def load_config_dict(path: Path) -> dict[str, Any]:
    """The raw config.json of a checkpoint folder.

    Raises:
        ConfigError: if it is absent or is no JSON object.
    """
    file = path / "config.json"
    try:
        raw = json.loads(file.read_text())
    except FileNotFoundError:
        raise ConfigError(f"{path} has no config.json") from None
    except (OSError, ValueError, RecursionError) as error:  # also of too many digits, or too deep
        raise ConfigError(f"{file} cannot be read: {error}") from None
    if not isinstance(raw, dict):
        raise ConfigError(f"{file} is no JSON object")
    return raw


def read_config(source: Path | str | Mapping[str, Any]) -> tuple[ArchSpec, Any]:
    """Read and check a config.

    Args:
        source: a checkpoint folder, or the content of its config.json.

    Returns:
        (the architecture's spec, its config object).

    Raises:
        ConfigError: naming each field that is missing, unknown or not implemented.
        UnsupportedError: for an architecture that isomodels does not have.
    """
    if isinstance(source, Mapping):
        raw, where = dict(source), "config.json"
    else:
        raw, where = load_config_dict(Path(source)), str(Path(source) / "config.json")
    names = raw.get("architectures")
    if not isinstance(names, list) or len(names) != 1 or not isinstance(names[0], str):
        raise ConfigError(f"{where}: architectures must name one class, got {names!r}")
    try:
        spec = get_spec(names[0])
    except UnsupportedError as error:
        raise UnsupportedError(f"{where}: {error}") from None
    if raw.get("model_type") != spec.model_type:
        raise ConfigError(
            f"{where}: model_type is {raw.get('model_type')!r}, "
            f"{spec.architecture} has {spec.model_type!r}"
        )
    if huge := _huge(raw):
        raise ConfigError(f"{where}: {huge} is larger than any size of a model: correct it")
    try:
        return spec, load_object(spec.config)(**raw)
    except ValidationError as error:
        raise ConfigError(f"{where} of {spec.architecture}: {_explain(error)}") from None


_EXPERTS = ("num_experts", "num_local_experts", "n_routed_experts")
_LAYERS = ("num_hidden_layers", "num_nextn_predict_layers", "mtp_num_hidden_layers", "depth")
_MOST = dict.fromkeys((*_EXPERTS, *_LAYERS), 1 << 12)  # each is a row of a table, or a module
_MOST_TOGETHER = 1 << 18


def _huge(fields: Mapping[str, Any]) -> str | None:
    """The first field whose number no tensor's shape could hold, or no table of weights."""
    for name, value in fields.items():
        if isinstance(value, int) and abs(value) > _MOST.get(name, (1 << 31) - 1):
            return name
        layers = fields.get("num_hidden_layers")
        counts = name in _EXPERTS and isinstance(value, int) and isinstance(layers, int)
        if counts and value * layers > _MOST_TOGETHER:
            return f"num_hidden_layers times {name}"
        if isinstance(value, dict) and (below := _huge(value)):
            return f"{name}.{below}"
    return None


def _explain(error: ValidationError) -> str:
    parts = []
    for item in error.errors():
        field = ".".join(str(part) for part in item["loc"])
        match item["type"]:
            case "missing":
                parts.append(f"{field} is missing")
            case "extra_forbidden":
                parts.append(f"{field} is unknown, its meaning is not implemented")
            case "value_error":
                parts.append(item["msg"].removeprefix("Value error, "))
            case _:
                parts.append(f"{field} = {item['input']!r} is not supported ({item['msg']})")
    return "; ".join(parts)
