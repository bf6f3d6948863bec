"""Checkpoint tensors of MiMo-7B: those of Qwen2, and the MTP layers, which are only carried."""

from isomodels.dense.mimo.config import MiMoConfig
from isomodels.dense.mimo.model import mtp_shapes
from isomodels.layers.weights import decoder_rules
from isomodels.weights_conv.rules import Carried, Rule


def rules(config: MiMoConfig) -> tuple[Rule, ...]:
    """The conversion table of one config."""
    return decoder_rules(config, qkv_bias=True, qk_norm=False) + tuple(
        Carried(f"model.mtp_layers.{index}.{name}", shape)
        for index in range(config.num_nextn_predict_layers)
        for name, shape in mtp_shapes(config).items()
    )
