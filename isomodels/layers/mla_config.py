"""Config fields of the decoders with latent attention and experts (DeepSeek-V3 and its kin)."""

from dataclasses import fields as dataclass_fields
from typing import Annotated, Any, Literal, Self

import torch
from pydantic import BaseModel, ConfigDict, Field, model_validator

from isomodels.config import MoEConfig, Routing
from isomodels.kernels.router import check_groups
from isomodels.kernels.yarn import Yarn

# Settings of a training or of a deployment, and of the files: none reaches a forward.
_WITHOUT_ARITHMETIC = frozenset({"aux_loss_alpha", "ep_size", "pretraining_tp", "seq_aux"})
_YARN_FIELDS = frozenset(field.name for field in dataclass_fields(Yarn))


class BlockFloat8(BaseModel):
    """Block-scaled float8 weights, the one form of quantisation that is read."""

    model_config = ConfigDict(extra="forbid", frozen=True, strict=True)

    quant_method: Literal["fp8"]
    fmt: Literal["e4m3"]
    activation_scheme: Literal["dynamic"]  # of kernels that are not run here
    # V3.1: its scales are powers of two, in float32 as all others
    scale_fmt: Literal["ue8m0"] | None = None
    weight_block_size: list[Annotated[int, Field(gt=0)]] = Field(min_length=2, max_length=2)


class LatentMoEConfig(MoEConfig):
    """Latent attention, a sigmoid router with a correction bias, shared experts.

    Attributes:
        head_dim: size of a query's head, nope and rope together. In these files, and in
            transformers, the field of that name is `qk_rope_head_dim`.
        num_experts: `n_routed_experts` of the file.
        mlp_layer_types: of every layer; `first_k_dense_replace` of the file is another spelling.
        latent_norm_eps: of the norms of both latents. vLLM and Megatron take `rms_norm_eps`,
            transformers takes 1e-6 whatever that is; so a file may state this field, which no
            other library reads. None: `rms_norm_eps`.
        yarn: from `rope_scaling` or `rope_parameters`; None without either.
    """

    q_lora_rank: int | None = Field(gt=0)
    kv_lora_rank: int = Field(gt=0)
    qk_nope_head_dim: int = Field(gt=0)
    qk_rope_head_dim: int = Field(gt=0, multiple_of=2)
    v_head_dim: int = Field(gt=0)
    rope_interleave: bool = True
    yarn: Yarn | None = None
    latent_norm_eps: float | None = Field(default=None, gt=0, allow_inf_nan=False)

    n_shared_experts: int = Field(gt=0)
    mlp_layer_types: list[Literal["dense", "sparse"]]
    moe_layer_freq: Literal[1] = 1
    n_group: int = Field(gt=0)
    topk_group: int = Field(gt=0)
    norm_topk_prob: bool
    routed_scaling_factor: float = Field(gt=0, allow_inf_nan=False)
    scoring_func: Literal["sigmoid"] = "sigmoid"
    topk_method: Literal["noaux_tc"] = "noaux_tc"

    num_nextn_predict_layers: int = Field(ge=0)
    attention_bias: Literal[False]
    partial_rotary_factor: float = Field(default=1.0, ge=1, le=1)
    # Of the files, not of the model that they hold.
    quantization_config: BlockFloat8 | None = Field(default=None, exclude=True)

    @model_validator(mode="before")
    @classmethod
    def _read(cls, raw: Any) -> Any:
        fields = {k: v for k, v in dict(raw).items() if k not in _WITHOUT_ARITHMETIC}
        _rename(fields, "n_routed_experts", "num_experts")
        _rename(fields, "num_local_experts", "num_experts")
        if "num_experts" not in fields:
            raise ValueError("n_routed_experts is missing")
        _rename(fields, "num_mtp_layers", "num_nextn_predict_layers")
        if "yarn" in fields:
            raise ValueError("yarn is unknown: its constants are stated in rope_scaling")
        _take_head_dim(fields)
        _take_layer_types(fields)
        fields["yarn"] = _take_yarn(fields)
        return fields

    @model_validator(mode="after")
    def _fit(self) -> Self:
        if self.num_key_value_heads != self.num_attention_heads:
            raise ValueError(
                f"num_key_value_heads {self.num_key_value_heads} is not num_attention_heads "
                f"{self.num_attention_heads}: latent attention has no groups"
            )
        if len(self.mlp_layer_types) != self.num_hidden_layers:
            raise ValueError("mlp_layer_types has not num_hidden_layers entries")
        if "sparse" not in self.mlp_layer_types:
            raise ValueError("no layer has experts")
        check_groups(self.num_experts, self.num_experts_per_tok, self.n_group, self.topk_group)
        if self.yarn is not None:
            _check_yarn(self.yarn, self.qk_rope_head_dim, self.rope_theta)
        return self

    @property
    def fp8_block(self) -> tuple[int, int] | None:
        """Rows and columns that share a scale, in files of float8 weights."""
        if self.quantization_config is None:
            return None
        rows, columns = self.quantization_config.weight_block_size
        return rows, columns

    @property
    def norm_eps_of_latents(self) -> float:
        """What is added to the mean of squares of a latent."""
        return self.rms_norm_eps if self.latent_norm_eps is None else self.latent_norm_eps

    @property
    def softmax_scale(self) -> float:
        """Factor of all scores."""
        factor = 1.0 if self.yarn is None else self.yarn.softmax_factor
        return self.head_dim**-0.5 * factor

    @property
    def latent_width(self) -> int:
        """Numbers that a token leaves in a layer's cache."""
        return self.kv_lora_rank + self.qk_rope_head_dim

    @property
    def page_shape(self) -> tuple[int, int]:
        """See `DenseConfig`: one row for all heads, latent and rotated key."""
        return 1, self.latent_width

    @property
    def common_head_dim(self) -> None:
        """See `DenseConfig`: scores are those of latents, whatever a head's size is."""
        return None

    @property
    def routing(self) -> Routing:
        """How tokens go to experts."""
        return Routing(
            num_experts=self.num_experts,
            top_k=self.num_experts_per_tok,
            scoring="sigmoid",
            normalize=self.norm_topk_prob,
            scale=self.routed_scaling_factor,
            correction_bias=True,
            n_group=self.n_group,
            topk_group=self.topk_group,
        )

    @property
    def shared_experts_size(self) -> int:
        """Width of the experts that every token goes to, together."""
        return self.moe_intermediate_size * self.n_shared_experts

    def is_sparse(self, layer_index: int) -> bool:
        """Whether a layer's feed-forward has experts; those of MTP layers have."""
        return (
            layer_index >= self.num_hidden_layers or self.mlp_layer_types[layer_index] == "sparse"
        )


