"""Hybrids whose feed-forward has experts: config, module and table that they share."""

from typing import Any, Unpack

from pydantic import Field, model_validator
from torch import nn

from isomodels.config import MoEConfig, Routing
from isomodels.layers.hybrid_config import HybridConfig
from isomodels.layers.hybrid_weights import carried_rules, mtp_shapes
from isomodels.layers.linear import Placed
from isomodels.layers.moe import MoE
from isomodels.layers.weights import moe_rules
from isomodels.weights_conv.rules import (
    CarriedFused,
    CarriedStack,
    Concat,
    Either,
    Rule,
    Same,
    Source,
    Stack,
    resolve,
)


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
    """Names below a layer's `mlp.` and their shapes: HF's, of the fused form of experts."""
    shapes: dict[str, tuple[int, ...]] = {}
    for rule in resolve(hybrid_moe_rules("mlp", config), ()):
        parts = (rule,) if isinstance(rule, Stack) else rule.sources
        shapes |= {part.name: part.shape for part in parts}
    return {name.removeprefix("mlp."): shape for name, shape in shapes.items()}


def carried_mtp_rules(config: HybridMoEConfig) -> tuple[Rule, ...]:
    """The MTP layers, which are only carried; a file has their experts apart or fused."""
    experts = {
        rule.name: Either(
            CarriedStack(rule.name, rule.apart.slices),
            CarriedFused(rule.name, rule.fused.shape, layout_known=rule.fused.layout_known),
        )
        for index in range(config.mtp_num_hidden_layers)
        for rule in moe_rules(f"mtp.layers.{index}.mlp", config)
        if isinstance(rule, Either)
    }
    carried = carried_rules("mtp", mtp_shapes(config, moe_shapes(config)))
    return tuple(experts.get(rule.name, rule) for rule in carried)
