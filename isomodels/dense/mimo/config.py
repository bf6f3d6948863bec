"""config.json of MiMo-7B models."""

from typing import Any, Literal

from pydantic import Field, model_validator

from isomodels.config import DenseConfig


class MiMoConfig(DenseConfig):
    """MiMo: the attention of Qwen2 (qkv bias, no qk-norm) and multi-token-prediction layers."""

    num_nextn_predict_layers: int = Field(ge=0)
    attention_bias: Literal[True] = True

    @model_validator(mode="before")
    @classmethod
    def _head_dim(cls, raw: Any) -> Any:
        # The architecture of Qwen2 defines it so where the file does not state it.
        raw = dict(raw)
        if raw.get("head_dim") is None and "hidden_size" in raw and "num_attention_heads" in raw:
            raw["head_dim"] = raw["hidden_size"] // raw["num_attention_heads"]
        return raw
