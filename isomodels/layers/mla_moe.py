"""Decoders of latent attention and experts: the module and the conversion table they share."""

import torch
from torch import nn

from isomodels.layers.carried import CarriedTensors
from isomodels.layers.decoder import CausalLM
from isomodels.layers.linear import Placed
from isomodels.layers.mla import LatentAttention
from isomodels.layers.mla_config import LatentMoEConfig
from isomodels.layers.mlp import MLP
from isomodels.layers.moe import MoE
from isomodels.layers.parallel import ALONE, Layout
from isomodels.layers.weights import mlp_rules, moe_rules
from isomodels.weights_conv.rules import CarriedSame, Concat, Rule, Same, Source, Tied, resolve


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
        hidden, width = config.hidden_size, config.moe_intermediate_size

        def make_attention(layer_index: int) -> nn.Module:
            return LatentAttention(config, layer_index, **placed)

        def make_mlp(layer_index: int) -> nn.Module:
            if not config.is_sparse(layer_index):
                return MLP(hidden, config.intermediate_size, **placed)
            shared = config.shared_experts_size
            return MoE(hidden, width, config.routing, layer_index, shared_size=shared, **placed)

        super().__init__(config, make_attention=make_attention, make_mlp=make_mlp, **placed)
        if carry_mtp and layout.stage.heads:
            sources = mtp_sources(config)
            shapes = {name: source.shape for name, source in sources.items()}
            pinned = {name: source.dtype for name, source in sources.items() if source.dtype}
            self.model.mtp_layers = nn.ModuleList(
                CarriedTensors(shapes, dtype, device, pinned)
                for _ in range(config.num_nextn_predict_layers)
            )


def latent_moe_rules(config: LatentMoEConfig) -> tuple[Rule, ...]:
    """The table of the decoder, its head, and its MTP layers, which are only carried."""
    table = (config.vocab_size, config.hidden_size)
    rules: list[Rule] = [Same("model.embed_tokens.weight", table)]
    for index in range(config.num_hidden_layers):
        rules += _layer_rules(f"model.layers.{index}", config, config.is_sparse(index))
    rules.append(Same("model.norm.weight", (config.hidden_size,)))
    if config.tie_word_embeddings:
        rules.append(Tied("lm_head.weight", table, to="model.embed_tokens.weight"))
    else:
        rules.append(Same("lm_head.weight", table))
    for index in range(config.num_nextn_predict_layers):
        ours = f"model.mtp_layers.{index}"
        theirs = f"model.layers.{config.num_hidden_layers + index}"
        rules += [
            CarriedSame(f"{ours}.{name}", source.shape, f"{theirs}.{name}", source.dtype)
            for name, source in mtp_sources(config).items()
        ]
    return tuple(rules)


def mtp_sources(config: LatentMoEConfig) -> dict[str, Source]:
    """HF tensors of an MTP layer by their names below it: a decoder layer with a head of its own.

    Source of the names: "DeepSeek-V3 Technical Report" (2024), section 2.2, and its files.
    """
    hidden, vocab = config.hidden_size, config.vocab_size
    own = {
        "enorm.weight": (hidden,),
        "hnorm.weight": (hidden,),
        "eh_proj.weight": (hidden, 2 * hidden),
        "embed_tokens.weight": (vocab, hidden),
        "shared_head.norm.weight": (hidden,),
        "shared_head.head.weight": (vocab, hidden),
    }
    found = {name: Source(name, shape) for name, shape in own.items()}
    for rule in resolve(_layer_rules("layer", config, sparse=True), ()):
        found |= {source.name.removeprefix("layer."): source for source in rule.sources}
    return found


def _layer_rules(prefix: str, config: LatentMoEConfig, sparse: bool) -> list[Rule]:
    hidden = config.hidden_size
    rules: list[Rule] = [Same(f"{prefix}.input_layernorm.weight", (hidden,))]
    rules += _attention_rules(f"{prefix}.self_attn", config)
    rules.append(Same(f"{prefix}.post_attention_layernorm.weight", (hidden,)))
    mlp = f"{prefix}.mlp"
    if not sparse:
        return rules + mlp_rules(mlp, hidden, config.intermediate_size)
    bias = f"{mlp}.gate.e_score_correction_bias"
    rules += moe_rules(mlp, config)
    rules.append(Same(bias, (config.num_experts,), dtype=torch.float32))
    return rules + mlp_rules(f"{mlp}.shared_experts", hidden, config.shared_experts_size)


def _attention_rules(prefix: str, config: LatentMoEConfig) -> list[Rule]:
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
