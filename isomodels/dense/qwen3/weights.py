"""Checkpoint tensors of Qwen3."""

from isomodels.dense.qwen3.config import Qwen3Config
from isomodels.layers.weights import decoder_rules
from isomodels.weights_conv.rules import Rule


def rules(config: Qwen3Config) -> tuple[Rule, ...]:
    """The conversion table of one config."""
    return decoder_rules(config, qkv_bias=False, qk_norm=True)
