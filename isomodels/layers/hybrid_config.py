"""Fields of config.json that the hybrids of gated delta rule and gated attention share."""

from typing import Any, Literal, Self

from pydantic import Field, model_validator

from isomodels.config import DenseConfig, MoEConfig, Routing

LayerType = Literal["linear_attention", "full_attention"]
# Of the positions of images: for text the three rows of positions are one.
_MROPE = ("mrope_section", "mrope_interleaved")


class HybridConfig(DenseConfig):
    """A decoder whose layers are gated delta rule or gated attention, as `layer_types` says."""

    layer_types: list[LayerType]  # type: ignore[assignment]
    full_attention_interval: int | None = Field(default=None, gt=0)
    attention_bias: Literal[False]
    attn_output_gate: Literal[True] = True
    partial_rotary_factor: float = Field(gt=0, le=1)
    linear_conv_kernel_dim: int = Field(gt=1)
    linear_key_head_dim: int = Field(gt=0)
    linear_value_head_dim: int = Field(gt=0)
    linear_num_key_heads: int = Field(gt=0)
    linear_num_value_heads: int = Field(gt=0)
    output_gate_type: Literal["silu", "swish"] = "silu"
    mamba_ssm_dtype: Literal["float32"] = "float32"
    mlp_only_layers: list[int] = Field(default=[], max_length=0)
    mtp_num_hidden_layers: int = Field(default=0, ge=0)
    mtp_use_dedicated_embeddings: Literal[False] = False

    @model_validator(mode="before")
    @classmethod
    def _rope_and_layers(cls, raw: Any) -> Any:
        fields = dict(raw)
        if fields.pop("quantization_config", None) is not None:
            raise ValueError(
                "quantised weights (quantization_config) are not supported: use the bfloat16 files"
            )
        _take_partial_rope(fields)
        interval, layers = fields.get("full_attention_interval"), fields.get("num_hidden_layers")
        if fields.get("layer_types") is None and isinstance(interval, int) and interval > 0:
            if isinstance(layers, int):
                fields["layer_types"] = layer_types(layers, interval)
            else:
                fields.pop("layer_types", None)
        return fields

    @model_validator(mode="after")
    def _hybrid(self) -> Self:
        if self.full_attention_interval is not None and self.layer_types != layer_types(
            self.num_hidden_layers, self.full_attention_interval
        ):
            raise ValueError("layer_types and full_attention_interval differ")
        if self.linear_num_value_heads % self.linear_num_key_heads:
            raise ValueError("linear_num_value_heads is no multiple of linear_num_key_heads")
        if self.rotary_dim % 2 or not self.rotary_dim:
            raise ValueError(
                f"partial_rotary_factor {self.partial_rotary_factor} of head_dim {self.head_dim} "
                "is no even number of channels"
            )
        if set(self.layer_types) != {"linear_attention", "full_attention"}:
            raise ValueError("layer_types must name both kinds of layers")
        return self

    @property
    def rotary_dim(self) -> int:
        """How many channels of a head carry its position."""
        return int(self.head_dim * self.partial_rotary_factor)

    def layers_of(self, kind: LayerType) -> list[int]:
        """The indices of the layers of one kind."""
        return [i for i, one in enumerate(self.layer_types) if one == kind]


class HybridMoEConfig(HybridConfig, MoEConfig):
    """Softmax routing and one shared expert, which a gate weighs, in every layer."""

    shared_expert_intermediate_size: int = Field(gt=0)

    @model_validator(mode="before")
    @classmethod
    def _no_dense_layer(cls, raw: Any) -> Any:
        # Qwen3.5 leaves out the width of a dense feed-forward, which no layer has.
        fields = dict(raw)
        if "moe_intermediate_size" in fields:
            fields.setdefault("intermediate_size", fields["moe_intermediate_size"])
        return fields

    @property
    def routing(self) -> Routing:
        """How tokens go to experts: the chosen scores are divided by their sum."""
        return Routing(self.num_experts, self.num_experts_per_tok, "softmax", normalize=True)

    @property
    def shared_experts_size(self) -> int:
        """Width of the shared expert."""
        return self.shared_expert_intermediate_size

    @property
    def shared_experts_gated(self) -> bool:
        """A gate weighs the shared expert."""
        return True

    def is_sparse(self, layer_index: int) -> bool:
        """Every layer has experts."""
        return True


def layer_types(num_layers: int, interval: int) -> list[LayerType]:
    """Every `interval`-th layer is full attention, the last of each group."""
    return [
        "linear_attention" if (index + 1) % interval else "full_attention"
        for index in range(num_layers)
    ]


def _take_partial_rope(fields: dict[str, Any]) -> None:
    """Take the partial rotation, and what only images use, out of the rope fields."""
    for name in ("rope_parameters", "rope_scaling"):
        source = fields.get(name)
        if not isinstance(source, dict):
            continue
        source = {key: value for key, value in source.items() if key not in _MROPE}
        factor = source.pop("partial_rotary_factor", None)
        if factor is not None and fields.setdefault("partial_rotary_factor", factor) != factor:
            raise ValueError(f"partial_rotary_factor and that of {name} differ")
        fields[name] = source
