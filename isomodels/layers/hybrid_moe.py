"""Hybrids whose feed-forward has experts: config, module and table that they share."""

from typing import Any, Unpack

from pydantic import Field, model_validator
from torch import nn

from isomodels.config import MoEConfig, Routing
from isomodels.layers.hybrid_config import HybridConfig
from isomodels.layers.linear import Placed
from isomodels.layers.moe import MoE
from isomodels.layers.weights import moe_rules
from isomodels.weights_conv.rules import Concat, Rule, Same, Source, resolve


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


def make_moe(config: HybridMoEConfig, layer_index: int, **placed: Unpack[Placed]) -> nn.Module:
    """The feed-forward of one layer."""
    return MoE(
        config.hidden_size,
        config.moe_intermediate_size,
        config.routing,
        layer_index,
        shared_size=config.shared_experts_size,
        gated=config.shared_experts_gated,
        **placed,
    )


def hybrid_moe_rules(prefix: str, config: HybridMoEConfig) -> list[Rule]:
    """Router, experts, the shared expert and its gate."""
    hidden, width = config.hidden_size, config.shared_expert_intermediate_size
    ours, theirs = f"{prefix}.shared_experts", f"{prefix}.shared_expert"
    gate_up = [Source(f"{theirs}.{n}_proj.weight", (width, hidden)) for n in ("gate", "up")]
    down = f"{theirs}.down_proj.weight"
    return [
        *moe_rules(prefix, config),
        Concat(f"{ours}.gate_up_proj.weight", tuple(gate_up)),
        Same(f"{ours}.down_proj.weight", (hidden, width), down),
        Same(f"{prefix}.shared_expert_gate.weight", (1, hidden)),
    ]


def moe_shapes(config: HybridMoEConfig) -> dict[str, tuple[int, ...]]:
    """HF names below a layer's `mlp.` and their shapes, experts apart."""
    rules = resolve(hybrid_moe_rules("mlp", config), ())
    return {s.name.removeprefix("mlp."): s.shape for rule in rules for s in rule.sources}
