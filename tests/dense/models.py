"""Tiny models of every dense architecture, each beside the transformers model with its tensors."""

import json
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file
from torch import Tensor

from isomodels.batch import Batch, PagedKV
from isomodels.config import read_config
from isomodels.registry import load_object
from tests.checkpoints import make_mimo, make_qwen3
from tests.kernel.pages import Pages

ARCHITECTURES = ["qwen3", "qwen3-tied", "mimo"]


def make(name: str, folder: Path, dtype: torch.dtype = torch.float32, **overrides: Any) -> Path:
    if name == "mimo":
        return make_mimo(folder, dtype, **overrides)
    return make_qwen3(folder, dtype, tied=name == "qwen3-tied", **overrides)


def load_ours(folder: Path, **options: Any) -> torch.nn.Module:
    """Our module, filled here by hand: the tests of weights_conv are elsewhere."""
    spec, config = read_config(folder)
    model = load_object(spec.model)(config, dtype=config.torch_dtype, **options)
    tensors = load_file(folder / "model.safetensors")

    def fused(name: str) -> Tensor:
        for whole, parts in (("qkv_proj", "qkv"), ("gate_up_proj", ("gate", "up"))):
            if whole in name and "mtp_layers" not in name:
                names = [name.replace(whole, f"{part}_proj") for part in parts]
                return torch.cat([tensors[part] for part in names])
        return tensors[name]

    state = {name: fused(name) for name in model.state_dict()}
    model.load_state_dict(state, strict=True)
    return model


def load_theirs(folder: Path, dtype: torch.dtype) -> torch.nn.Module:
    """transformers' model with the same tensors: MiMo without MTP is a Qwen2."""
    from transformers import Qwen2Config, Qwen2ForCausalLM, Qwen3Config, Qwen3ForCausalLM

    raw = json.loads((folder / "config.json").read_text())
    mimo = raw.pop("architectures") == ["MiMoForCausalLM"]
    for field in ("model_type", "torch_dtype", "transformers_version"):
        raw.pop(field)
    config_class, model_class = (
        (Qwen2Config, Qwen2ForCausalLM) if mimo else (Qwen3Config, Qwen3ForCausalLM)
    )
    config = config_class(**raw, attn_implementation="eager")
    model = model_class(config).eval()
    tensors = load_file(folder / "model.safetensors")
    tensors = {name: x for name, x in tensors.items() if "mtp_layers" not in name}
    missing, left_over = model.load_state_dict(tensors, strict=False)
    assert not left_over
    assert missing == (["lm_head.weight"] if config.tie_word_embeddings else [])
    return model.to(dtype)


def tokens(count: int, vocab: int = 512, seed: int = 0) -> Tensor:
    return torch.randint(0, vocab, (count,), generator=torch.Generator().manual_seed(seed))


def bounds(lengths: list[int]) -> Tensor:
    return torch.tensor([0, *lengths]).cumsum(0).int()


def run_packed(model: torch.nn.Module, ids: Tensor, lengths: list[int] | None = None, **options):
    """Hidden states [T, H] of whole sequences along one axis."""
    cu_seqlens = bounds(lengths or [len(ids)]).to(ids.device)
    return model(ids, Batch.positions(cu_seqlens), Batch.packed(cu_seqlens), **options)


class Engine:
    """The memory of an engine: pages of each layer; a step gives tokens to some sequences."""

    def __init__(self, model: torch.nn.Module, lengths: list[int], block_size: int = 16):
        config = model.config
        heads, dim, dtype = config.num_key_value_heads, config.head_dim, config.torch_dtype
        self.model, self.device = model, next(model.parameters()).device
        at = {"order": (1, 0, 2, 3), "device": self.device}
        self.pages = [
            Pages(lengths, heads, dim, block_size, dtype, **at)
            for _ in range(config.num_hidden_layers)
        ]
        self.done = [0] * len(lengths)

    def step(self, new: dict[int, Tensor]) -> Tensor:
        """Token ids by sequence -> hidden states of all of them, [T, H]."""
        return self.model(*self.prepared(new))

    def prepared(self, new: dict[int, Tensor]) -> tuple[Tensor, Tensor, Batch]:
        """What the model is given in a step: ids, positions and the batch."""
        pages, sequences = self.pages[0], list(new)
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
                block_table=pages.block_table[sequences],
                slot_mapping=torch.cat([pages.slots(*span) for span in spans]),
            ),
        )
        positions = torch.cat([torch.arange(start, end) for _, start, end in spans])
        return torch.cat(list(new.values())), positions.to(self.device), batch
