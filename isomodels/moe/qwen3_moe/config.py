"""config.json of Qwen3-MoE models."""

from typing import Annotated, Any, Literal, Self

from pydantic import Field, model_validator

from isomodels.config import MoEConfig, Routing


class Qwen3MoeConfig(MoEConfig):
    """Qwen3-MoE: the attention of Qwen3; softmax routing without shared experts.

    `intermediate_size` is the width of the layers without experts.
    """

    attention_bias: Literal[False]
    norm_topk_prob: bool
    decoder_sparse_step: int = Field(gt=0)
    mlp_only_layers: list[Annotated[int, Field(ge=0)]]

    @model_validator(mode="before")
    @classmethod
    def _no_dense_layers(cls, raw: Any) -> Any:
        # transformers reads null as an empty list
        fields = dict(raw)
        if fields.get("mlp_only_layers", 0) is None:
            fields["mlp_only_layers"] = []
        return fields

    @model_validator(mode="after")
    def _layers_exist(self) -> Self:
        beyond = [i for i in self.mlp_only_layers if i >= self.num_hidden_layers]
        if beyond:
            raise ValueError(
                f"mlp_only_layers names layer {beyond[0]} of {self.num_hidden_layers} layers"
            )
        if not any(map(self.is_sparse, range(self.num_hidden_layers))):
            raise ValueError("decoder_sparse_step and mlp_only_layers leave no layer with experts")
        return self

    @property
    def routing(self) -> Routing:
        """How tokens go to experts."""
        return Routing(
            num_experts=self.num_experts,
            top_k=self.num_experts_per_tok,
            scoring="softmax",
            normalize=self.norm_topk_prob,
        )

    def is_sparse(self, layer_index: int) -> bool:
        """Whether a layer's feed-forward has experts."""
        step = self.decoder_sparse_step
        return layer_index not in self.mlp_only_layers and (layer_index + 1) % step == 0


TINY = {
    "architectures": ["Qwen3MoeForCausalLM"],
    "model_type": "qwen3_moe",
    "vocab_size": 1003,
    "hidden_size": 128,
    "intermediate_size": 352,
    "moe_intermediate_size": 64,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "num_experts": 8,
    "num_experts_per_tok": 3,
    "norm_topk_prob": True,
    "decoder_sparse_step": 1,
    "mlp_only_layers": [0],
    "hidden_act": "silu",
    "rms_norm_eps": 1e-6,
    "rope_theta": 1000000.0,
    "max_position_embeddings": 2048,
    "tie_word_embeddings": False,
    "bos_token_id": 0,
    "eos_token_id": 0,
    "attention_bias": False,
}
