"""megatron-core's GPTModel in Qwen3's shape, without Transformer Engine: a training baseline."""

from collections.abc import Mapping
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from isomodels.megatron.process import start_process


def gpt_model(config: Any, *, longest: int, device: str) -> nn.Module:
    """The model, its weights not drawn."""
    start_process()
    from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
    from megatron.core.models.gpt.gpt_model import GPTModel
    from megatron.core.tensor_parallel.random import model_parallel_cuda_manual_seed
    from megatron.core.transformer.transformer_config import TransformerConfig

    if device == "cuda":
        model_parallel_cuda_manual_seed(0)
    built = TransformerConfig(
        num_layers=config.num_hidden_layers,
        hidden_size=config.hidden_size,
        ffn_hidden_size=config.intermediate_size,
        num_attention_heads=config.num_attention_heads,
        num_query_groups=config.num_key_value_heads,
        kv_channels=config.head_dim,
        normalization="RMSNorm",
        layernorm_epsilon=config.rms_norm_eps,
        qk_layernorm=True,
        gated_linear_unit=True,
        activation_func=F.silu,
        bias_activation_fusion=device == "cuda",
        add_bias_linear=False,
        hidden_dropout=0.0,
        attention_dropout=0.0,
        bf16=True,
        params_dtype=torch.bfloat16,
        attention_softmax_in_fp32=True,
        masked_softmax_fusion=False,
        gradient_accumulation_fusion=False,
        perform_initialization=False,
        use_cpu_initialization=device == "cpu",
    )
    return GPTModel(
        built,
        get_gpt_layer_local_spec(qk_layernorm=True, normalization="RMSNorm"),
        vocab_size=config.vocab_size,
        max_sequence_length=longest,
        position_embedding_type="rope",
        rotary_base=config.rope_theta,
        share_embeddings_and_output_weights=config.tie_word_embeddings,
    ).to(device)


def load(model: nn.Module, ours: Mapping[str, Tensor], config: Any) -> None:
    """Fills it with the weights of our module's state dict."""
    heads, groups, dim = config.num_attention_heads, config.num_key_value_heads, config.head_dim
    names = {
        "embedding.word_embeddings.weight": "model.embed_tokens.weight",
        "decoder.final_layernorm.weight": "model.norm.weight",
        "output_layer.weight": "lm_head.weight",
    }
    for i in range(config.num_hidden_layers):
        theirs, mine = f"decoder.layers.{i}", f"model.layers.{i}"
        names |= {
            f"{theirs}.input_layernorm.weight": f"{mine}.input_layernorm.weight",
            f"{theirs}.self_attention.linear_qkv.weight": f"{mine}.self_attn.qkv_proj.weight",
            f"{theirs}.self_attention.q_layernorm.weight": f"{mine}.self_attn.q_norm.weight",
            f"{theirs}.self_attention.k_layernorm.weight": f"{mine}.self_attn.k_norm.weight",
            f"{theirs}.self_attention.linear_proj.weight": f"{mine}.self_attn.o_proj.weight",
            f"{theirs}.pre_mlp_layernorm.weight": f"{mine}.post_attention_layernorm.weight",
            f"{theirs}.mlp.linear_fc1.weight": f"{mine}.mlp.gate_up_proj.weight",
            f"{theirs}.mlp.linear_fc2.weight": f"{mine}.mlp.down_proj.weight",
        }
    for name, parameter in model.named_parameters():
        tensor = ours[names[name]]
        if name.endswith("linear_qkv.weight"):
            # [q heads | k heads | v heads] -> for each kv head its q heads, k, v
            parts = tensor.view(-1, dim, tensor.shape[1]).split((heads, groups, groups))
            grouped = [part.view(groups, -1, dim, tensor.shape[1]) for part in parts]
            tensor = torch.cat(grouped, 1).flatten(0, 2)
        with torch.no_grad():
            parameter.copy_(tensor)
