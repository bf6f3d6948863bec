"""config.json of MiMo-7B models."""

from typing import Any, Literal

from pydantic import Field, model_validator

from isomodels.config import DenseConfig


class MiMoConfig(DenseConfig):
    """MiMo: the attention of Qwen2 (qkv bias, no qk-norm) and multi-token-prediction layers."""

    num_nextn_predict_layers: int = Field(ge=0)
    attention_bias: Literal[True] = True
    use_mrope: Literal[False] = False

    @model_validator(mode="before")
    @classmethod
    def _head_dim(cls, raw: Any) -> Any:
        # The architecture of Qwen2 defines it so where the file does not state it.
        raw = dict(raw)
        hidden, heads = raw.get("hidden_size"), raw.get("num_attention_heads")
        # Sizes that are no counts are left to the checks of their own fields.
        if raw.get("head_dim") is None and isinstance(hidden, int) and isinstance(heads, int):
            raw["head_dim"] = hidden // max(heads, 1)
        return raw


TINY = {
    "architectures": ["MiMoForCausalLM"],
    "model_type": "mimo",
    "vocab_size": 1003,
    "hidden_size": 128,
    "intermediate_size": 352,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "hidden_act": "silu",
    "rms_norm_eps": 1e-6,
    "rope_theta": 640000.0,
    "max_position_embeddings": 2048,
    "tie_word_embeddings": False,
    "bos_token_id": 0,
    "eos_token_id": 0,
    "attention_bias": True,
    "num_nextn_predict_layers": 1,
}
