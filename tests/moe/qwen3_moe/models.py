"""Tiny Qwen3-MoE models, each beside the transformers model with its tensors."""

import json
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file
from torch import Tensor

from isomodels.config import read_config
from isomodels.registry import load_object
from tests.checkpoints import make_qwen3_moe

# normalized weights behind a dense layer; raw ones in every second layer, tied
KINDS: dict[str, dict[str, Any]] = {
    "qwen3-moe": {},
    "qwen3-moe-tied": {
        "tied": True,
        "norm_topk_prob": False,
        "decoder_sparse_step": 2,
        "mlp_only_layers": [],
        "num_experts_per_tok": 2,
        "num_hidden_layers": 4,
    },
}


def make(name: str, folder: Path, dtype: torch.dtype = torch.float32, **overrides: Any) -> Path:
    return make_qwen3_moe(folder, dtype, **{**KINDS[name], **overrides})


def in_memory(tensors: dict[str, Tensor], names: list[str]) -> dict[str, Tensor]:
    """HF tensors with experts apart -> tensors of these names with experts stacked, by hand."""

    def find(name: str) -> Tensor:
        if name in tensors:
            return tensors[name]
        head, _, leaf = name.rpartition(".")
        if head.endswith(".experts"):
            experts = range(sum(n.startswith(f"{head}.") for n in tensors) // 3)
            return torch.stack([joined(f"{head}.{e}.{leaf}.weight") for e in experts])
        return joined(name)

    def joined(name: str) -> Tensor:
        for whole, parts in (("qkv_proj", "qkv"), ("gate_up_proj", ("gate", "up"))):
            if whole in name:
                return torch.cat([tensors[name.replace(whole, f"{p}_proj")] for p in parts])
        return tensors[name]

    return {name: find(name) for name in names}


def load_ours(folder: Path) -> torch.nn.Module:
    """Our module, filled here by hand: the tests of conversion are elsewhere."""
    spec, config = read_config(folder)
    model = load_object(spec.model)(config, dtype=config.torch_dtype)
    tensors = load_file(folder / "model.safetensors")
    model.load_state_dict(in_memory(tensors, list(model.state_dict())), strict=True)
    return model


def load_theirs(folder: Path, dtype: torch.dtype) -> torch.nn.Module:
    """transformers' model with the same tensors."""
    from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM

    raw = json.loads((folder / "config.json").read_text())
    for field in ("architectures", "model_type", "torch_dtype", "transformers_version"):
        raw.pop(field)
    config = Qwen3MoeConfig(**raw, attn_implementation="eager")
    model = Qwen3MoeForCausalLM(config).eval()
    model.set_experts_implementation("eager")  # the others have no fp64
    tensors = load_file(folder / "model.safetensors")
    names = list(model.state_dict())
    if config.tie_word_embeddings:
        names.remove("lm_head.weight")
    missing, left_over = model.load_state_dict(in_memory(tensors, names), strict=False)
    assert not left_over
    assert missing == (["lm_head.weight"] if config.tie_word_embeddings else [])
    return model.to(dtype)


def their_routes(model: torch.nn.Module, ids: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """(logits [T, V], router logits [T, layers, E], ids [T, layers, k]) of one sequence."""
    gates, found = [], []
    from transformers.models.qwen3_moe.modeling_qwen3_moe import Qwen3MoeTopKRouter

    def keep(_, args, output):
        gates.append(output[0])
        found.append(output[2])

    routers = [m for m in model.modules() if isinstance(m, Qwen3MoeTopKRouter)]
    hooks = [router.register_forward_hook(keep) for router in routers]
    with torch.no_grad():
        logits = model(ids[None], use_cache=False).logits[0]
    for hook in hooks:
        hook.remove()
    return logits, torch.stack(gates, 1), torch.stack(found, 1)
