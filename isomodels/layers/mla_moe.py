"""Decoders of latent attention and experts: the module and the conversion table they share."""

import torch
from torch import nn

from isomodels.layers.carried import CarriedTensors
from isomodels.layers.decoder import CausalLM, DecoderLayer
from isomodels.layers.linear import Placed
from isomodels.layers.mla import LatentAttention
from isomodels.layers.mla_config import LatentMoEConfig
from isomodels.layers.parallel import ALONE, Layout
from isomodels.layers.weights import carried_rules, causal_lm_rules, hf_sources, layer_rules
from isomodels.weights_conv.rules import Concat, Rule, Same, Source


class LatentMoEForCausalLM(CausalLM):
    """The module that both hosts run.

    Multi-token-prediction layers are not run; with `carry_mtp` their tensors are kept for saves.
    """

    def __init__(
        self,
        config: LatentMoEConfig,
        *,
        dtype: torch.dtype,
        device: torch.device | None = None,
        carry_mtp: bool = False,
        layout: Layout = ALONE,
    ):
        placed: Placed = {"dtype": dtype, "device": device, "layout": layout}

        def make_layer(layer_index: int) -> DecoderLayer:
            attention = LatentAttention(config, layer_index, **placed)
            return DecoderLayer(config, layer_index, attention, **placed)

        super().__init__(config, make_layer, **placed)
        if carry_mtp and layout.stage.heads:
            self.model.mtp_layers = nn.ModuleList(
                CarriedTensors(mtp_sources(config), dtype, device)
                for _ in range(config.num_nextn_predict_layers)
            )


def latent_moe_rules(config: LatentMoEConfig) -> tuple[Rule, ...]:
    """The table of the decoder, its head, and its MTP layers, which are only carried."""

    def attention(layer: str, _: int) -> list[Rule]:
        return latent_attention_rules(f"{layer}.self_attn", config)

    rules = causal_lm_rules(config, attention)
    for index in range(config.num_nextn_predict_layers):
        hf = f"model.layers.{config.num_hidden_layers + index}"
        rules += carried_rules(f"model.mtp_layers.{index}", mtp_sources(config), hf)
    return rules


def mtp_sources(config: LatentMoEConfig) -> dict[str, Source]:
    """HF tensors of an MTP layer by their names below it: a decoder layer with a head of its own.

    Source of the names: "DeepSeek-V3 Technical Report" (2024), section 2.2, and its files.
    """

    def attention(layer: str, _: int) -> list[Rule]:
        return latent_attention_rules(f"{layer}.self_attn", config)

    hidden, vocab = config.hidden_size, config.vocab_size
    own: dict[str, tuple[int, ...]] = {
        "enorm": (hidden,),
        "hnorm": (hidden,),
        "eh_proj": (hidden, 2 * hidden),
        "embed_tokens": (vocab, hidden),
        "shared_head.norm": (hidden,),
        "shared_head.head": (vocab, hidden),
    }
    rules: list[Rule] = [Same(f"layer.{name}.weight", shape) for name, shape in own.items()]
    rules += layer_rules("layer", config, config.num_hidden_layers, attention)
    return hf_sources(rules, "layer")


def latent_attention_rules(prefix: str, config: LatentMoEConfig) -> list[Rule]:
    """`qkv_a_proj` is the rows [q_a, or q without a latent | kv latent | rotary key]."""
    hidden, rank, heads = config.hidden_size, config.q_lora_rank, config.num_attention_heads
    queries = heads * config.head_dim
    first = ("q_proj", queries) if rank is None else ("q_a_proj", rank)
    parts = (first, ("kv_a_proj_with_mqa", config.latent_width))
    expanded = heads * (config.qk_nope_head_dim + config.v_head_dim)
    rules: list[Rule] = [
        Concat(
            f"{prefix}.qkv_a_proj.weight",
            tuple(Source(f"{prefix}.{name}.weight", (rows, hidden)) for name, rows in parts),
        )
    ]
    if rank is not None:
        rules += [
            Same(f"{prefix}.q_a_layernorm.weight", (rank,)),
            Same(f"{prefix}.q_b_proj.weight", (queries, rank)),
        ]
    return [
        *rules,
        Same(f"{prefix}.kv_a_layernorm.weight", (config.kv_lora_rank,)),
        Same(f"{prefix}.kv_b_proj.weight", (expanded, config.kv_lora_rank)),
        Same(f"{prefix}.o_proj.weight", (hidden, heads * config.v_head_dim)),
    ]
