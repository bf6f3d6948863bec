"""Tiny hybrids, each beside the transformers model with its tensors, and an engine's memory."""

import json
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file
from torch import Tensor

from isomodels.batch import Batch, PagedKV, PagedStates
from isomodels.config import read_config
from isomodels.layers.gated_delta import state_layout
from isomodels.registry import load_object
from tests.dense.models import bounds, run_packed, tokens
from tests.hybrid.checkpoints import (
    make_multimodal,
    make_qwen3_5,
    make_qwen3_5_moe,
    make_qwen3_next,
)
from tests.kernel.pages import Pages

__all__ = [
    "ARCHITECTURES",
    "Engine",
    "bounds",
    "load_ours",
    "load_theirs",
    "make",
    "run_packed",
    "tokens",
]
# The dense one in every test; the others share its layers, or its module.
DENSE = ["qwen3_5", "qwen3_5-tied"]
WITH_EXPERTS = ["qwen3_5_moe", "qwen3_next"]
ARCHITECTURES = [*DENSE, *WITH_EXPERTS, "multimodal"]

_FUSED = {
    "qkv_proj.weight": ("q_proj.weight", "k_proj.weight", "v_proj.weight"),
    "gate_up_proj.weight": ("gate_proj.weight", "up_proj.weight"),
    "in_proj.weight": tuple(f"in_proj_{part}.weight" for part in ("qkv", "z", "b", "a")),
    "gates.A_log": ("A_log",),
    "gates.dt_bias": ("dt_bias",),
}


def make(name: str, folder: Path, dtype: torch.dtype = torch.float32, **overrides: Any) -> Path:
    makers = {
        "qwen3_5_moe": make_qwen3_5_moe,
        "qwen3_next": make_qwen3_next,
        "multimodal": make_multimodal,
    }
    if name in makers:
        return makers[name](folder, dtype, **overrides)
    return make_qwen3_5(folder, dtype, tied=name.endswith("-tied"), **overrides)


def load_ours(folder: Path, **options: Any) -> torch.nn.Module:
    """Our module, filled here by hand: the tests of weights_conv are elsewhere."""
    spec, config = read_config(folder)
    model = load_object(spec.model)(config, dtype=config.torch_dtype, **options)
    tensors = in_text_form(load_file(folder / "model.safetensors"), config)

    def fused(name: str) -> Tensor:
        if name in tensors and name.startswith(("mtp.", "visual.")):
            return tensors[name]
        name = name.replace("shared_experts", "shared_expert")
        if name.endswith(("experts.gate_up_proj", "experts.down_proj")):
            stem, whole = name.rsplit(".", 1)
            parts = ("gate_proj", "up_proj") if whole == "gate_up_proj" else ("down_proj",)
            experts = range(config.num_experts)
            rows = [[tensors[f"{stem}.{e}.{p}.weight"] for p in parts] for e in experts]
            return torch.stack([torch.cat(own) for own in rows])
        for whole, parts in _FUSED.items():
            if name.endswith("." + whole):
                return torch.cat([tensors[name.removesuffix(whole) + part] for part in parts])
        return tensors[name]

    state = model.state_dict()
    model.load_state_dict({name: fused(name).to(x.dtype) for name, x in state.items()})
    return model


def in_text_form(tensors: dict[str, Tensor], config: Any) -> dict[str, Tensor]:
    """The tensors of any of these checkpoints under the names of Qwen3.5's text models."""
    found = {}
    for name, tensor in tensors.items():
        stem, _, part = name.rpartition("in_proj_")
        if part in ("qkvz.weight", "ba.weight"):
            key, value = config.linear_key_head_dim, config.linear_value_head_dim
            heads = config.linear_num_value_heads // config.linear_num_key_heads
            rows = [key, key, heads * value, heads * value] if "z" in part else [heads, heads]
            pieces = [[] for _ in rows]
            for head in tensor.split(sum(rows)):
                for kept, piece in zip(pieces, head.split(rows), strict=True):
                    kept.append(piece)
            whole = [torch.cat(kept) for kept in pieces]
            if "z" in part:
                whole = [torch.cat(whole[:3]), whole[3]]
            names = ("qkv", "z") if "z" in part else ("b", "a")
            found |= {f"{stem}in_proj_{n}.weight": t for n, t in zip(names, whole, strict=True)}
        else:
            name = name.replace("model.language_model.", "model.").replace("model.visual", "visual")
            found[name] = tensor
    return found


def load_theirs(folder: Path, dtype: torch.dtype) -> torch.nn.Module:
    """transformers' model with the same tensors."""
    import transformers

    raw = json.loads((folder / "config.json").read_text())
    model_class = getattr(transformers, raw.pop("architectures")[0])
    config = model_class.config_class(**raw, attn_implementation="eager")
    model = model_class(config).eval()
    tensors = load_file(folder / "model.safetensors")
    tensors = {name: x for name, x in tensors.items() if not name.startswith("mtp.")}
    missing, left_over = model.load_state_dict(tensors, strict=False)
    assert not left_over
    assert missing == (["lm_head.weight"] if config.tie_word_embeddings else [])
    return model.to(dtype)


class Engine:
    """The memory of an engine: pages and states of each layer, NaN wherever nobody wrote.

    A rank's, where the model is one of several.
    """

    def __init__(self, model: torch.nn.Module, lengths: list[int], block_size: int = 16):
        config, ranks = model.config, model.layout.tensor.size
        heads = max(1, config.num_key_value_heads // ranks)
        dim, dtype = config.head_dim, config.torch_dtype
        self.model, self.device = model, next(model.parameters()).device
        at = {"order": (1, 0, 2, 3), "device": self.device}
        self.pages = [
            Pages(lengths, heads, dim, block_size, dtype, **at)
            for _ in config.layers_of("full_attention")
        ]
        count = len(lengths)
        self.states = [
            [
                torch.full((count + 3, *shape), torch.nan, dtype=of, device=self.device)
                for shape, of in state_layout(config, dtype, self.device.type, ranks)
            ]
            for _ in config.layers_of("linear_attention")
        ]
        # another order in each layer, as vLLM's groups of layers have
        self.slots = [
            torch.randperm(count + 3, generator=torch.Generator().manual_seed(i))[:count]
            .int()
            .to(self.device)
            for i in range(len(self.states))
        ]
        self.done = [0] * count

    def step(self, new: dict[int, Tensor]) -> Tensor:
        """Token ids by sequence -> hidden states of all of them, [T, H]."""
        sequences = list(new)
        starts = [self.done[i] for i in sequences]
        ends = [self.done[i] + len(new[i]) for i in sequences]
        for i, end in zip(sequences, ends, strict=True):
            self.done[i] = end
        spans = list(zip(sequences, starts, ends, strict=True))
        batch = Batch(
            cu_seqlens_q=bounds([len(ids) for ids in new.values()]).to(self.device),
            seq_lens=torch.tensor(ends, dtype=torch.int32, device=self.device),
            max_seqlen_q=max(len(ids) for ids in new.values()),
            max_seqlen_k=max(ends),
            paged=PagedKV(
                caches=[p.cache for p in self.pages],
                block_table=self.pages[0].block_table[sequences],
                slot_mapping=torch.cat([self.pages[0].slots(*span) for span in spans]),
            ),
            states=PagedStates(self.states, [slots[sequences] for slots in self.slots]),
        )
        positions = torch.cat([torch.arange(start, end) for _, start, end in spans])
        return self.model(torch.cat(list(new.values())), positions.to(self.device), batch)