def _rename(fields: dict[str, Any], old: str, new: str) -> None:
    value = fields.pop(old, None)
    if value is not None and fields.setdefault(new, value) != value:
        raise ValueError(f"{old} and {new} differ")


def _take_head_dim(fields: dict[str, Any]) -> None:
    """Replaces the file's `head_dim`, a second name of another field, by the size of a query."""
    nope, rope = fields.get("qk_nope_head_dim"), fields.get("qk_rope_head_dim")
    if fields.pop("head_dim", rope) != rope:
        raise ValueError("head_dim is not qk_rope_head_dim, of which it is the other name")
    if not isinstance(nope, int) or not isinstance(rope, int):
        fields["head_dim"] = 2  # the check of the two names the fault
        return
    fields["head_dim"] = nope + rope
    if fields.pop("qk_head_dim", nope + rope) != nope + rope:
        raise ValueError("qk_head_dim is not qk_nope_head_dim + qk_rope_head_dim")


def _take_layer_types(fields: dict[str, Any]) -> None:
    dense, layers = fields.pop("first_k_dense_replace", None), fields.get("num_hidden_layers")
    if dense is None:
        if fields.get("mlp_layer_types") is None:
            raise ValueError("first_k_dense_replace or mlp_layer_types is missing")
        return
    if type(dense) is not int or dense < 0:
        raise ValueError(f"first_k_dense_replace = {dense!r} is not supported (a count is)")
    if type(layers) is not int or layers <= 0:
        fields.setdefault("mlp_layer_types", [])  # the check of num_hidden_layers names the fault
        return
    stated = ["dense"] * min(dense, layers) + ["sparse"] * (layers - dense)
    if fields.get("mlp_layer_types") is None:
        fields["mlp_layer_types"] = stated
    elif fields["mlp_layer_types"] != stated:
        raise ValueError("mlp_layer_types and first_k_dense_replace differ")


def _take_yarn(fields: dict[str, Any]) -> Yarn | None:
    """Takes YaRN's constants out of either spelling; what is left is plain rope."""
    found: list[Yarn] = []
    for key in ("rope_scaling", "rope_parameters"):
        stated = fields.get(key)
        if not isinstance(stated, dict):
            continue
        fields[key] = stated = dict(stated)
        if stated.get("partial_rotary_factor") == 1:
            del stated["partial_rotary_factor"]
        if stated.get("rope_type", stated.get("type")) != "yarn":
            continue
        if any(stated.pop(k) != "yarn" for k in ("rope_type", "type") if k in stated):
            raise ValueError(f"{key} has a type and another rope_type")
        theta = stated.pop("rope_theta", None)
        fields[key] = {} if theta is None else {"rope_theta": theta}
        found.append(_read_yarn(key, stated))
    if len(found) > 1:
        raise ValueError("rope_scaling and rope_parameters both state YaRN: leave one out")
    return found[0] if found else None


def _read_yarn(key: str, stated: dict[str, Any]) -> Yarn:
    missing, unknown = sorted(_YARN_FIELDS - stated.keys()), sorted(stated.keys() - _YARN_FIELDS)
    if missing:
        raise ValueError(f"{key}.{missing[0]} is missing")
    if unknown:
        raise ValueError(f"{key}.{unknown[0]} is unknown, its meaning is not implemented")
    for name, value in stated.items():
        number = isinstance(value, int | float) and not isinstance(value, bool)
        if not number or not 0 <= value < float("inf") or (value == 0 and "mscale" not in name):
            raise ValueError(f"{key}.{name} = {value!r} is not supported (a positive number is)")
    return Yarn(**stated)


def _check_yarn(yarn: Yarn, dim: int, theta: float) -> None:
    """Refuse constants of which no table can be made.

    Raises:
        ValueError: naming them.
    """
    try:
        factors = torch.tensor([yarn.table_factor, yarn.softmax_factor], device="cpu")
        usable = bool(torch.cat((factors, yarn.frequencies(dim, theta))).isfinite().all())
    except (ArithmeticError, ValueError):  # a logarithm of 0, or by that of 1
        usable = False
    if not usable:
        raise ValueError(
            f"rope_theta {theta} and the constants of rope_scaling ({yarn}) give no finite "
            "frequencies and factors"
        )
