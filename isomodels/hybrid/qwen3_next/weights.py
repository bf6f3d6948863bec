"""Checkpoint tensors of Qwen3-Next; the MTP layers, where config.json states them, are carried."""

from isomodels.hybrid.qwen3_next.config import Qwen3NextConfig
from isomodels.layers import megatron_names as megatron
from isomodels.layers.hybrid_config import HybridConfig
from isomodels.layers.hybrid_weights import hybrid_rules
from isomodels.weights_conv.rules import ForeignTable, Grouped, Rule, Source


def rules(config: Qwen3NextConfig) -> tuple[Rule, ...]:
    """The conversion table of one config."""
    return hybrid_rules(config, projections=_projections)


def _projections(prefix: str, config: HybridConfig) -> list[Rule]:
    """HF has the rows of one key head together: [q | k | v | z] and [b | a] of its value heads."""
    groups, hidden = config.linear_num_key_heads, config.hidden_size
    heads = config.linear_num_value_heads // groups
    key, values = config.linear_key_head_dim, heads * config.linear_value_head_dim
    rows = ((key, key, values, values), (heads, heads))
    names = ("in_proj_qkvz.weight", "in_proj_ba.weight")
    parts = tuple(
        Source(f"{prefix}.{name}", (groups * sum(one), hidden))
        for name, one in zip(names, rows, strict=True)
    )
    sizes = tuple(tuple(groups * n for n in one) for one in rows)
    return [Grouped(f"{prefix}.in_proj.weight", parts, sizes=sizes, heads=(groups, groups))]


def megatron_table(config: Qwen3NextConfig) -> ForeignTable:
    """The table of the same model in Megatron."""
    return megatron.hybrid_table(config, by_head=True)
